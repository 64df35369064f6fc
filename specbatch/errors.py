"""Failures with a meaning: exit codes, stable codes and hints. Knows no layer.

A SpecbatchError ends the process with its exit code and one readable message. A row error never does: it is a
code of ROW_ERROR_CODES and a message with the numbers, stored in the output table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import ClassVar, Final


class ExitCode(IntEnum):
    """Frozen: scripts and schedulers depend on these numbers."""

    OK = 0  # every row done
    UNEXPECTED = 1  # a defect, or a device that stopped answering
    USAGE = 2  # usage, configuration or schema; found before any model is loaded
    ROW_ERRORS = 3  # done; some rows ended with a row error
    ERROR_BUDGET = 4  # stopped: more row errors than --max-errors / --max-error-rate allow
    DEADLINE = 5  # --max-duration reached, drained; running again continues
    INPUT_MISSING = 10
    LOCKED = 11  # another run works on this output
    OTHER_RUN = 12  # the output belongs to a run with other inputs or settings
    RESOURCE = 13  # disk full, out of memory at batch 1, no device
    INTERRUPTED = 130  # SIGINT, drained
    TERMINATED = 143  # SIGTERM, drained


class SpecbatchError(Exception):
    """Base of all expected failures.

    `exit_code` and `code` (stable, for scripts) belong to the class; `hint` says what to do, in one line.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.UNEXPECTED
    code: ClassVar[str] = "unexpected"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecbatchError):
    """An option that does not exist, has a value out of range, or contradicts another."""

    exit_code = ExitCode.USAGE
    code = "usage"


class SchemaError(UsageError):
    """The input's columns do not fit the options: missing, of an unsupported type, or a name that collides."""

    code = "schema"


class InputUnreadable(UsageError):
    """An input file is there but is not what it should be (not Parquet, truncated, corrupt pages)."""

    code = "input_unreadable"


class InputMissing(SpecbatchError):
    """No such file, an empty match, or a file that vanished while the job ran."""

    exit_code = ExitCode.INPUT_MISSING
    code = "input_missing"


class OutputLocked(SpecbatchError):
    """Another process holds the output directory's lock."""

    exit_code = ExitCode.LOCKED
    code = "locked"


class OutputMismatch(SpecbatchError):
    """The output directory belongs to another run. `field` names what differs."""

    exit_code = ExitCode.OTHER_RUN
    code = "other_run"

    def __init__(self, message: str, *, field: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.field = field


class ResourceError(SpecbatchError):
    """The machine has not enough of something: disk, memory, a device."""

    exit_code = ExitCode.RESOURCE
    code = "resource"


class DiskFull(ResourceError):
    """No space (or quota) left, or an output that cannot be written."""

    code = "disk"


class NoDevice(ResourceError):
    """The requested device is not there or cannot be used."""

    code = "no_device"


class OutOfMemory(ResourceError):
    """Raised by an engine's add() or step() when the device ran out of memory; nothing was committed by that call.

    The job then asks the engine for `reduce_batch()` and goes on with the same rows.
    """

    code = "out_of_memory"


class Stalled(SpecbatchError):
    """No progress within --stall-timeout."""

    code = "stalled"


class Interrupted(SpecbatchError):
    """INT or TERM before there was anything to drain, or in a call that never returned."""

    code = "interrupted"

    def __init__(self, number: int, detail: str = "") -> None:
        name = {2: "SIGINT", 15: "SIGTERM"}.get(number, f"signal {number}")
        super().__init__(f"stopped by {name}{detail}", hint="run it again to continue")
        self.exit_code = ExitCode(128 + number)  # type: ignore[misc]


class InternalError(RuntimeError):
    """A defect that Rust code found: it panicked. An ordinary exception, other than PyO3's own."""


def panic_as_error(error: BaseException) -> InternalError | None:
    """What to raise in place of PyO3's PanicException; None: it is something else.

    A PanicException is no Exception, so that whatever handles errors (rows tried again, a message, an exit code) would
    let it pass. Its class cannot be imported: every extension has one of that name.
    """
    kind = type(error)
    if (kind.__module__, kind.__name__) != ("pyo3_runtime", "PanicException"):
        return None
    told = InternalError(f"Rust code panicked, which is a defect: {error}")
    return told.with_traceback(error.__traceback__)  # where it happened, not where it was noticed


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Around calls of Rust code. Raises InternalError where that code panics."""
    try:
        yield
    except BaseException as error:
        told = panic_as_error(error)
        if told is None:
            raise
        raise told from error


ROW_ERROR_CODES: Final[dict[str, str]] = {
    "empty_prompt": "the prompt is empty, only white space, or no token at all",
    "prompt_too_long": "the prompt leaves no room for an answer in the model's context",
    "row_too_large": "a cell used for the prompt is larger than --max-row-bytes",
    "invalid_utf8": "a cell used for the prompt is not valid UTF-8",
    "invalid_messages": "messages is not a list of objects with a role",
    "invalid_request": "a JSON line is not a request of the OpenAI batch shape",
    "invalid_parameters": "a parameter of the row is unknown, of a wrong type or out of range",
    "template_value_missing": "a column used by --template is null or NaN in this row",
    "template_error": "the chat template raised on these messages",
    "tokenizer_error": "the tokenizer raised on this prompt",
    "too_few_pages": "the row alone needs more KV memory than there is",
    "out_of_memory": "the device ran out of memory with this row alone",
    "engine_error": "the engine raised on this row alone",
}
