"""Which columns the prompt is made of and which columns the output has; decided from schemas, before any row is read.

Raises SchemaError / UsageError (exit 2) naming column, type and the option that resolves it.
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.errors import SchemaError, UsageError
from specbatch.job.options import JobOptions
from specbatch.job.params import check_params_type

PROMPT_NAMES = ("prompt", "text", "question", "instruction", "input")
MESSAGES_NAME = "messages"
ERROR_TYPE = pa.struct([("code", pa.string()), ("message", pa.string())])
DECODING_TYPE = pa.struct(
    [
        ("source", pa.string()),  # computed, reused (an earlier output), duplicate (of an equal greedy row)
        ("mode", pa.string()),  # ar, or the speculation its shard was in
        ("steps", pa.int32()),
        ("drafted", pa.int32()),
        ("accepted", pa.int32()),
        ("wasted", pa.int32()),
        ("preemptions", pa.int32()),
        ("cached_tokens", pa.int32()),
    ]
)

SourceKind = Literal["text", "template", "messages", "openai"]


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Where a row's prompt and parameters come from."""

    kind: SourceKind
    column: str | None  # text, messages, openai
    template: tuple[tuple[str, str | None], ...] = ()  # (literal text, column after it)
    chat: bool = False  # through the tokenizer's chat template
    system_prompt: str | None = None
    params_column: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """What must be read to make prompts."""
        own = [self.column, *(name for _, name in self.template), self.params_column]
        return tuple(dict.fromkeys(name for name in own if name is not None))

    @property
    def description(self) -> str:
        through = " through the chat template" if self.chat else ""
        if self.kind == "template":
            text = "".join(lit + (f"{{{name}}}" if name else "") for lit, name in self.template)
            return f"template {text!r}{through}"
        if self.kind == "openai":
            return "requests of the OpenAI batch shape"
        return f"column {self.column!r}{through}"


def storage_type(kind: Any) -> Any:
    """The type below extension and dictionary types."""
    while isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind):
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type
    return kind


def is_text(kind: Any) -> bool:
    """String-like: any string, any binary (read as UTF-8), a dictionary of them, or all null."""
    base = storage_type(kind)
    checks = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")
    return pa.types.is_null(base) or any(getattr(pa.types, check)(base) for check in checks)


def is_messages(kind: Any) -> bool:
    """A list of structs that have a role."""
    checks = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    if not any(getattr(pa.types, check)(kind) for check in checks):
        return False
    item = kind.value_type
    return bool(pa.types.is_struct(item) and item.get_field_index("role") >= 0)


def find_source(
    schema: Any,
    options: JobOptions,
    is_jsonl: bool,
    has_chat_template: Callable[[], bool],
    prefers_chat: Callable[[], bool],
) -> PromptSource:
    """Decide where prompts come from. `has_chat_template` and `prefers_chat` are asked only when it matters."""
    source = (
        _openai(options) if is_jsonl else _from_options(schema, options) or _detect(schema, options, has_chat_template)
    )
    if options.chat == "auto" and source.kind in ("text", "template") and prefers_chat():
        source = replace(source, chat=True)
    if source.params_column is not None:
        field = _field(schema, source.params_column, "--params-column")
        check_params_type(source.params_column, storage_type(field.type), is_text(field.type))
    if source.chat and not has_chat_template():
        raise SchemaError(
            f"{source.description}: this model has no chat template",
            hint="give --chat-template, or plain prompts with --prompt-column",
        )
    if options.system_prompt is not None and not source.chat:
        raise UsageError("--system needs prompts that go through the chat template", hint="add --chat on")
    return source


def _openai(options: JobOptions) -> PromptSource:
    for name in ("prompt_column", "messages_column", "template", "params_column", "system_prompt"):
        if getattr(options, name) is not None:
            flag = name.removesuffix("_prompt").replace("_", "-")
            raise UsageError(f"--{flag} does not apply to JSON-lines requests")
    return PromptSource("openai", "request")


def _make(options: JobOptions, kind: SourceKind, column: str | None, **rest: Any) -> PromptSource:
    if kind == "messages" and options.chat == "off":
        raise UsageError(
            "--chat off contradicts a messages column", hint="messages become text through the chat template"
        )
    chat = options.chat == "on" or (options.chat == "auto" and kind == "messages")
    return PromptSource(
        kind, column, chat=chat, system_prompt=options.system_prompt, params_column=options.params_column, **rest
    )


def _from_options(schema: Any, options: JobOptions) -> PromptSource | None:
    if options.template is not None:
        return _make(options, "template", None, template=_parse_template(options.template, schema))
    if options.prompt_column is not None:
        field = _field(schema, options.prompt_column, "--prompt-column")
        if not is_text(field.type):
            hint = "use --messages-column" if is_messages(field.type) else "a prompt is a string or UTF-8 binary column"
            raise SchemaError(f"column {field.name!r} is {field.type}, which is no text", hint=hint)
        return _make(options, "text", field.name)
    if options.messages_column is not None:
        field = _field(schema, options.messages_column, "--messages-column")
        if not (is_messages(field.type) or is_text(field.type)):
            raise SchemaError(
                f"column {field.name!r} is {field.type}, which is no list of messages",
                hint="messages are list<struct<role, content, ...>> or a JSON string",
            )
        return _make(options, "messages", field.name)
    return None


def _detect(schema: Any, options: JobOptions, has_chat_template: Callable[[], bool]) -> PromptSource:
    names = [name for name in schema.names if name != options.params_column]
    texts = [name for name in names if is_text(schema.field(name).type)]
    prompt = next((name for name in PROMPT_NAMES if name in texts), None)
    if prompt is None and MESSAGES_NAME not in names:
        plain = [name for name in texts if not pa.types.is_null(schema.field(name).type)]
        prompt = plain[0] if len(plain) == 1 else None
    if MESSAGES_NAME in names and options.chat != "off":
        kind = schema.field(MESSAGES_NAME).type
        usable = is_messages(kind) or (is_text(kind) and prompt is None)
        if usable and (prompt is None or has_chat_template()):
            return _make(options, "messages", MESSAGES_NAME)
    if prompt is not None:
        return _make(options, "text", prompt)
    listed = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
    raise SchemaError(
        f"found no prompt among the columns: {listed[:500]}",
        hint="give --prompt-column, --messages-column or --template",
    )


def _field(schema: Any, name: str, option: str) -> Any:
    if schema.get_field_index(name) < 0:
        close = difflib.get_close_matches(name, schema.names, n=1)
        raise SchemaError(
            f"{option} {name}: no such column; there are {', '.join(schema.names)[:500] or 'none'}",
            hint=f"did you mean {close[0]!r}?" if close else None,
        )
    return schema.field(name)


def _parse_template(template: str, schema: Any) -> tuple[tuple[str, str | None], ...]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"--template: {error}", hint="columns are {name}; a brace is {{ or }}") from error
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if spec or conversion:
            raise UsageError(f"--template: {{{name}}} has a format or conversion", hint="only {column} is allowed")
        if not name:
            raise UsageError("--template: {} names no column", hint="columns are {name}; a brace is {{ or }}")
        kind = storage_type(_field(schema, name, "--template").type)
        if pa.types.is_nested(kind):
            raise SchemaError(f"--template: column {name!r} is {kind}, which is no text or number")
    if not any(name is not None for _, name, _, _ in parts):
        raise UsageError("--template names no column", hint='for example "Summarise: {body}"')
    return tuple((literal, name) for literal, name, _, _ in parts)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The output table's columns: kept input columns, then the added ones in order. Equal in every part."""

    schema: Any  # pa.Schema
    kept: tuple[str, ...]
    added: tuple[str, ...]  # names with the prefix

    @property
    def as_text(self) -> list[str]:
        return [f"{field.name}: {field.type}" for field in self.schema]


def plan_output(schema: Any, options: JobOptions) -> OutputPlan:
    """Fix the output schema. Raises SchemaError for colliding names and for columns that cannot be written."""
    kept = schema.names if options.keep_columns is None else options.keep_columns
    fields = [_field(schema, name, "--keep-columns").with_nullable(True) for name in kept]
    added = [field.with_name(options.output_prefix + field.name) for field in added_fields(options)]
    for field in added:
        if field.name in kept:
            raise SchemaError(
                f"the input has a column {field.name!r}, which the output needs",
                hint="give --output-prefix new_, or --keep-columns without it",
            )
    if options.format == "parquet" and _why_not_written(fields) is not None:
        for field in fields:  # one by one only now: a table may have thousands
            if (why := _why_not_written([field])) is not None:
                raise SchemaError(
                    f"column {field.name!r} ({field.type}) cannot be written: {why}",
                    hint="leave it out with --keep-columns",
                )
    return OutputPlan(pa.schema([*fields, *added]), tuple(kept), tuple(field.name for field in added))


def _why_not_written(fields: Sequence[Any]) -> str | None:
    try:
        pq.write_table(pa.schema(fields).empty_table(), pa.BufferOutputStream())
    except (pa.ArrowException, ValueError, TypeError) as error:
        return str(error)
    return None


def added_fields(options: JobOptions) -> Sequence[Any]:
    """Fields that specbatch adds, without prefix. With n > 1, what belongs to a sample is a list of n."""

    def per_sample(kind: Any) -> Any:
        return pa.list_(kind) if options.n > 1 else kind

    fields = [
        pa.field("completion", per_sample(pa.string())),
        pa.field("finish_reason", per_sample(pa.string())),
        pa.field("error", ERROR_TYPE),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("completion_tokens", per_sample(pa.int32())),
        pa.field("decoding", DECODING_TYPE),
    ]
    if options.output_token_ids:
        fields.append(pa.field("completion_token_ids", per_sample(pa.list_(pa.int32()))))
    if options.logprobs:
        fields.append(pa.field("completion_logprobs", per_sample(pa.list_(pa.float32()))))
    return fields
