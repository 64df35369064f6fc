"""Help pages as text, made from the tables of commands and options: the only renderer, with or without a parser.

Imports neither typer nor rich, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from specbatch import __version__
from specbatch.commands import BY_COMMAND, COMMANDS, CommandSpec
from specbatch.options import PANELS, OptionSpec

SUMMARY = "Offline batch inference over Parquet: speculative decoding exactly when it pays."
EXIT_CODES = (
    ("0", "every row done"),
    ("3", "done, some rows ended with a row error"),
    ("4", "stopped: more row errors than allowed"),
    ("5", "--max-duration reached; the next start continues"),
    ("2", "usage, settings or schema (found before a model is loaded)"),
    ("10", "input missing"),
    ("11", "another run holds the output"),
    ("12", "the output belongs to another run"),
    ("13", "disk full, out of memory, no device"),
    ("130, 143", "after INT or TERM, drained"),
    ("1", "anything unexpected"),
)
_ROOT_OPTIONS = (
    ("--version", "Print the version."),
    ("--install-completion", "Complete commands and options in this shell."),
    ("-h, --help", "This page; `specbatch COMMAND --help` for more."),
)


def quick_answer(args: Sequence[str]) -> str | None:
    """The answer to `--help`, `COMMAND --help`, `--version` or nothing at all; None: the parser must look at it."""
    if list(args) in ([], ["--help"], ["-h"], ["help"]):
        return root_help(Style.of(sys.stdout))
    if list(args) == ["--version"]:
        return version_line()
    if len(args) == 2 and args[0] in BY_COMMAND and args[1] in ("--help", "-h"):
        return command_help(BY_COMMAND[args[0]], Style.of(sys.stdout))
    if len(args) == 2 and args[0] == "help" and args[1] in BY_COMMAND:
        return command_help(BY_COMMAND[args[1]], Style.of(sys.stdout))
    return None


def version_line() -> str:
    """ "specbatch 0.1.0"."""
    return f"specbatch {__version__}"


class Style:
    """Width and colour of one page."""

    def __init__(self, width: int = 80, colour: bool = False) -> None:
        self.width = max(width, 20)
        self.colour = colour

    @staticmethod
    def of(stream: TextIO | None) -> Style:
        """What the stream can show; COLUMNS, NO_COLOR and TERM=dumb are respected."""
        try:
            is_terminal = stream is not None and stream.isatty()
            columns = os.get_terminal_size(stream.fileno()).columns if stream is not None and is_terminal else 80
        except (OSError, ValueError):
            is_terminal, columns = False, 80
        given = os.environ.get("COLUMNS", "")
        width = int(given) if given.isdecimal() and int(given) > 0 else columns
        dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
        return Style(min(width, 110), is_terminal and not dumb and not os.environ.get("NO_COLOR"))

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text

    def key(self, text: str) -> str:
        return f"\x1b[36m{text}\x1b[0m" if self.colour else text

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self.colour else text


def root_help(style: Style) -> str:
    """The page of `specbatch --help`."""
    lines = [*_wrapped(SUMMARY, style), "", style.bold("Usage: ") + "specbatch COMMAND [OPTIONS] ...", ""]
    lines += [style.bold("Commands"), *_table([(c.name, c.summary) for c in COMMANDS], style), ""]
    lines += [style.bold("Options"), *_table(_ROOT_OPTIONS, style), ""]
    lines += [style.bold("Examples"), *_examples([e for c in COMMANDS for e in c.examples[:1]], style)]
    return "\n".join(lines)


def command_help(command: CommandSpec, style: Style) -> str:
    """The page of one command: usage, examples, options by panel, exit codes."""
    usage = " ".join(part for part in (f"specbatch {command.name}", "[OPTIONS]", command.argument) if part)
    lines = [*_wrapped(command.summary, style), "", style.bold("Usage: ") + usage, ""]
    if command.argument:
        lines += [*_table([(command.argument, command.argument_help)], style, _column(command)), ""]
    if command.examples:
        lines += [style.bold("Examples"), *_examples(command.examples, style), ""]
    own = [option.panel for option in command.options if option.panel not in PANELS]
    panels = [p for p in (*dict.fromkeys(own), *PANELS) if any(o.panel == p for o in command.options)]
    for panel in panels:
        rows = [(_left(option), _right(option)) for option in command.options if option.panel == panel]
        if panel == panels[-1]:
            rows.append(("-h, --help", "This page."))
        lines += [style.bold(panel), *_table(rows, style, _column(command)), ""]
    if command.name == "run":
        lines += [style.bold("Exit codes"), *_table(EXIT_CODES, style, 10), ""]
        note = (
            "Any option can also be a variable (SPECBATCH_MAX_TOKENS=256) or a line of a TOML file given with --config "
            "(max-tokens = 256). The command line wins over variables, variables over the file."
        )
        lines += _wrapped(note, style)
    return "\n".join(lines).rstrip("\n")


def _column(command: CommandSpec) -> int:
    """One width for the names of all panels; the few longer ones stand on a line of their own."""
    return min(max(len(_left(option)) for option in command.options), 30)


def _left(option: OptionSpec) -> str:
    names = ", ".join(n for n in (option.short, f"--no-{option.name}" if option.off else option.flag) if n)
    if option.kind == "switch":
        return names
    return f"{names} {option.metavar or 'WHICH'}"


def _right(option: OptionSpec) -> str:
    again = " Again for more." if option.kind in ("list", "paths", "ints", "biases") else ""
    choices = f" ({', '.join(option.choices)})" if option.choices else ""
    return option.help + again + choices + (f" [{option.default}]" if option.default else "")


def _wrapped(text: str, style: Style, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, style.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    ) or [""]


def _table(rows: Sequence[tuple[str, str]], style: Style, least: int = 0) -> list[str]:
    """Names left, words right; a name too long for its column, or a narrow page, puts the words on the next line."""
    left = least or min(max(len(name) for name, _ in rows), 32)
    narrow = style.width < left + 30
    lines: list[str] = []
    for name, words in rows:
        if narrow or len(name) > left:
            lines.append("  " + style.key(name))
            lines += _wrapped(words, style, "      " if narrow else " " * (left + 4))
            continue
        body = textwrap.wrap(words, style.width - left - 4, break_on_hyphens=False) or [""]
        lines.append("  " + style.key(name) + " " * (left - len(name) + 2) + body[0])
        lines += [" " * (left + 4) + more for more in body[1:]]
    return lines


def _examples(examples: Sequence[tuple[str, str]], style: Style) -> list[str]:
    return [line for command, words in examples for line in (style.dim(f"  # {words}"), f"  {command}")]
