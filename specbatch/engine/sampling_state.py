"""Per-request sampling parameters as arrays indexed by handle, and the rows of one step gathered from them.

Owns parameters, seeds, bias tables and penalty counts. Knows nothing of logits or scheduling: handles come from the
Rust core, which also decides when a row ends. The host arrays are the truth; a step's rows reach the device in one
copy, and what kind of sampling the step needs is known on the host before anything is launched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.sampling_params import SamplingParams

# Columns of a packed row: 32 bits each, floats stored as their bits.
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(6)
_TOP_K, _SEED_LOW, _SEED_HIGH, _PENALTY_SLOT, _BIAS_SLOT, _PROMPT_LEN = range(6, 12)
_NUM_COLUMNS = 12

# What a row asks for beyond argmax (host only).
_SAMPLED, _TRUNCATED, _PENALISED, _BIASED, _LOGPROBS, _OPEN = 1, 2, 4, 8, 16, 32

_NO_LIMIT = 2**31 - 1


@dataclass(slots=True)
class RowParams:
    """Sampling parameters of one step's rows: [R] device tensors, views of one buffer at a fixed address, and host flags.

    The flags are exact for the rows in use, so a step that needs nothing but argmax is known before it is launched.
    The tables belong to the SamplingState, and their addresses change when `SamplingState.generation` does.
    """

    packed: Tensor  # [R, 12] int32: the buffer that the following view
    temperature: Tensor  # [R] float32; 0 is greedy
    top_p: Tensor  # [R] float32; 1: off
    min_p: Tensor  # [R] float32; 0: off
    repetition_penalty: Tensor  # [R] float32; 1: off
    presence_penalty: Tensor  # [R] float32; 0: off
    frequency_penalty: Tensor  # [R] float32; 0: off
    top_k: Tensor  # [R] int32; 0: off
    seed_low: Tensor  # [R] int32
    seed_high: Tensor  # [R] int32
    penalty_slot: Tensor  # [R] int32 into output_counts and prompt_seen; 0: none
    bias_slot: Tensor  # [R] int32 into the bias tables; 0: none
    prompt_len: Tensor  # [R] int32
    output_counts: Tensor  # [slots, vocab] int32: committed output tokens
    prompt_seen: Tensor  # [slots, vocab] bool
    bias_ids: Tensor  # [slots, W] int32, padded with 0
    bias_values: Tensor  # [slots, W] float32, padded with 0
    bias_until: Tensor  # [slots, W] int32: the entry holds while fewer output tokens than this are out
    host: NDArray[np.int32]  # [R, 12] what was copied to the device
    vocab: int
    num_rows: int = 0
    all_greedy: bool = True  # no row has a temperature
    any_open: bool = False  # some sampled row keeps the whole vocabulary
    any_top_k_p: bool = False  # some sampled row has top-k, top-p or min-p
    any_penalty: bool = False
    any_bias: bool = False  # logit bias, or min_tokens (a bias of minus infinity on stop tokens)
    any_logprobs: bool = False

    @property
    def is_plain_greedy(self) -> bool:
        """Argmax of the raw logits is the answer."""
        return self.all_greedy and not (self.any_penalty or self.any_bias or self.any_logprobs)

    def seed(self, row_index: Tensor) -> Tensor:
        """Int64 seeds of the given rows."""
        low = self.seed_low[row_index].to(torch.int64) & 0xFFFFFFFF
        return (self.seed_high[row_index].to(torch.int64) << 32) | low


def row_seed(run_seed: int, request_id: NDArray[np.int64]) -> NDArray[np.int64]:
    """A 64-bit seed for each request: SplitMix64's finaliser (Steele et al., 2014) over the run's seed, then the id."""
    run = _mix64(np.array([run_seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    ids = np.ascontiguousarray(request_id, np.int64).view(np.uint64)
    return _mix64(run ^ _mix64(ids)).view(np.int64)


def _mix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class SamplingState:
    """Parameters of every unfinished request, by handle. Not thread-safe."""

    def __init__(
        self,
        capacity: int,
        vocab: int,
        device: torch.device | str = "cpu",
        *,
        run_seed: int = 0,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.vocab = vocab
        self.device = torch.device(device)
        self.run_seed = run_seed
        self.generation = 0  # grows when a table moved: a captured graph that read it is stale
        self._eos = tuple(dict.fromkeys(int(token) for token in eos_token_ids))
        # NOTE: one row more than the capacity, at the end: handle -1 (padding) is the null row.
        self._packed = np.zeros((max(capacity, 1) + 1, _NUM_COLUMNS), np.int32)
        self._packed[:] = _null_row()
        self._kind = np.zeros(len(self._packed), np.uint8)
        self._num_special = 0  # live handles that ask for more than argmax
        self._prompts: dict[int, NDArray[np.int32]] = {}  # penalised rows that have not run yet
        self._penalty = _Slots()
        self._bias = _Slots()
        self._output_counts = torch.zeros((1, vocab), dtype=torch.int32, device=self.device)
        self._prompt_seen = torch.zeros((1, vocab), dtype=torch.bool, device=self.device)
        self._bias_ids = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        self._bias_values = torch.zeros((1, 1), dtype=torch.float32, device=self.device)
        self._bias_until = torch.zeros((1, 1), dtype=torch.int32, device=self.device)

    # -- requests come and go ------------------------------------------------------------------------------------

    def set(
        self,
        handles: NDArray[np.int32],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        request_id: NDArray[np.int64],
        prompt_values: NDArray[np.int32],
        prompt_offsets: NDArray[np.int64],
    ) -> None:
        """Note the parameters of new requests: one for all or one a handle; prompts as values and offsets [n + 1].

        Seeds: the request's own, else `row_seed(run_seed, request_id)`. ValueError when a bias or stop token id is
        outside the vocabulary; nothing has changed then.
        """
        many = [params] if isinstance(params, SamplingParams) else list(params)
        if len(many) not in (1, len(handles)) or len(request_id) != len(handles) != len(prompt_offsets) - 1:
            raise ValueError(
                f"{len(handles)} handles, {len(many)} params, {len(request_id)} request ids and "
                f"{len(prompt_offsets)} prompt offsets do not belong together"
            )
        groups: dict[int, tuple[SamplingParams, list[int]]] = {}
        for i, item in enumerate(many):
            groups.setdefault(id(item), (item, []))[1].append(i)
        biases = [self._bias_entries(item) for item, _ in groups.values()]
        if len(handles) == 0:
            return

        self.release(handles)
        self._grow(int(handles.max()))
        seeds = row_seed(self.run_seed, request_id)
        lengths = np.diff(prompt_offsets).astype(np.int32)
        for (item, members), entries in zip(groups.values(), biases, strict=True):
            chosen = np.arange(len(handles)) if len(many) == 1 else np.array(members)
            rows = handles[chosen]
            kind, packed = _kind_of(item, bool(entries)), _packed_row(item)
            if entries:
                packed[_BIAS_SLOT] = self._add_bias(entries, len(rows))
            self._packed[rows] = packed
            self._packed[rows, _PROMPT_LEN] = lengths[chosen]
            seed = np.full(len(rows), item.seed, np.int64) if item.seed is not None else seeds[chosen]
            self._packed[rows, _SEED_LOW : _SEED_HIGH + 1] = seed.view(np.int32).reshape(-1, 2)  # little endian
            self._kind[rows] = kind
            self._num_special += len(rows) if kind else 0
            if kind & _PENALISED:
                for index in chosen.tolist():
                    begin, end = prompt_offsets[index], prompt_offsets[index + 1]
                    self._prompts[int(handles[index])] = np.array(prompt_values[begin:end], np.int32)

    def release(self, handles: NDArray[np.int32]) -> None:
        """Forget finished requests. Handles never set, or released already, are ignored."""
        handles = handles[handles < len(self._packed) - 1]
        kinds = self._kind[handles]
        if not kinds.any():
            return
        handles = np.unique(handles[kinds != 0])
        self._num_special -= len(handles)
        self._penalty.release(self._packed[handles, _PENALTY_SLOT])
        self._bias.release(self._packed[handles, _BIAS_SLOT])
        self._packed[handles] = self._packed[-1]
        self._kind[handles] = 0
        for handle in handles.tolist():
            self._prompts.pop(handle, None)

    # -- a step --------------------------------------------------------------------------------------------------

    def new_rows(self, max_rows: int) -> RowParams:
        """Buffers for a step of up to `max_rows` rows; made once and filled by `gather` each step."""
        host = torch.zeros((max_rows, _NUM_COLUMNS), dtype=torch.int32)
        if self.device.type == "cuda" and torch.cuda.is_available():
            host = host.pin_memory()
        host_array = host.numpy()
        host_array[:] = _null_row()
        packed = host if self.device.type == "cpu" else host.to(self.device)
        floats = packed.view(torch.float32)
        return RowParams(
            packed=packed,
            temperature=floats[:, _TEMPERATURE],
            top_p=floats[:, _TOP_P],
            min_p=floats[:, _MIN_P],
            repetition_penalty=floats[:, _REPETITION],
            presence_penalty=floats[:, _PRESENCE],
            frequency_penalty=floats[:, _FREQUENCY],
            top_k=packed[:, _TOP_K],
            seed_low=packed[:, _SEED_LOW],
            seed_high=packed[:, _SEED_HIGH],
            penalty_slot=packed[:, _PENALTY_SLOT],
            bias_slot=packed[:, _BIAS_SLOT],
            prompt_len=packed[:, _PROMPT_LEN],
            output_counts=self._output_counts,
            prompt_seen=self._prompt_seen,
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            bias_until=self._bias_until,
            host=host_array,
            vocab=self.vocab,
        )

    def gather(self, seq_index: NDArray[np.int32], rows: RowParams) -> RowParams:
        """Fill `rows` for the handles of a step (host int32 [n]; padding -1) and return it.

        Rows past n become null rows. While no live request asks for more than argmax, nothing is copied. The copy to
        the device is asynchronous from pinned memory: gather again only after the step's results have been read.
        """
        rows.num_rows = len(seq_index)
        kinds = int(np.bitwise_or.reduce(self._kind[seq_index], initial=0)) if self._num_special else 0
        rows.all_greedy = not kinds & _SAMPLED
        rows.any_open = bool(kinds & _OPEN)
        rows.any_top_k_p = bool(kinds & _TRUNCATED)
        rows.any_penalty = bool(kinds & _PENALISED)
        rows.any_bias = bool(kinds & _BIASED)
        rows.any_logprobs = bool(kinds & _LOGPROBS)
        if kinds == 0:
            return rows
        if rows.any_penalty and self._prompts:
            self._start_counting(seq_index)
        rows.output_counts, rows.prompt_seen = self._output_counts, self._prompt_seen
        rows.bias_ids, rows.bias_values, rows.bias_until = self._bias_ids, self._bias_values, self._bias_until
        np.take(self._packed, seq_index, axis=0, out=rows.host[: len(seq_index)], mode="wrap")
        rows.host[len(seq_index) :] = self._packed[-1]
        if rows.packed.device.type != "cpu":
            rows.packed.copy_(torch.from_numpy(rows.host), non_blocking=True)
        return rows

    def commit(self, rows: RowParams, token_ids: Tensor, num_sampled: Tensor) -> None:
        """Count a step's committed tokens: token_ids int32 [R, w], num_sampled int32 [R], rows as gathered for it."""
        if not rows.any_penalty:
            return
        num_rows, width = token_ids.shape
        valid = torch.arange(width, device=token_ids.device) < num_sampled[:, None]
        slot = rows.penalty_slot[:num_rows, None].to(torch.int64).expand(num_rows, width)
        valid &= (slot > 0) & (token_ids >= 0)
        ids = token_ids.clamp(0, self.vocab - 1).to(torch.int64)
        self._output_counts.index_put_((slot, ids), valid.to(torch.int32), accumulate=True)

    # -- tables --------------------------------------------------------------------------------------------------

    def _grow(self, handle: int) -> None:
        size = len(self._packed) - 1
        if handle < size:
            return
        size = max(2 * size, handle + 1)
        packed = np.empty((size + 1, _NUM_COLUMNS), np.int32)
        packed[:] = self._packed[-1]
        packed[: len(self._packed) - 1] = self._packed[:-1]
        kind = np.zeros(size + 1, np.uint8)
        kind[: len(self._kind) - 1] = self._kind[:-1]
        self._packed, self._kind = packed, kind

    def _bias_entries(self, params: SamplingParams) -> list[tuple[int, float, int]]:
        """(token id, value, until) of a request's bias and of the stop tokens that min_tokens holds back."""
        entries = [(int(token), float(value), _NO_LIMIT) for token, value in params.logit_bias.items()]
        if params.min_tokens > 0:
            stops = dict.fromkeys((*self._eos, *params.stop_token_ids))
            entries += [(token, -np.inf, params.min_tokens) for token in stops]
        for token, _, _ in entries:
            if not 0 <= token < self.vocab:
                raise ValueError(f"token id {token} in logit_bias or stop_token_ids is outside 0 to {self.vocab - 1}")
        return entries

    def _add_bias(self, entries: list[tuple[int, float, int]], users: int) -> int:
        slot = self._bias.take(users)
        old_slots, old_width = self._bias_ids.shape
        slots, width = _doubled(old_slots, slot + 1), _doubled(old_width, len(entries))
        if (slots, width) != (old_slots, old_width):
            self._bias_ids = _enlarged(self._bias_ids, slots, width)
            self._bias_values = _enlarged(self._bias_values, slots, width)
            self._bias_until = _enlarged(self._bias_until, slots, width)
            self.generation += 1
        padded = entries + [(0, 0.0, 0)] * (width - len(entries))
        ids, values, until = zip(*padded, strict=True)
        self._bias_ids[slot].copy_(torch.tensor(ids, dtype=torch.int32))
        self._bias_values[slot].copy_(torch.tensor(values, dtype=torch.float32))
        self._bias_until[slot].copy_(torch.tensor(until, dtype=torch.int32))
        return slot

    def _start_counting(self, seq_index: NDArray[np.int32]) -> None:
        """Give penalised rows that run for the first time their counts: waiting rows cost no device memory."""
        for handle in seq_index.tolist():
            prompt = self._prompts.pop(handle, None)
            if prompt is None:
                continue
            slot = self._penalty.take(1)
            slots = _doubled(len(self._output_counts), slot + 1)
            if slots != len(self._output_counts):
                self._output_counts = _enlarged(self._output_counts, slots, self.vocab)
                self._prompt_seen = _enlarged(self._prompt_seen, slots, self.vocab)
                self.generation += 1
            self._packed[handle, _PENALTY_SLOT] = slot
            self._output_counts[slot].zero_()
            self._prompt_seen[slot].zero_()
            ids = np.unique(prompt[(prompt >= 0) & (prompt < self.vocab)]).astype(np.int64)
            self._prompt_seen[slot].index_fill_(0, torch.from_numpy(ids).to(self.device), True)


class _Slots:
    """Slots of a table, counted by use; slot 0 is the null slot and is never given out."""

    def __init__(self) -> None:
        self._users: list[int] = [0]
        self._free: list[int] = []

    def take(self, users: int) -> int:
        if self._free:
            slot = self._free.pop()
            self._users[slot] = users
            return slot
        self._users.append(users)
        return len(self._users) - 1

    def release(self, slots: NDArray[np.int32]) -> None:
        for slot in slots[slots > 0].tolist():
            self._users[slot] -= 1
            if self._users[slot] == 0:
                self._free.append(slot)


def _packed_row(params: SamplingParams) -> NDArray[np.int32]:
    row = np.zeros(_NUM_COLUMNS, np.int32)
    greedy = params.is_greedy  # truncation cannot change an argmax
    row[: _FREQUENCY + 1] = np.array(
        [
            params.temperature,
            1.0 if greedy else params.top_p,
            0.0 if greedy else params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ],
        np.float32,
    ).view(np.int32)
    row[_TOP_K] = 0 if greedy else min(params.top_k, _NO_LIMIT)
    return row


def _null_row() -> NDArray[np.int32]:
    return _packed_row(SamplingParams())


def _kind_of(params: SamplingParams, biased: bool) -> int:
    truncated = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return (
        (_SAMPLED if not params.is_greedy else 0)
        | (_TRUNCATED if truncated and not params.is_greedy else 0)
        | (_OPEN if not truncated and not params.is_greedy else 0)
        | (_PENALISED if params.has_penalties else 0)
        | (_BIASED if biased else 0)
        | (_LOGPROBS if params.logprobs else 0)
    )


def _doubled(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size


def _enlarged(table: Tensor, rows: int, columns: int) -> Tensor:
    larger = table.new_zeros((rows, columns))
    larger[: table.shape[0], : table.shape[1]] = table
    return larger
