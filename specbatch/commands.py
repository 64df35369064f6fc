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

COMMANDS: Final[tuple[CommandSpec, ...]] = (RUN, INSPECT, DOCTOR)
BY_COMMAND: Final[dict[str, CommandSpec]] = {command.name: command for command in COMMANDS}
