"""The Python API: the same words as the command line, for notebooks and scripts.

from specbatch import Engine, SamplingParams
with Engine(model="path/to/model") as engine:
    for completion in engine.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(completion.text)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from specbatch.compose import make_engine
from specbatch.engine.plan import model_paths
from specbatch.engine_options import EngineOptions
from specbatch.models.tokenizer import HFTokenizer
from specbatch.requests import FinishedRows, RequestBatch
from specbatch.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
FINISH_REASONS = {1: "stop", 2: "length", 3: "error", 4: "aborted"}


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's answer, in the words of the output table."""

    text: str
    finish_reason: str  # stop, length, error
    error: str | None  # "code: message" where finish_reason is error
    prompt_tokens: int
    completion_tokens: int
    token_ids: tuple[int, ...]  # stop token included
    steps: int
    drafted: int
    accepted: int
    logprobs: tuple[float, ...] | None = None


class Engine:
    """A model ready to complete prompts. Takes the fields of EngineOptions as keyword arguments.

    Raises ValueError naming the option or the model and the fix. Without `model` the built-in pair is used.
    """

    def __init__(self, *, log_decision: Callable[[Mapping[str, object]], None] | None = None, **options: Any) -> None:
        self.options = EngineOptions(**options)
        self.tokenizer = HFTokenizer(model_paths(self.options)[0])
        self.core = make_engine(self.options, log_decision=log_decision, tokenizer=self.tokenizer)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts, in their order. A prompt is text, token ids, or a list of messages.

        Text goes to the model as it is; messages go through the chat template. `progress` shows a tqdm bar.
        Request ids, and with them the seeds of rows without one, count from 0 in every call.
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams) and len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} params: give one for all, or one a prompt")
        values, offsets = self._encode(prompts)
        batch = RequestBatch(np.arange(len(prompts), dtype=np.int64), 0, values, offsets, params)
        results: list[Completion | None] = [None] * len(prompts)
        self.core.add(batch)
        bar = _progress_bar(len(prompts)) if progress else None
        while self.core.num_unfinished:
            self.core.step()
            rows = self.core.take_finished()
            if rows is not None:
                for i, completion in zip(rows.request_id.tolist(), completions(rows), strict=True):
                    results[i] = completion
                if bar is not None:
                    bar.update(len(rows))
        if bar is not None:
            bar.close()
        return [r for r in results if r is not None]

    def _encode(self, prompts: Sequence[Prompt]) -> tuple[Any, Any]:
        pieces = []
        for prompt in prompts:
            if isinstance(prompt, str):
                pieces.append(self.tokenizer.encode([prompt], add_special_tokens=True)[0])
            elif len(prompt) and isinstance(prompt[0], Mapping):
                text = self.tokenizer.render(prompt)  # type: ignore[arg-type]
                pieces.append(self.tokenizer.encode([text], add_special_tokens=False)[0])
            else:
                pieces.append(np.asarray(prompt, dtype=np.int32))
        offsets = np.concatenate(([0], np.cumsum([len(p) for p in pieces]))).astype(np.int64)
        return np.concatenate([*pieces, np.zeros(0, np.int32)]).astype(np.int32), offsets

    def close(self) -> None:
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def completions(rows: FinishedRows) -> list[Completion]:
    """FinishedRows as one object a row."""
    text, ids = rows.text_values.tobytes(), rows.token_values.tolist()
    result = []
    for i in range(len(rows)):
        error = rows.error[i]
        begin, end = int(rows.token_offsets[i]), int(rows.token_offsets[i + 1])
        result.append(
            Completion(
                text=text[rows.text_offsets[i] : rows.text_offsets[i + 1]].decode("utf-8"),
                finish_reason=FINISH_REASONS[int(rows.finish_reason[i])],
                error=None if error is None else f"{error[0]}: {error[1]}",
                prompt_tokens=int(rows.prompt_tokens[i]),
                completion_tokens=int(rows.completion_tokens[i]),
                token_ids=tuple(ids[begin:end]),
                steps=int(rows.steps[i]),
                drafted=int(rows.drafted[i]),
                accepted=int(rows.accepted[i]),
                logprobs=None if rows.logprobs is None else tuple(rows.logprobs[begin:end].tolist()),
            )
        )
    return result


def _progress_bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="row", desc="specbatch")
