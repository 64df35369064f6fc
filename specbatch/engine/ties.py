"""Why two answers of one row differ: the first token at which they could have parted, and how near the two choices were.

Owns the measure. A difference is as small as the least change of two logits that makes the sampler choose the other token, so
greedy, sampled, truncated and penalised rows are judged alike. Knows nothing of where answers are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbatch import _core
from specbatch.attention.backend import AttentionMetadata
from specbatch.engine.parts import EngineParts
from specbatch.engine.row_params import RowParams
from specbatch.engine.sampler import sample
from specbatch.models.token_bytes import TokenBytes
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams

LARGEST = 64.0  # a change of the logits beyond which nobody asks how large it is
HALVINGS = 24
CHUNK = 64  # logits looked at together


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers part."""

    index: int  # output token
    chosen: int  # by the answer in hand
    other: int  # by the other one
    margin: float  # least change of logits that makes the one the other; LARGEST: more than that


@dataclass(frozen=True, slots=True)
class Answer:
    """The other answer: its ids where they are known, else its text."""

    text: bytes
    ended_by_token: bool  # at the model's end token or a stop token
    token_ids: tuple[int, ...] | None = None


class TieFinder:
    """Over the models of an idle engine: its pages are written to. `vocabulary`: bytes of every token."""

    def __init__(self, parts: EngineParts, vocabulary: TokenBytes, eos: Sequence[int]) -> None:
        self.parts = parts
        self.vocabulary = vocabulary
        self._eos = tuple(eos)
        self._by_bytes: dict[bytes, list[int]] = {}
        for token in range(min(len(vocabulary), parts.sampling.vocab)):
            if text := vocabulary[token]:
                self._by_bytes.setdefault(text, []).append(token)
        self._longest = max(map(len, self._by_bytes), default=0)

    def parting(self, request: RequestBatch, tokens: Sequence[int], other: Answer) -> Parting | None:
        """The nearest parting of `tokens` (of the one request) and `other`; None when no single token explains it: one is the
        other cut short, or the text is none that tokens make."""
        params = request.params if isinstance(request.params, SamplingParams) else request.params[0]
        stops = params.stop_token_ids if params.ignore_eos else (*self._eos, *params.stop_token_ids)
        texts = [other.text]
        if other.ended_by_token:  # or by a stop string, which was cut off
            texts += [other.text + stop.encode() for stop in params.stop]
        pairs = list(dict.fromkeys(pair for text in texts for pair in self._candidates(tokens, other, text, stops)))
        if not pairs:
            return None
        rows, row_params = self._row(request, params)
        best: Parting | None = None
        try:
            for start in range(0, len(pairs), CHUNK):
                piece = pairs[start : start + CHUNK]
                margins = self._margins(request, tokens, piece, row_params)
                for (index, candidate), margin in zip(piece, margins, strict=True):
                    if best is None or margin < best.margin:
                        best = Parting(index, tokens[index], candidate, margin)
        finally:
            self.parts.sampling.release(rows)
        return best

    def _candidates(
        self, tokens: Sequence[int], other: Answer, whole: bytes, stops: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """(index, token) that the other answer, of text `whole`, may have had instead of tokens[index], all before it being the
        same."""
        if other.token_ids is not None:
            for index, (one, two) in enumerate(zip(tokens, other.token_ids, strict=False)):
                if one != two:
                    yield index, two
                    return
            return
        done = b""
        for index, token in enumerate(tokens):
            rest = whole[len(done) :]
            if not rest and other.ended_by_token:
                yield from ((index, stop) for stop in dict.fromkeys(stops) if stop != token)
            for length in range(1, min(len(rest), self._longest) + 1):
                yield from ((index, t) for t in self._by_bytes.get(rest[:length], ()) if t != token)
            text = self.vocabulary[token]
            if not rest.startswith(text) or (not rest and not text):
                return
            done += text

    def _row(self, request: RequestBatch, params: SamplingParams) -> tuple[np.ndarray, RowParams]:
        """The row's parameters as a step would have them, under a handle that nobody uses now."""
        state, handle = self.parts.sampling, np.zeros(1, np.int32)
        state.set(
            handle,
            params,
            request_id=request.request_id,
            prompt_values=request.prompt_values,
            prompt_offsets=request.prompt_offsets,
            request_seeds=request.seeds,
        )
        return handle, state.gather(handle, state.new_rows(1))

    @torch.inference_mode()
    def _margins(
        self, request: RequestBatch, tokens: Sequence[int], pairs: Sequence[tuple[int, int]], params: RowParams
    ) -> list[float]:
        """Of each (index, other token), by bisection: the least change, half of it up for the other, half down for the one."""
        prompt = request.prompt_values
        last = max(index for index, _ in pairs)
        ids = np.concatenate([prompt, np.array(tokens[:last], np.int32)])
        places = [len(prompt) - 1 + index for index, _ in pairs]
        logits = self._logits(ids, places)[:, : params.vocab].clone()
        device = logits.device
        one = torch.tensor([tokens[index] for index, _ in pairs], device=device)
        two = torch.tensor([other for _, other in pairs], device=device)
        positions = torch.tensor(places, dtype=torch.int32, device=device)
        prior = None
        if params.any_penalty and last:
            prior = torch.full((len(pairs), last), -1, dtype=torch.int32, device=device)
            for row, (index, _) in enumerate(pairs):
                prior[row, :index] = torch.tensor(tokens[:index], dtype=torch.int32)
        row_index = torch.zeros(len(pairs), dtype=torch.int64, device=device)
        rows = torch.arange(len(pairs), device=device)

        def flips(change: Tensor) -> Tensor:
            moved = logits.clone()
            moved[rows, two] += change / 2
            moved[rows, one] -= change / 2
            return sample(moved, params, row_index, positions, prior_ids=prior).token_ids == two

        low = torch.zeros(len(pairs), device=device)
        high = torch.full_like(low, LARGEST)
        never = ~flips(high)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            flipped = flips(middle)
            high, low = torch.where(flipped, middle, high), torch.where(flipped, low, middle)
        return [float(m) for m in torch.where(never, LARGEST, high).cpu()]

    def _logits(self, ids: np.ndarray, places: Sequence[int]) -> Tensor:
        """Logits [len(places), vocab] of one row's tokens in one pass, over pages that nobody owns."""
        plan, count = self.parts.plan, len(ids)
        self.parts.core.clear_prefix_cache()
        device, block = plan.device, plan.layout.block_size
        position = torch.arange(count, dtype=torch.int32, device=device)
        table = torch.arange(1, -(-count // block) + 1, dtype=torch.int32, device=device)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
            positions=position,
            slot_mapping=(table[(position // block).long()] * block + position % block).to(torch.int32),
            block_tables=table[None],
            num_rows=1,
            num_tokens=count,
            max_query_len=count,
            max_seq_len=count,
        )
        wanted = torch.tensor(places, dtype=torch.int32, device=device)
        return self.parts.runner.forward(torch.from_numpy(ids.astype(np.int32)).to(device), metadata, wanted)


def ended_by_token(reason: int) -> bool:
    """Whether a finish reason is one that a token may have brought about."""
    return reason == _core.FINISH_STOP
