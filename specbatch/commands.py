"""The commands: name, what they do, arguments, options and examples. The help pages and the parser are made from this.

Cheap to import. A command is listed only when the module that does its work is in the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from specbatch.options import BY_NAME, RUN_OPTIONS, OptionSpec


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """One command of the program."""

    name: str
    summary: str
    argument: str  # metavar; "" for none; "..." at its end: several
    argument_help: str
    options: tuple[OptionSpec, ...]
    examples: tuple[tuple[str, str], ...]  # (command line, what it is for)
    required: bool = True

    @property
    def several(self) -> bool:
        return self.argument.endswith("...")


_JSON: Final = OptionSpec("json", "Options", "switch", "json", "As one JSON object.")

RUN: Final = CommandSpec(
    "run",
    "Complete every prompt of a table with a local model.",
    "INPUT...",
    "Parquet files, directories (partitioned ones too), globs, or JSON lines in the OpenAI batch shape.",
    RUN_OPTIONS,
    (
        ("specbatch run prompts.parquet", "the built-in model; answers in prompts.out/"),
        ("specbatch run prompts.parquet -o answers -m ./Qwen3-8B --draft-model ./Qwen3-0.6B", "your own models"),
        ("specbatch run 'in/*.parquet' -o out --template 'Summarise: {body}' --max-tokens 256", "prompts from columns"),
        ("specbatch run prompts.parquet --limit 100 --dry-run", "look before you leap"),
        ("specbatch run --config night.toml --max-duration 6h --json", "from cron; see docs/cron.md"),
    ),
    required=False,
)
INSPECT: Final = CommandSpec(
    "inspect",
    "Say what a run did, from its output directory.",
    "OUT",
    "Output directory of a run, finished or not.",
    (
        OptionSpec("decisions", "Options", "switch", "decisions", "Every change of mode, with its reason."),
        _JSON,
    ),
    (
        ("specbatch inspect prompts.out", "rows, errors, shards, speed"),
        ("specbatch inspect prompts.out --decisions", "when speculation went on and off, and why"),
    ),
)

PLAN: Final = CommandSpec(
    "plan",
    "Say what speculation would do for a pair of models on a GPU, by arithmetic alone.",
    "",
    "",
    (
        OptionSpec("model", "Models", "text", "model", "Folder with a config.json; no weights are needed.", "DIR",
                   "the built-in pair", short="-m"),
        OptionSpec("draft-model", "Models", "text", "draft_model", "The same of the draft; without: n-gram.", "DIR"),
        OptionSpec("dtype", "Models", "choice", "dtype", "Of weights and KV.", "TYPE", "bfloat16",
                   choices=("float32", "bfloat16", "float16", "int8")),
        OptionSpec("gpu", "Machine", "text", "gpu", "By its data sheet: h100, h200, a100, l4, rtx4090 ...", "NAME",
                   "h100"),
        OptionSpec("gpus", "Machine", "int", "gpus", "As many of them, split without loss.", "N", "1"),
        OptionSpec("headroom", "Machine", "share", "headroom", "Share of the memory left alone.", "SHARE"),
        OptionSpec("context", "Workload", "int", "context", "Tokens a row holds on average.", "N", "1024"),
        OptionSpec("block-size", "Workload", "int", "block_size", "Tokens a page.", "N", "16"),
        OptionSpec("plot", "Options", "path", "plot", "Write a picture: .svg, .png or .pdf.", "FILE"),
        OptionSpec("html", "Options", "path", "html", "Write everything as one page.", "FILE"),
        _JSON,
    ),
    (
        ("specbatch plan -m Qwen3-8B --draft-model Qwen3-0.6B --gpu h100", "does this draft pay, up to how many rows?"),
        ("specbatch plan -m Llama-2-70b --gpus 4 --gpu a100 --context 2048 --html plan.html", "as a page"),
    ),
)  # fmt: skip
BENCH: Final = CommandSpec(
    "bench",
    "Measure tokens a second on your prompts: rows at once x speculator x k, and auto beside them.",
    "INPUT...",
    "Prompts, as for run. Nothing is written beside the figures.",
    (
        OptionSpec("rows-at-once", "Measured", "ints", "rows_at_once", "Live rows to measure at.", "N,N", "1,8,64"),
        OptionSpec("speculators", "Measured", "columns", "speculators", "Of off, ngram, draft, auto.", "A,B",
                   "all there are"),
        OptionSpec("k", "Measured", "ints", "k", "Drafts a step, for every forced speculator.", "K,K",
                   "ngram 1,2,4,8; draft 1,2,4"),
        OptionSpec("rounds", "Measured", "int", "rounds", "Every setting is run so often, in turn; medians count.", "N",
                   "3"),
        OptionSpec("prompts", "Measured", "int", "prompts", "Rows of one measurement.", "N", "as many as run at once"),
        OptionSpec("synthetic-acceptance", "Measured", "floats", "synthetic",
                   "Make acceptance up (by draft position), to time a draft you do not have.", "P,P"),
        OptionSpec("save", "Measured", "path", "save", "Write NAME.json, NAME.md and NAME.svg.", "NAME", "INPUT.bench"),
        OptionSpec("plot", "Measured", "path", "plot", "The picture elsewhere: .svg, .png or .pdf.", "FILE"),
        *(BY_NAME[name] for name in (
            "prompt-column", "messages-column", "template", "chat", "system", "chat-template", "params-column",
            "max-tokens", "temperature", "top-k", "top-p", "min-p", "seed", "ignore-eos",
            "model", "draft-model", "device", "dtype", "quantize", "attention", "threads", "profile",
            "max-num-batched-tokens", "max-model-len", "kv-memory", "block-size", "prefix-cache", "json",
        )),
    ),
    (
        ("specbatch bench prompts.parquet", "the built-in pair on your prompts"),
        ("specbatch bench prompts.parquet -m ./Qwen3-8B --draft-model ./Qwen3-0.6B --rows-at-once 1,16,256", "your pair"),
        ("specbatch bench prompts.parquet --synthetic-acceptance 0.75", "what a better draft would bring"),
    ),
)  # fmt: skip
VERIFY: Final = CommandSpec(
    "verify",
    "Make rows of a finished output again without speculation, and compare.",
    "OUT",
    "Output directory of a run.",
    (
        OptionSpec("sample", "Options", "int", "sample", "Rows to look at, at random.", "N", "100"),
        OptionSpec("seed", "Options", "int", "seed", "Of the choice of rows.", "N", "0"),
        OptionSpec("tie-margin", "Options", "float", "tie_margin", "Logits less than this apart are a tie.", "X",
                   "0.002 in float32"),
        OptionSpec("model", "Options", "text", "model", "Where the model is now.", "DIR", "as recorded", short="-m"),
        OptionSpec("chat-template", "Options", "path", "chat_template", "Jinja file, if the run had one.", "FILE"),
        OptionSpec("device", "Options", "text", "device", "Where to run: auto, cpu, cuda or cuda:N.", "DEVICE", "auto"),
        OptionSpec("threads", "Options", "int", "threads", "CPU threads of the model.", "N", "the cores given to it"),
        OptionSpec("max-num-seqs", "Options", "int", "max_num_seqs", "Rows running at once.", "N"),
        _JSON,
    ),
    (("specbatch verify prompts.out --sample 100", "identical, tie or structural; exit code 1 for structural"),),
)  # fmt: skip
DOCTOR: Final = CommandSpec(
    "doctor",
    "Try what works on this machine: devices, attention backends, graphs, speculation.",
    "",
    "",
    (
        OptionSpec("self-test", "Options", "switch", "self_test", "Leave out the test of speculation.", off=True),
        _JSON,
    ),
    (("specbatch doctor", "before the first night on a new machine"),),
)

COMMANDS: Final[tuple[CommandSpec, ...]] = (RUN, INSPECT, VERIFY, PLAN, BENCH, DOCTOR)
BY_COMMAND: Final[dict[str, CommandSpec]] = {command.name: command for command in COMMANDS}
