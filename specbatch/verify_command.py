"""`specbatch verify`: rows of a finished output, made again without speculation in one batch, and compared.

Owns the verdicts and how they are told. The measure of a near tie is in engine/ties.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from specbatch.commands import VERIFY
from specbatch.errors import ExitCode, UsageError
from specbatch.streams import SafeStream, printable
from specbatch.values import parse_value
from specbatch.wording import plural

if TYPE_CHECKING:
    from specbatch.job.recheck import Recorded
    from specbatch.requests import FinishedRows

SCHEMA_VERSION: Final = 1
IDENTICAL, TIE, STRUCTURAL = "identical", "tie", "structural"
# Logits that differ by less than this are the same as far as arithmetic in another order goes.
TIE_MARGIN: Final = {"float32": 0.002, "bfloat16": 0.25, "float16": 0.05}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row."""

    file: str
    row: int
    shard: int
    verdict: str
    token: int | None = None  # output token at which the answers part
    recorded: str = ""  # what the output has there, and
    again: str = ""  # what came out now
    margin: float | None = None  # of the logits
    why: str = ""


def verify(given: Mapping[str, Any], outputs: Sequence[str]) -> int:
    """Check and tell. Exit code 1 when a row differs by more than a tie. Raises SpecbatchError as a run does."""
    own: dict[str, Any] = {
        option.field: parse_value(option, given[option.name], option.flag)
        for option in VERIFY.options
        if given[option.name] is not None
    }
    if own.get("sample", 1) < 1:
        raise UsageError(f"--sample must be at least 1, got {own['sample']}")
    try:
        return _verify(Path(outputs[0]), own)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _verify(output: Path, own: Mapping[str, Any]) -> int:
    from specbatch.engine_options import EngineOptions
    from specbatch.job.options import EngineContext
    from specbatch.job.recheck import load_manifest, open_plan, recorded_options, sample_rows
    from specbatch.job.row_requests import merge
    from specbatch.target import make_target

    stderr, stdout = SafeStream(sys.stderr), SafeStream(sys.stdout)
    manifest = load_manifest(output)
    known = manifest.fingerprint
    if manifest.target == "stand-in":
        raise UsageError(f"{output} was made by the test engine: there is no model to ask again")
    options = recorded_options(manifest, output)
    if known["verification"] == "rejection" and not options.sampling.is_greedy:
        hint = "only --verification coupled, the default, gives answers that do not depend on drafts"
        raise UsageError("sampled answers under --verification rejection cannot be made again", hint=hint)
    length = known["max_model_len"]
    built_in = manifest.target == "built-in" and "model" not in own
    template = own.get("chat_template")
    engine_options = EngineOptions(
        model=None if built_in else str(own.get("model", manifest.engine.get("model"))),
        chat_template=None if template is None else Path(str(template)).read_text(encoding="utf-8"),
        device=str(own.get("device", "auto")),
        dtype=known["dtype"],
        quantize=known["quantize"],
        verification=known["verification"],
        speculate="off",
        max_model_len=None if length == "model" else int(length),
        max_num_seqs=own.get("max_num_seqs"),
        threads=own.get("threads"),
        seed=options.seed,
    )  # fmt: skip
    target, make_engine = make_target(engine_options)
    plan = open_plan(options, target, manifest)
    rows = sample_rows(plan, manifest, own.get("sample", 100), own.get("seed", 0))
    if not rows:
        raise UsageError(f"{output} has no row with an answer")
    context = EngineContext(lambda entry: None, manifest.resolved, len(rows), lambda name: stderr.line(f"{name} ..."))
    engine: Any = make_engine(context)
    stderr.line(f"making {plural(len(rows), 'row')} again without speculation ...")
    engine.add(merge([_numbered(row.request, i) for i, row in enumerate(rows)]))
    again: dict[int, Again] = {}
    while engine.num_unfinished:
        engine.step()
        if (done := engine.take_finished()) is not None:
            again |= _answers(done)
    dtype = str(engine.describe()["dtype"])
    margin = float(own.get("tie_margin", TIE_MARGIN[dtype]))
    verdicts = _judge(engine, plan.tokenizer.get, rows, [again[i] for i in range(len(rows))], margin)
    engine.close()
    counts = {name: sum(v.verdict == name for v in verdicts) for name in (IDENTICAL, TIE, STRUCTURAL)}
    code = ExitCode.UNEXPECTED if counts[STRUCTURAL] else ExitCode.OK
    if own.get("json"):
        different = [asdict(v) for v in verdicts if v.verdict != IDENTICAL]
        content = {"schema_version": SCHEMA_VERSION, "output": str(output), "rows": len(rows), **counts}
        stdout.line(json.dumps({**content, "tie_margin": margin, "dtype": dtype, "different": different}))
    else:
        for line in report_lines(verdicts, counts, margin):
            stdout.line(printable(line))
    stdout.require_delivered()
    return code


@dataclass(frozen=True, slots=True)
class Again:
    """What came out now."""

    token_ids: tuple[int, ...]
    text: str
    reason: int
    error: str | None


def _numbered(request: Any, number: int) -> Any:
    """The same request under another id: seeds that come from ids are kept."""
    import numpy as np

    from specbatch.requests import RequestBatch

    ids = np.array([number], np.int64)
    return RequestBatch(ids, 0, request.prompt_values, request.prompt_offsets, request.params, request.seeds)


def _answers(done: FinishedRows) -> dict[int, Again]:
    found = {}
    for i, number in enumerate(done.request_id.tolist()):
        ids = done.token_values[done.token_offsets[i] : done.token_offsets[i + 1]].tolist()
        text = done.text_values[done.text_offsets[i] : done.text_offsets[i + 1]].tobytes().decode()
        error = done.error[i]
        found[number] = Again(tuple(ids), text, int(done.finish_reason[i]), None if error is None else error[1])
    return found


def _judge(
    engine: Any, tokenizer: Any, rows: Sequence[Recorded], again: Sequence[Again], margin: float
) -> list[Verdict]:
    from specbatch.engine.ties import Answer, TieFinder, ended_by_token

    finder: TieFinder | None = None
    verdicts = []
    for row, now in zip(rows, again, strict=True):
        place = (row.file, row.row, row.shard)
        same = now.text == row.text and now.reason == row.reason and len(now.token_ids) == row.tokens
        if same and row.token_ids in (None, now.token_ids):
            verdicts.append(Verdict(*place, IDENTICAL))
            continue
        if now.error is not None:
            verdicts.append(Verdict(*place, STRUCTURAL, why=f"it ends with an error now: {now.error}"))
            continue
        finder = finder or TieFinder(engine.parts, tokenizer.byte_table, tokenizer.eos_token_ids)
        other = Answer(row.text.encode(), ended_by_token(row.reason), row.token_ids)
        parting = finder.parting(row.request, now.token_ids, other)
        if parting is None:
            why = "no single token explains the difference"
            verdicts.append(Verdict(*place, STRUCTURAL, why=why))
            continue
        recorded, chosen = (finder.vocabulary[t].decode("utf-8", "replace") for t in (parting.other, parting.chosen))
        verdict = TIE if parting.margin <= margin else STRUCTURAL
        verdicts.append(Verdict(*place, verdict, parting.index, recorded, chosen, parting.margin))
    return verdicts


def report_lines(verdicts: Sequence[Verdict], counts: Mapping[str, int], margin: float) -> list[str]:
    """For people."""
    lines = [
        f"{plural(len(verdicts), 'row')} made again without speculation: {counts[IDENTICAL]} identical, "
        f"{counts[TIE]} tie, {counts[STRUCTURAL]} structural"
    ]
    for v in verdicts:
        if v.verdict == IDENTICAL:
            continue
        where = f"  {v.verdict}: row {v.row} of {v.file}"
        if v.token is None:
            lines.append(f"{where}: {v.why}")
        else:
            lines.append(f"{where}: token {v.token} is {v.recorded!r}, now {v.again!r}; logits {v.margin:.3g} apart")
    if counts[TIE] or counts[STRUCTURAL]:
        lines.append(f"a tie: logits less than {margin:g} apart, which arithmetic in another order may turn around")
    return lines
