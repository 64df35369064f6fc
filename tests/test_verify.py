"""`specbatch verify`: rows made again from the record of a run alone, and how near a difference is measured to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from specbatch.cli import main
from specbatch.engine.ties import LARGEST, Answer, TieFinder
from specbatch.models.tokenizer import HFTokenizer
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams
from tests.driving import add, finish, make_engine
from tests.tiny import write_llama


def table(folder: Path, rows: int = 8) -> Path:
    path = folder / "in.parquet"
    pq.write_table(pa.table({"text": [f"row {i} " * (1 + i % 3) for i in range(rows)], "n": list(range(rows))}), path,
                   row_group_size=3)  # fmt: skip
    return path


def run(target: Path, draft: Path, folder: Path, *options: str, rows: int = 8) -> Path:
    output = folder / "out"
    code = main(
        ["run", str(table(folder, rows)), "-o", str(output), "-m", str(target), "--draft-model", str(draft),
         "--dtype", "float32", "--threads", "1", "--kv-memory", "8MiB", "--no-profile", "--progress", "none",
         "--max-tokens", "12", "--shard-rows", "3", *options]
    )  # fmt: skip
    assert code in (0, 3)
    return output


def verify(output: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["verify", str(output), "--threads", "1", "--json", *options])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {"error": err}


@pytest.mark.parametrize(
    "options",
    [
        ("--speculate", "draft", "-k", "3"),
        (
            "--temperature",
            "1",
            "--top-p",
            "0.9",
            "--seed",
            "7",
            "-n",
            "2",
            "--template",
            "Say: {text}",
            "--chat",
            "off",
        ),
        ("--temperature", "0.8", "--frequency-penalty", "0.5", "--stop", "a", "--output-token-ids"),
        ("--prompt-column", "text", "--keep-columns", "n", "--output-prefix", "new_", "--logit-bias", "65=1"),
    ],
)
def test_what_speculation_made_comes_out_again(
    options: tuple[str, ...], tiny_target: Path, tiny_draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run(tiny_target, tiny_draft, tmp_path, *options)
    code, told = verify(output, capsys, "--sample", "5")
    assert code == 0, told
    assert (told["rows"], told["identical"], told["tie"], told["structural"]) == (5, 5, 0, 0)
    code, told = verify(output, capsys)
    assert (code, told["rows"], told["identical"]) == (0, 8, 8)


def tamper(output: Path, part: str, change: Any) -> None:
    """Rewrite one part with its table changed, as a defect of the engine would have written it."""
    path = output / part
    content = pq.read_table(path)
    rows = content.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, content.schema), path)


def test_an_answer_that_the_model_would_not_give_is_structural(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run(tiny_target, tiny_draft, tmp_path, "--output-token-ids")

    def change(rows: list[dict[str, Any]]) -> None:
        ids = rows[1]["completion_token_ids"]
        ids[4] = (ids[4] + 1) % 200
        rows[2]["completion_token_ids"] = rows[2]["completion_token_ids"][:-1]
        rows[2]["completion_tokens"] -= 1

    tamper(output, "part-00001.parquet", change)
    code, told = verify(output, capsys)
    assert (code, told["identical"], told["structural"]) == (1, 6, 2)
    assert {(d["row"], d["shard"]) for d in told["different"]} == {(4, 1), (5, 1)}
    parted = next(d for d in told["different"] if d["row"] == 4)
    assert parted["token"] == 4
    assert parted["margin"] > told["tie_margin"]
    assert "no single token" in next(d for d in told["different"] if d["row"] == 5)["why"]
    assert main(["verify", str(output), "--threads", "1"]) == 1
    assert "6 identical, 0 tie, 2 structural" in capsys.readouterr().out
    code, told = verify(output, capsys, "--tie-margin", "60")  # nothing but the margin makes it one
    assert (code, told["tie"], told["structural"]) == (1, 1, 1)


def test_rows_without_an_answer_are_passed_over(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.parquet"
    output = tmp_path / "out"
    pq.write_table(pa.table({"prompt": ["a", "", None, "long " * 400, "b", "c"]}), path)
    common = ["-m", str(tiny_target), "--dtype", "float32", "--threads", "1", "--kv-memory", "8MiB", "--no-profile"]
    assert main(["run", str(path), "-o", str(output), *common, "--max-tokens", "6", "--progress", "none"]) == 3
    code, told = verify(output, capsys)
    assert (code, told["rows"], told["identical"]) == (0, 3, 3)
    assert verify(output, capsys, "--sample", "2")[1]["rows"] == 2


def test_what_cannot_be_compared_is_refused(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tmp_path, capsys)[0] == 10
    output = run(tiny_target, tiny_draft, tmp_path)
    other = write_llama(tmp_path / "other", seed=9)
    code, told = verify(output, capsys, "--model", str(other))
    assert code == 12
    assert "another model" in told["error"]
    assert verify(output, capsys, "--sample", "0")[0] == 2
    pq.write_table(pa.table({"text": ["edited"] * 8, "n": list(range(8))}), tmp_path / "in.parquet")
    code, told = verify(output, capsys)
    assert code == 12
    assert "was edited" in told["error"]
    hot = tmp_path / "hot"
    hot.mkdir()
    sampled = run(tiny_target, tiny_draft, hot, "--verification", "rejection", "--temperature", "1")
    code, told = verify(sampled, capsys)
    assert code == 2
    assert "depend" in told["error"]


PROMPT = list(b"The quick brown fox")


def request(params: SamplingParams) -> RequestBatch:
    offsets = np.array([0, len(PROMPT)], np.int64)
    return RequestBatch(np.array([3], np.int64), 0, np.array(PROMPT, np.int32), offsets, params)


def test_the_margin_of_a_greedy_choice_is_the_distance_of_its_logits(tiny_target: Path) -> None:
    """Found by ids and by text alone; checked against transformers."""
    from transformers import AutoModelForCausalLM

    params = SamplingParams(max_tokens=10, ignore_eos=True)
    engine = make_engine(tiny_target)
    add(engine, [PROMPT], params, first_id=3)
    tokens = finish(engine)[3].token_ids
    tokenizer = HFTokenizer(tiny_target)
    finder = TieFinder(engine.parts, tokenizer.byte_table, tokenizer.eos_token_ids)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 :]
    for index in (0, 3, 9):
        line = logits[index].clone()
        line[tokens[index]] = -torch.inf
        second = int(line[:256].argmax())
        other = (*tokens[:index], second, 1, 1)
        expected = float(logits[index, tokens[index]] - logits[index, second])
        found = finder.parting(request(params), tokens, Answer(b"", False, other))
        assert found is not None
        assert (found.index, found.chosen, found.other) == (index, tokens[index], second)
        assert found.margin == pytest.approx(expected, abs=1e-3)
        text = tokenizer.byte_table.join((*tokens[:index], second))
        found = finder.parting(request(params), tokens, Answer(text, False))
        assert found is not None
        assert (found.index, found.other) == (index, second)
        assert found.margin == pytest.approx(expected, abs=1e-3)
    assert finder.parting(request(params), tokens, Answer(b"", False, tokens[:5])) is None
    ended = finder.parting(request(params), tokens, Answer(tokenizer.byte_table.join(tokens[:5]), True))
    assert ended is None  # ignore_eos: no token ends this row
    engine.core.check_integrity()
    add(engine, [PROMPT], params, first_id=4)
    assert finish(engine)[4].token_ids == tokens  # the engine is as it was


def test_the_margin_of_a_sampled_choice_counts_its_noise_its_penalties_and_its_truncation(tiny_target: Path) -> None:
    """The token of another seed is far; a change by the margin found, and no less, makes the sampler choose it."""
    params = SamplingParams(
        max_tokens=12, ignore_eos=True, temperature=0.7, top_k=40, frequency_penalty=0.8, seed=5, repetition_penalty=1.2
    )
    engine = make_engine(tiny_target)
    add(engine, [PROMPT], params, first_id=3)
    tokens = finish(engine)[3].token_ids
    tokenizer = HFTokenizer(tiny_target)
    finder = TieFinder(engine.parts, tokenizer.byte_table, tokenizer.eos_token_ids)
    for index in (8,):
        margins = {}
        for other in range(0, 256, 8):
            if other != tokens[index]:
                found = finder.parting(request(params), tokens, Answer(b"", False, (*tokens[:index], other)))
                assert found is not None
                margins[other] = found.margin
        assert len(set(margins.values())) > 8
        nearest = min(margins, key=lambda token: margins[token])
        assert 0.0 < margins[nearest] < LARGEST
        biased = {nearest: margins[nearest] / 2 + 1e-3, tokens[index]: -margins[nearest] / 2 - 1e-3}
        less = {token: bias * 0.98 for token, bias in biased.items()}
        for bias, expected in ((biased, nearest), (less, tokens[index])):
            line = finder._margins(request(params), tokens, [(index, nearest)], finder._row(request(params), params)[1])
            assert line[0] == pytest.approx(margins[nearest], abs=1e-4)
            assert _choice(finder, params, tokens, index, bias) == expected


def _choice(finder: TieFinder, params: SamplingParams, tokens: Any, index: int, bias: dict[int, float]) -> int:
    """The token sampled at `index` when logits are moved by `bias`."""
    from specbatch.engine.sampler import sample

    rows = finder._row(request(params), params)[1]
    ids = np.array([*PROMPT, *tokens[:index]], np.int32)
    logits = finder._logits(ids, [len(ids) - 1])[:, : rows.vocab].clone()
    for token, value in bias.items():
        logits[0, token] += value
    prior = torch.tensor([tokens[:index]], dtype=torch.int32)
    position = torch.tensor([len(ids) - 1], dtype=torch.int32)
    return int(sample(logits, rows, torch.zeros(1, dtype=torch.int64), position, prior_ids=prior).token_ids[0])
