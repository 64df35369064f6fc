"""From columns to token ids: which columns, chat template, parameters, seeds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.errors import SchemaError, UsageError
from specbatch.job.columns import find_source, is_text
from specbatch.job.messages import parse_messages, with_system
from specbatch.job.openai_request import RequestProblem, parse_request
from specbatch.job.options import JobOptions
from specbatch.job.params import ParamsParser, sampling_key
from specbatch.job.prepare import Preparer, mix_seeds, sample_seeds
from specbatch.job.prompts import PromptBuilder
from specbatch.job.ragged import cut, take
from specbatch.job.reader import Slice
from specbatch.job.shards import Shard
from specbatch.sampling_params import SamplingParams
from specbatch.standin import StandInTokenizer

TEXT, NUMBER = pa.string(), pa.int64()
MESSAGES = pa.list_(pa.struct([("role", TEXT), ("content", TEXT)]))


def options(**values: Any) -> JobOptions:
    return JobOptions(inputs=("in",), output=Path("out"), **values)


def source(columns: dict[str, Any], *, template: bool = True, prefers: bool = False, **values: Any) -> Any:
    schema = pa.schema(list(columns.items()))
    return find_source(schema, options(**values), False, lambda: template, lambda: prefers)


class TestDetection:
    def test_names_in_order(self) -> None:
        assert source({"text": TEXT, "prompt": TEXT}).column == "prompt"
        assert source({"text": TEXT, "id": TEXT}).column == "text"
        assert source({"id": NUMBER, "frage": TEXT}).column == "frage"  # the only text there is

    def test_messages_before_prompt_where_the_model_has_a_template(self) -> None:
        both = {"prompt": TEXT, "messages": MESSAGES}
        found = source(both)
        assert (found.kind, found.column, found.chat) == ("messages", "messages", True)
        assert "chat template" in found.description
        found = source(both, template=False)
        assert (found.kind, found.column, found.chat) == ("text", "prompt", False)

    def test_a_model_that_prefers_chat_gets_its_prompts_through_the_template(self) -> None:
        assert source({"prompt": TEXT}, prefers=True).chat
        assert not source({"prompt": TEXT}, prefers=True, chat="off").chat

    def test_messages_as_json(self) -> None:
        assert source({"id": TEXT, "messages": TEXT}).kind == "messages"
        assert source({"prompt": TEXT, "messages": TEXT}).kind == "text"  # unclear: the prompt is plain

    def test_nothing_to_find(self) -> None:
        with pytest.raises(SchemaError, match=r"a \(string\), b \(string\)") as caught:
            source({"a": TEXT, "b": TEXT})
        assert "--prompt-column" in str(caught.value.hint)

    def test_a_model_without_a_template(self) -> None:
        with pytest.raises(SchemaError, match="no chat template") as caught:
            source({"messages": MESSAGES}, template=False)
        assert "--chat-template" in str(caught.value.hint)
        with pytest.raises(SchemaError, match="no chat template"):
            source({"prompt": TEXT}, template=False, chat="on")

    @pytest.mark.parametrize(
        ("columns", "values"),
        [
            ({"prompt": TEXT}, {"prompt_column": "x"}),
            ({"prompt": NUMBER}, {"prompt_column": "prompt"}),
            ({"m": MESSAGES}, {"prompt_column": "m"}),
            ({"m": NUMBER}, {"messages_column": "m"}),
            ({"m": MESSAGES}, {"messages_column": "m", "chat": "off"}),
            ({"prompt": TEXT}, {"params_column": "p"}),
            ({"prompt": TEXT}, {"system_prompt": "be brief"}),
        ],
    )
    def test_refusals(self, columns: dict[str, Any], values: dict[str, Any]) -> None:
        with pytest.raises(UsageError):
            source(columns, **values)

    def test_two_sources(self) -> None:
        with pytest.raises(UsageError, match="contradict"):
            options(prompt_column="a", template="{a}")

    def test_what_text_is(self) -> None:
        assert all(map(is_text, (TEXT, pa.large_binary(), pa.string_view(), pa.null(), pa.dictionary(pa.int8(), TEXT))))
        assert not any(map(is_text, (NUMBER, MESSAGES, pa.binary(4), pa.dictionary(pa.int8(), NUMBER))))


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "value"),
        [("n", 0), ("n", 2000), ("shard_rows", 0), ("grace", -1.0), ("grace", float("nan")), ("max_duration", 0.0),
         ("max_error_rate", 1.5), ("overlong", "cut"), ("format", "csv"), ("limit", 0), ("inputs", ()), ("seed", -1)],
    )  # fmt: skip
    def test_out_of_range(self, name: str, value: Any) -> None:
        with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
            JobOptions(**({"inputs": ("a",), "output": Path("b")} | {name: value}))

    def test_contradictions(self) -> None:
        with pytest.raises(UsageError, match="--restart and --retry-failed"):
            options(restart=True, retry_failed=True)
        with pytest.raises(UsageError, match="seed"):
            options(sampling=SamplingParams(seed=1))


def prepare(columns: dict[str, Any], *, start: int = 0, **values: Any) -> Any:
    """Prepared rows of one slice with the stand-in's tokenizer, context 100."""
    arrays = {name: column if isinstance(column, pa.Array) else pa.array(column) for name, column in columns.items()}
    chosen = options(**values)
    found = find_source(pa.schema([(n, a.type) for n, a in arrays.items()]), chosen, False, lambda: True, lambda: False)
    tokenizer = StandInTokenizer()
    parser = ParamsParser(chosen.sampling, 100)
    builder = PromptBuilder(found, parser, tokenizer.render, max_row_bytes=1000, n=chosen.n, logprobs=False)
    rows = len(next(iter(arrays.values())))
    piece = Slice(rows, {name: arrays[name] for name in found.columns})
    return Preparer(chosen, builder, tokenizer, 100).prepare(Shard(3, 1, 0, 1, 50, 1000), start, piece)


def texts(work: Any) -> list[str]:
    pieces = np.split(work.values, work.offsets[1:-1]) if len(work) else []
    return [piece.astype(np.uint8).tobytes().decode() for piece in pieces]


class TestPreparation:
    def test_rows_keep_their_numbers(self) -> None:
        work = prepare({"prompt": ["a", None, "", "bb", "c" * 200]}, start=20)
        assert work.rows.tolist() == [20, 23]
        assert texts(work) == ["a", "bb"]
        found = dict(zip(work.outcomes.rows, work.outcomes.codes, strict=True))
        assert found == {1: None, 2: "empty_prompt", 4: "prompt_too_long"}

    def test_chat_on_a_prompt_column(self) -> None:
        work = prepare({"prompt": ["hi"]}, chat="on", system_prompt="be brief")
        assert texts(work) == ["<system> be brief\n<user> hi\n<assistant> "]

    def test_special_tokens_only_where_no_template_wrote_them(self) -> None:
        asked: list[bool] = []

        class Watching(StandInTokenizer):
            def encode_utf8(self, values: Any, offsets: Any, *, add_special_tokens: bool) -> Any:
                asked.append(add_special_tokens)
                return super().encode_utf8(values, offsets, add_special_tokens=add_special_tokens)

        for chat in ("off", "on"):
            chosen = options(chat=chat)
            found = find_source(pa.schema([("prompt", TEXT)]), chosen, False, lambda: True, lambda: False)
            builder = PromptBuilder(
                found, ParamsParser(SamplingParams(), 100), Watching().render, max_row_bytes=99, n=1, logprobs=False
            )
            piece = Slice(1, {"prompt": pa.array(["x"])})
            Preparer(chosen, builder, Watching(), 100).prepare(Shard(0, 0, 0, 1, 0, 1), 0, piece)
        assert asked == [True, False]

    def test_a_slice_of_a_longer_array(self) -> None:
        column = pa.array(["skipped", "a", None, "bb"]).slice(1)
        assert texts(prepare({"prompt": column})) == ["a", "bb"]

    def test_keys_are_equal_exactly_when_answers_must_be(self) -> None:
        def key(prompt: str, **values: Any) -> bytes:
            return prepare({"prompt": [prompt]}, **values).keys.tobytes()  # type: ignore[no-any-return]

        assert key("a") == key("a", seed=5, limit=3, shard_rows=2)  # greedy: the seed does not matter
        hot, short, stopped = SamplingParams(temperature=1.0), SamplingParams(max_tokens=5), SamplingParams(stop=("x",))
        cases = [key("a", sampling=sampling) for sampling in (SamplingParams(), hot, short, stopped)]
        cases += [key("b"), key("a", sampling=hot, seed=1)]
        assert len(set(cases)) == len(cases)

    def test_keys_do_not_run_tokens_and_parameters_together(self) -> None:
        assert sampling_key(SamplingParams(logit_bias={1: 2.0, 3: 4.0})) == sampling_key(
            SamplingParams(logit_bias={3: 4.0, 1: 2.0})
        )
        assert sampling_key(SamplingParams(stop=("ab",))) != sampling_key(SamplingParams(stop=("a", "b")))


class TestSeeds:
    def test_by_file_and_row_and_sample(self) -> None:
        keys = np.arange(100_000, dtype=np.int64)
        seeds = mix_seeds(0, keys)
        assert len(np.unique(seeds)) == len(seeds)
        assert (seeds >= 0).all()
        assert not np.array_equal(seeds, mix_seeds(1, keys))
        samples = sample_seeds(np.repeat(seeds[:100], 3), np.tile(np.arange(3), 100))
        assert len(np.unique(samples)) == 300
        assert np.array_equal(samples[::3], seeds[:100])

    def test_greedy_rows_have_none(self) -> None:
        assert sample_seeds(np.array([-1, 5]), np.array([0, 0])).tolist() == [0, 5]


class TestParameters:
    def test_equal_parameters_are_one_object(self) -> None:
        parser = ParamsParser(SamplingParams(), 100)
        first, second = parser.parse({"max_tokens": 3, "seed": 1}), parser.parse('{"max_tokens": 3, "seed": 2}')
        assert first.sampling is second.sampling
        assert (first.seed, second.seed) == (1, 2)
        assert parser.parse({"max_tokens": None}) is parser.defaults

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"nonsense": 1}, "unknown parameter 'nonsense'"),
            ({"max_tokens": "3"}, "max_tokens must be an integer"),
            ({"max_tokens": True}, "max_tokens must be an integer"),
            ({"max_tokens": 2.5}, "max_tokens must be an integer"),
            ({"temperature": "hot"}, "temperature must be a number"),
            ({"temperature": -1}, "temperature"),
            ({"stop": [1]}, "stop must be"),
            ({"stop_token_ids": "x"}, "stop_token_ids must be"),
            ({"logit_bias": {"x": 1}}, "logit_bias must map"),
            ({"ignore_eos": 1}, "ignore_eos must be"),
            ({"seed": 2**63}, "seed must be between"),
            ({"max_tokens": 100}, "leaves no room"),
            ({"logprobs": True}, "unknown parameter 'logprobs'"),
            ("{", "not JSON"),
            ("[1]", "must be an object"),
            (5, "must be an object"),
        ],
    )
    def test_what_is_wrong_is_said(self, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ParamsParser(SamplingParams(), 100).parse(value)

    def test_what_is_right(self) -> None:
        parser = ParamsParser(SamplingParams(), 1000)
        value = {"stop": "x", "stop_token_ids": [1, 2.0], "logit_bias": [(5, 1.5)], "ignore_eos": True, "top_p": 0.5}
        found = parser.parse(value).sampling
        assert (found.stop, found.stop_token_ids, dict(found.logit_bias)) == (("x",), (1, 2), {5: 1.5})


class TestMessages:
    def test_system_prompt_does_not_double(self) -> None:
        own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
        assert with_system(own, "run") == own
        assert with_system(own[1:], "run")[0] == {"role": "system", "content": "run"}
        assert with_system(own, None) is own

    def test_json_null_fields(self) -> None:
        assert parse_messages('[{"role": "user", "content": null}]') == [{"role": "user"}]


class TestOpenAIRequests:
    def line(self, **body: Any) -> str:
        return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})

    def test_chat_and_completion(self) -> None:
        user = [{"role": "user", "content": "hi"}]
        request = parse_request(self.line(model="m", messages=user, max_completion_tokens=5, stream=False), 1, False)
        assert (request.messages, request.prompt, request.params) == (user, None, {"max_tokens": 5})
        request = parse_request(self.line(prompt="once", temperature=0.5, n=1), 1, False)
        assert (request.messages, request.prompt, request.params) == (None, "once", {"temperature": 0.5})
        nothing = self.line(prompt="a", tools=[], tool_choice="none", top_logprobs=0, logprobs=False, echo=False)
        assert parse_request(nothing, 1, False).params == {}

    @pytest.mark.parametrize(
        ("line", "code"),
        [
            ("nonsense", "invalid_request"),
            ("[]", "invalid_request"),
            ("{}", "invalid_request"),
            ('{"body": {}}', "invalid_request"),
            ('{"body": {"prompt": ["a", "b"]}}', "invalid_request"),
            ('{"body": {"prompt": "a", "messages": []}}', "invalid_request"),
            ('{"body": {"messages": "hi"}}', "invalid_messages"),
            ('{"body": {"prompt": "a", "n": 2}}', "invalid_parameters"),
            ('{"body": {"prompt": "a", "tools": [{"type": "function"}]}}', "invalid_parameters"),
            ('{"body": {"prompt": "a", "response_format": {"type": "json_object"}}}', "invalid_parameters"),
            ('{"body": {"prompt": "a", "logprobs": true}}', "invalid_parameters"),
        ],
    )
    def test_what_cannot_be_done_is_a_row_error(self, line: str, code: str) -> None:
        with pytest.raises(RequestProblem) as caught:
            parse_request(line, 1, False)
        assert caught.value.code == code


class TestRagged:
    @given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8), st.data())
    @settings(max_examples=60, deadline=None)
    def test_take_and_cut(self, rows: list[list[int]], data: Any) -> None:
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
        values = np.array([v for row in rows for v in row], np.int32)
        index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
        got, at = take(values, offsets, np.array(index, np.int64))
        assert [got[a:b].tolist() for a, b in itertools.pairwise(at)] == [rows[i] for i in index]
        kept = np.array([min(2, len(row)) for row in rows], np.int64)
        got, at = cut(values, offsets[:-1], kept)
        assert [got[a:b].tolist() for a, b in itertools.pairwise(at)] == [row[:2] for row in rows]
