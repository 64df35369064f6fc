"""The commands: name, what they do, arguments, options and examples. The help pages and the parser are made from this.

Cheap to import. A command is listed only when the module that does its work is in the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from specbatch.options import RUN_OPTIONS, OptionSpec


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

COMMANDS: Final[tuple[CommandSpec, ...]] = (RUN, INSPECT, PLAN, DOCTOR)
BY_COMMAND: Final[dict[str, CommandSpec]] = {command.name: command for command in COMMANDS}
