"""From the core's finished rows to what the job sees: error words with their numbers, UTF-8 text, logprobs.

Owns the logprobs of unfinished rows and errors found outside the core. Knows nothing of steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbatch import _core
from specbatch._core import FinishedBatch
from specbatch.requests import FinishedRows


class ResultCollector:
    """Turns FinishedBatch into FinishedRows. Not thread-safe."""

    def __init__(self, *, max_model_len: int, num_pages: int, block_size: int) -> None:
        self.max_model_len = max_model_len
        self.num_pages = num_pages
        self.block_size = block_size
        self._errors: dict[int, tuple[str, str]] = {}  # handle -> (code, message): rows the engine aborted for a reason
        # handle -> a piece a step: output index of its first token, values
        self._logprobs: dict[int, list[tuple[int, NDArray[np.float32]]]] = {}

    def note_error(self, handle: int, code: str, message: str) -> None:
        """The reason of a row that is about to be aborted."""
        self._errors[handle] = (code, message)

    def note_logprobs(self, handle: int, first: int, values: NDArray[np.float32]) -> None:
        """Logprobs of a row's output tokens from index `first` on, as a step found them. What is past the row's end is
        cut when it is taken; a step that is run again replaces what it noted before."""
        self._logprobs.setdefault(handle, []).append((first, values))

    def collect(self, batch: FinishedBatch) -> FinishedRows:
        reasons = batch.finish_reason.copy()
        errors: list[tuple[str, str] | None] = [None] * len(batch)
        for i in np.flatnonzero(reasons >= _core.FINISH_ERROR).tolist():
            errors[i] = self._error(batch, i)
            if errors[i] is not None:
                reasons[i] = _core.FINISH_ERROR
        text_values, text_offsets = valid_utf8(batch.text_values, batch.text_offsets)
        return FinishedRows(
            request_id=batch.request_id,
            finish_reason=reasons,
            error=errors,
            prompt_tokens=batch.num_prompt_tokens,
            completion_tokens=batch.num_output_tokens,
            token_values=batch.token_values,
            token_offsets=batch.token_offsets,
            text_values=text_values,
            text_offsets=text_offsets,
            steps=batch.num_steps,
            drafted=batch.num_drafted,
            accepted=batch.num_accepted,
            wasted=batch.num_wasted,
            preemptions=batch.num_preempted,
            cached_tokens=batch.num_cached_tokens,
            logprobs=self._take_logprobs(batch),
        )

    def _error(self, batch: FinishedBatch, i: int) -> tuple[str, str] | None:
        prompt = int(batch.num_prompt_tokens[i])
        code = int(batch.error_code[i])
        if code == _core.ERROR_PROMPT_TOO_LONG:
            return (
                "prompt_too_long",
                f"the prompt has {prompt} tokens, the context holds {self.max_model_len} with the answer",
            )
        if code == _core.ERROR_TOO_FEW_PAGES:
            tokens = prompt + int(batch.num_output_tokens[i])
            return (
                "too_few_pages",
                f"at {tokens} tokens the row alone needs more KV memory than there is "
                f"({self.num_pages - 1} pages of {self.block_size} tokens)",
            )
        if code == _core.ERROR_EMPTY_PROMPT:
            return "empty_prompt", "the prompt has no token"
        return self._errors.pop(int(batch.handle[i]), None)

    def _take_logprobs(self, batch: FinishedBatch) -> NDArray[np.float32] | None:
        if not self._logprobs:
            return None
        values = np.full(len(batch.token_values), np.nan, np.float32)
        offsets = batch.token_offsets
        for i, handle in enumerate(batch.handle.tolist()):
            row = values[offsets[i] : offsets[i + 1]]
            for first, piece in self._logprobs.pop(handle, ()):
                room = row[first : first + len(piece)]
                room[:] = piece[: len(room)]
        return values


def valid_utf8(values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Replace what is not UTF-8 by U+FFFD, row by row and only where needed (a row may end inside a character)."""
    try:
        values.tobytes().decode("utf-8")
    except UnicodeDecodeError:
        pass
    else:
        # NOTE: valid as a whole is not valid in parts: a row's first byte must not continue a character.
        starts = offsets[:-1][offsets[:-1] < len(values)]
        if not np.any((values[starts] & 0xC0) == 0x80):
            return values, offsets
    pieces = [
        values[start:end].tobytes().decode("utf-8", "replace").encode("utf-8")
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
    lengths = np.fromiter((len(p) for p in pieces), np.int64, len(pieces))
    return np.frombuffer(b"".join(pieces), np.uint8), np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
