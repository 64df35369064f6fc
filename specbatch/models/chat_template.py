"""Conversations to text through a model's chat template, in a sandbox, as transformers renders them.

Knows nothing of token ids. A template is code from a stranger: it sees plain data and can change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter would escape characters that mean something in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. `now` fixes what strftime_now prints, so that a resumed run renders the same again."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: datetime | None = None) -> None:
        """Raises ValueError when the template does not parse."""
        self.source = source
        self.now = now
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not parse: {error}") from error

    def _strftime_now(self, pattern: str) -> str:
        return (self.now or datetime.now()).strftime(pattern)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of one conversation. Raises ValueError with the template's own words, or naming what is wrong.

        Fields that are None are left out, as a column of structs pads missing fields with nulls.
        """
        if not messages:
            raise ValueError("the conversation is empty")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise ValueError(f"message {number} is not an object with fields but {type(message).__name__}")
        chat = [_with_reasoning_names(drop_nulls(message)) for message in messages]
        try:
            return self._template.render(
                messages=chat,
                tools=[drop_nulls(tool) for tool in tools] if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **(variables or {})},
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error
        except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, ValueError, RecursionError) as error:
            raise ValueError(f"the chat template failed on the messages: {type(error).__name__}: {error}") from error


def drop_nulls(value: Any) -> Any:
    """The value without the None fields of its objects, at every depth."""
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [drop_nulls(item) for item in value]
    return value


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read an assistant's reasoning under different names: offer the one given under those in use."""
    given = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if given is None:
        return message
    return {"thinking": given, **message, "reasoning_content": given}


def choose_template(value: object, where: str) -> str | None:
    """The template to use among the forms tokenizer_config.json has had: one string, or a list of named ones."""
    if value is None or isinstance(value, str):
        return value
    named: dict[str, str] = {}
    if isinstance(value, Mapping):
        named = {str(name): str(template) for name, template in value.items()}
    elif isinstance(value, list):
        named = {str(item["name"]): str(item["template"]) for item in value if isinstance(item, Mapping)}
    if "default" in named:
        return named["default"]
    if len(named) == 1:
        return next(iter(named.values()))
    names = ", ".join(sorted(named)) or "none"
    raise ValueError(f"{where} has several chat templates and none called default: {names}")
