"""The command line: arguments in, exit code out. The only importer of typer.

The commands and their options are tables (commands.py, options.py) and so are the help pages (help.py); what a
command does is in run_command.py and its neighbours, imported when the command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specbatch import help as pages
from specbatch.commands import BY_COMMAND, COMMANDS, CommandSpec
from specbatch.errors import ExitCode, SpecbatchError, UsageError, panics_as_errors
from specbatch.garbage import lasting_objects
from specbatch.options import OptionSpec
from specbatch.streams import SafeStream, printable, silence_broken_streams

if TYPE_CHECKING:
    import typer


COMPLETION = "_SPECBATCH_COMPLETE"  # set by the shell when it asks what a word may become


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code and never raises, but for SystemExit from the interpreter itself."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        page = None if COMPLETION in os.environ else pages.quick_answer(args)
        if page is not None:
            _answer(page)
            return ExitCode.OK
        with panics_as_errors():
            return _dispatch(args)
    except SpecbatchError as error:
        return complain(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        from specbatch.run_command import unexpected

        return complain(unexpected(error))
    finally:
        silence_broken_streams()


def _answer(text: str) -> None:
    """On stdout. Raises ResourceError."""
    stdout = SafeStream(sys.stdout)
    stdout.line(text)
    stdout.require_delivered()


def complain(error: SpecbatchError) -> int:
    """Say what is wrong on stderr, in one or two lines. Returns the exit code."""
    stream = SafeStream(sys.stderr)
    stream.line(f"error: {printable(error.message)}")
    if error.hint:
        stream.line(f"hint: {error.hint}")
    return int(error.exit_code)


def _dispatch(args: list[str]) -> int:
    with lasting_objects():
        import typer

        app = build_app()
    try:
        code = app(args, prog_name="specbatch", standalone_mode=False)
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except SpecbatchError:
        raise
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise _usage_error(error, args) from None
    return int(code) if isinstance(code, int) else ExitCode.OK


def _usage_error(error: Any, args: list[str]) -> UsageError:
    """The parser's complaint in our words, with the page that helps."""
    message = " ".join(str(error.format_message()).split())
    message = message[:1].lower() + message[1:].rstrip(".") if message else "wrong usage"
    known = args[0] if args and args[0] in BY_COMMAND else None
    if known is None and args and not args[0].startswith("-"):
        import difflib

        close = difflib.get_close_matches(args[0], BY_COMMAND, n=1)
        if "." in args[0] or os.path.exists(args[0]):
            return UsageError(f"{args[0]!r} is not a command", hint=f"specbatch run {args[0]}")
        hint = f"did you mean {close[0]!r}?" if close else "the commands are " + ", ".join(BY_COMMAND)
        return UsageError(f"{args[0]!r} is not a command", hint=hint)
    return UsageError(message, hint=f"specbatch {known + ' ' if known else ''}--help lists what there is")


def build_app() -> typer.Typer:
    """The Typer app, made from the table of commands."""
    import typer

    app = typer.Typer(add_completion=True, no_args_is_help=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    def root(context: Any, version: bool = typer.Option(False, "--version", is_eager=True)) -> None:
        if version or context.invoked_subcommand is None:
            text = pages.version_line() if version else pages.root_help(pages.Style.of(sys.stdout))
            _answer(text)
            raise typer.Exit(0)

    root.__annotations__ = {"context": typer.Context, "version": bool}
    names = {"help_option_names": ["--help", "-h"]}
    app.callback(invoke_without_command=True, cls=_group_class(), context_settings=names)(root)
    for command in COMMANDS:
        app.command(
            command.name,
            cls=_command_class(command),
            help=command.summary,
            context_settings=names,
        )(_callback(command))
    return app


def _command_class(command: CommandSpec) -> Any:
    from typer.core import TyperCommand

    class Command(TyperCommand):
        def get_help(self, ctx: Any) -> str:
            return pages.command_help(command, pages.Style.of(sys.stdout))

    return Command


def _group_class() -> Any:
    from typer.core import TyperGroup

    class Group(TyperGroup):
        def get_help(self, ctx: Any) -> str:
            return pages.root_help(pages.Style.of(sys.stdout))

    return Group


def _callback(command: CommandSpec) -> Callable[..., Any]:
    """A function whose signature is the command's table, as Typer wants it; every value arrives as text or a switch."""
    import inspect

    import typer

    names = {_parameter(option): option.name for option in command.options}

    def callback(**values: Any) -> int:
        argument = values.pop("argument_", None)
        items = [] if argument is None else list(argument) if command.several else [argument]
        return _HANDLERS[command.name]({names[key]: value for key, value in values.items()}, items)

    parameters, annotations = [], {}
    if command.argument:
        kind: Any = list[str] | None if command.several else str
        default = typer.Argument(None if command.several else ..., metavar=command.argument)
        parameters.append(inspect.Parameter("argument_", inspect.Parameter.KEYWORD_ONLY, default=default))
        annotations["argument_"] = kind
    for option in command.options:
        name = _parameter(option)
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_declare(option)))
        annotations[name] = _annotation(option)
    callback.__annotations__ = annotations
    callback.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=annotations[p.name]) for p in parameters]
    )
    callback.__name__ = command.name
    return callback


def _parameter(option: OptionSpec) -> str:
    return option.name.replace("-", "_") + "_"


def _annotation(option: OptionSpec) -> Any:
    if option.kind == "switch":
        return bool | None
    return list[str] | None if option.repeats else str | None


def _declare(option: OptionSpec) -> Any:
    import typer

    names = [n for n in (option.short, option.flag, *option.aliases) if n]
    if option.kind == "switch":
        on = "/".join([option.flag, f"--no-{option.name}"])
        names = [on, *(n for n in (option.short,) if n)]
    return typer.Option(None, *names, metavar=option.metavar or None, help=option.help, show_default=False)


def _run(values: dict[str, Any], inputs: list[str]) -> int:
    from specbatch.run_command import run

    return run(values, inputs)


def _inspect(values: dict[str, Any], outputs: list[str]) -> int:
    from specbatch.inspect_command import inspect_output

    return inspect_output(outputs[0], decisions=bool(values["decisions"]), as_json=bool(values["json"]))


def _plan(values: dict[str, Any], nothing: list[str]) -> int:
    from specbatch.plan_command import plan

    return plan(values)


def _bench(values: dict[str, Any], inputs: list[str]) -> int:
    from specbatch.bench_command import bench

    return bench(values, inputs)


def _verify(values: dict[str, Any], outputs: list[str]) -> int:
    from specbatch.verify_command import verify

    return verify(values, outputs)


def _doctor(values: dict[str, Any], nothing: list[str]) -> int:
    from specbatch.doctor_command import examine

    return examine(self_test=values["self-test"] is not False, as_json=bool(values["json"]))


_HANDLERS: dict[str, Callable[[dict[str, Any], list[str]], int]] = {
    "run": _run,
    "inspect": _inspect,
    "plan": _plan,
    "bench": _bench,
    "verify": _verify,
    "doctor": _doctor,
}


if __name__ == "__main__":
    sys.exit(main())
