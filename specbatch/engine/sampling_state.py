"""Per-request sampling parameters as arrays indexed by handle, and the rows of one step gathered from them.

Owns parameters, seeds, bias tables and penalty counts. Knows nothing of logits or scheduling: handles come from the
Rust core, which also decides when a row ends. The host arrays are the truth; a step's rows reach the device in one
copy, and what kind of sampling the step needs is known on the host before anything is launched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.engine.row_params import (
    BIAS_SLOT,
    BIASED,
    LOGPROBS,
    NUM_COLUMNS,
    PENALISED,
    PENALTY_SLOT,
    PROMPT_LEN,
    SEED_HIGH,
    SEED_LOW,
    RowParams,
    Tables,
    kind_of,
    null_row,
    packed_rows,
    rows_over,
)
from specbatch.sampling_params import SamplingParams

__all__ = ["RowParams", "SamplingState", "count_tokens", "row_seed"]

_NO_LIMIT = 2**31 - 1


def row_seed(run_seed: int, request_id: NDArray[np.int64]) -> NDArray[np.int64]:
    """A 64-bit seed for each request: SplitMix64 (Steele et al., 2014) started at the mixed run seed, by id."""
    run = _mix64(np.array([run_seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    ids = np.ascontiguousarray(request_id, np.int64).view(np.uint64)
    return _mix64(run + ids).view(np.int64)


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
        self._packed = np.zeros((max(capacity, 1) + 1, NUM_COLUMNS), np.int32)
        self._packed[:] = null_row()
        self._kind = np.zeros(len(self._packed), np.uint8)
        self._version = 0  # grows with every change of parameters
        self._num_special = 0  # live handles that ask for more than argmax
        self._prompts: dict[int, NDArray[np.int32]] = {}  # penalised rows that have not run yet
        self._penalty = _Slots()
        self._bias = _Slots()
        self._tables = Tables.empty(vocab, self.device)
        self._seen_bound = np.zeros(1, np.int64)  # at least as many seen tokens as each slot has

    # -- requests come and go ------------------------------------------------------------------------------------

    def set(
        self,
        handles: NDArray[np.int32],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        request_id: NDArray[np.int64],
        prompt_values: NDArray[np.int32],
        prompt_offsets: NDArray[np.int64],
        request_seeds: NDArray[np.int64] | None = None,
    ) -> None:
        """Note the parameters of new requests: one for all or one a handle; prompts as values and offsets [n + 1].

        Seeds: `request_seeds` [n] if given, else the parameters' own, else `row_seed(run_seed, request_id)`.
        ValueError as in `check`; nothing has changed then.
        """
        many = [params] if isinstance(params, SamplingParams) else list(params)
        lengths = np.diff(prompt_offsets).astype(np.int32)
        if len(many) not in (1, len(handles)) or not len(request_id) == len(handles) == len(lengths):
            raise ValueError(
                f"{len(handles)} handles, {len(many)} params, {len(request_id)} request ids and {len(lengths)} prompts "
                "do not belong together"
            )
        number = {id(item): i for i, item in enumerate(many)}  # the last of equal objects stands for all
        which = np.array([number[id(item)] for item in many] if len(many) > 1 else [0] * len(handles), np.int64)
        biases = [self._bias_entries(item) for item in many]
        if len(handles) == 0:
            return

        self.release(handles)
        self._version += 1
        self._grow(int(handles.max()))
        packed, kinds = packed_rows(many, self.vocab), np.array([kind_of(item) for item in many], np.uint8)
        users = np.bincount(which, minlength=len(many))
        for i, entries in enumerate(biases):
            if entries and users[i]:
                packed[i, BIAS_SLOT] = self._add_bias(entries, int(users[i]))
                kinds[i] |= BIASED
        seeds = row_seed(self.run_seed, request_id)
        own = np.array([item.seed is not None for item in many])[which]
        seeds[own] = np.array([item.seed or 0 for item in many], np.int64)[which][own]
        seeds = seeds if request_seeds is None else request_seeds
        self._packed[handles] = packed[which]
        self._packed[handles, PROMPT_LEN] = lengths
        self._packed[handles, SEED_LOW : SEED_HIGH + 1] = seeds.view(np.int32).reshape(-1, 2)  # little endian
        self._kind[handles] = kinds[which]
        self._num_special += int(np.count_nonzero(kinds[which]))
        for i in np.flatnonzero(kinds[which] & PENALISED).tolist():
            begin, end = prompt_offsets[i], prompt_offsets[i + 1]
            self._prompts[int(handles[i])] = np.array(prompt_values[begin:end], np.int32)

    def check(self, params: SamplingParams) -> None:
        """ValueError when a token of the bias, or a stop token held back by min_tokens, is outside the vocabulary."""
        self._bias_entries(params)

    def release(self, handles: NDArray[np.int32]) -> None:
        """Forget finished requests. Handles never set, or released already, are ignored."""
        handles = handles[handles < len(self._packed) - 1]
        kinds = self._kind[handles]
        if not kinds.any():
            return
        self._version += 1
        handles = np.unique(handles[kinds != 0])
        self._num_special -= len(handles)
        self._penalty.release(self._packed[handles, PENALTY_SLOT])
        self._bias.release(self._packed[handles, BIAS_SLOT])
        self._packed[handles] = self._packed[-1]
        self._kind[handles] = 0
        for handle in handles.tolist():
            self._prompts.pop(handle, None)

    # -- a step --------------------------------------------------------------------------------------------------

    def new_rows(self, max_rows: int) -> RowParams:
        """Buffers for a step of up to `max_rows` rows; made once and filled by `gather` each step."""
        host = torch.zeros((max_rows, NUM_COLUMNS), dtype=torch.int32)
        if self.device.type == "cuda" and torch.cuda.is_available():
            host = host.pin_memory()
        host_array = host.numpy()
        host_array[:] = null_row()
        packed = host if self.device.type == "cpu" else host.to(self.device)
        return rows_over(packed, host_array, self._tables)

    def gather(self, seq_index: NDArray[np.int32], rows: RowParams) -> RowParams:
        """Fill `rows` for the handles of a step (host int32 [n]; padding -1) and return it.

        Rows past n become null rows. While no live request asks for more than argmax, nothing is copied. The copy to
        the device is asynchronous from pinned memory: gather again only after the step's results have been read.
        """
        handles = seq_index.tobytes()
        if rows.gathered == (self._version, handles):  # the rows of the step before, as they were
            return rows
        rows.num_rows = len(seq_index)
        rows.kind = int(np.bitwise_or.reduce(self._kind[seq_index], initial=0)) if self._num_special else 0
        if rows.kind == 0:
            rows.gathered = self._version, handles
            return rows
        if rows.any_penalty and self._prompts:
            self._start_counting(seq_index)
        np.take(self._packed, seq_index, axis=0, out=rows.host[: len(seq_index)], mode="wrap")
        rows.host[len(seq_index) :] = self._packed[-1]
        if rows.packed.device.type != "cpu":
            rows.packed.copy_(torch.from_numpy(rows.host), non_blocking=True)
        rows.gathered = self._version, handles
        return rows

    def commit(self, rows: RowParams, token_ids: Tensor, num_sampled: Tensor) -> None:
        """Count a step's committed tokens: token_ids int32 [R, w], num_sampled int32 [R], rows as gathered for it."""
        if not rows.any_penalty:
            return
        num_rows, width = token_ids.shape
        self._make_room(rows.host[:num_rows, PENALTY_SLOT], width)
        count_tokens(self._tables, rows.penalty_slot[:num_rows], token_ids, num_sampled)

    def wants_logprobs(self, handles: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of the handles [n] asked for logprobs."""
        return np.asarray(self._kind[handles] & LOGPROBS, np.bool_)

    def prompt_len(self, handle: int) -> int:
        """Tokens of the request's prompt."""
        return int(self._packed[handle, PROMPT_LEN])

    # -- tables --------------------------------------------------------------------------------------------------

    def _grow(self, handle: int) -> None:
        size = len(self._packed) - 1
        if handle < size:
            return
        size = max(2 * size, handle + 1)
        packed = np.empty((size + 1, NUM_COLUMNS), np.int32)
        packed[:] = self._packed[-1]
        packed[: len(self._packed) - 1] = self._packed[:-1]
        kind = np.zeros(size + 1, np.uint8)
        kind[: len(self._kind) - 1] = self._kind[:-1]
        self._packed, self._kind = packed, kind

    def _bias_entries(self, params: SamplingParams) -> list[tuple[int, float, int]]:
        """(token id, value, until) of a request's bias and of the stop tokens that min_tokens holds back."""
        if not params.logit_bias and params.min_tokens == 0:
            return []
        entries = [(int(token), float(value), _NO_LIMIT) for token, value in params.logit_bias.items()]
        if params.min_tokens > 0:
            stops = dict.fromkeys(params.stop_token_ids if params.ignore_eos else (*self._eos, *params.stop_token_ids))
            entries += [(token, -np.inf, params.min_tokens) for token in stops]
        for token, _, _ in entries:
            if not 0 <= token < self.vocab:
                raise ValueError(f"token id {token} in logit_bias or stop_token_ids is outside 0 to {self.vocab - 1}")
        return entries

    def _add_bias(self, entries: list[tuple[int, float, int]], users: int) -> int:
        slot = self._bias.take(users)
        old_slots, old_width = self._tables.bias_ids.shape
        slots, width = _doubled(old_slots, slot + 1), _doubled(old_width, len(entries))
        if (slots, width) != (old_slots, old_width):
            self._tables.bias_ids = _enlarged(self._tables.bias_ids, slots, width)
            self._tables.bias_values = _enlarged(self._tables.bias_values, slots, width)
            self._tables.bias_until = _enlarged(self._tables.bias_until, slots, width)
            self.generation += 1
        padded = entries + [(0, 0.0, 0)] * (width - len(entries))
        ids, values, until = zip(*padded, strict=True)
        self._tables.bias_ids[slot].copy_(torch.tensor(ids, dtype=torch.int32))
        self._tables.bias_values[slot].copy_(torch.tensor(values, dtype=torch.float32))
        self._tables.bias_until[slot].copy_(torch.tensor(until, dtype=torch.int32))
        return slot

    def _start_counting(self, seq_index: NDArray[np.int32]) -> None:
        """Give penalised rows that run for the first time their counts: waiting rows cost no device memory."""
        for handle in seq_index.tolist():
            prompt = self._prompts.pop(handle, None)
            if prompt is None:
                continue
            ids = np.unique(prompt[(prompt >= 0) & (prompt < self.vocab)])
            slot, tables = self._penalty.take(1), self._tables
            self._enlarge_counts(slot + 1, len(ids))
            self._packed[handle, PENALTY_SLOT] = slot
            self._version += 1
            self._seen_bound[slot] = len(ids)
            for table in (tables.output_counts, tables.prompt_seen, tables.seen_ids):
                table[slot].zero_()
            seen = torch.from_numpy(ids).to(self.device)
            tables.prompt_seen[slot].index_fill_(0, seen.to(torch.int64), True)
            tables.seen_ids[slot, : len(ids)] = seen
            tables.num_seen[slot] = len(ids)

    def _make_room(self, slots: NDArray[np.int32], width: int) -> None:
        """Space for `width` more seen tokens in each slot. How many there are is known to the host as a bound only."""
        slots = slots[slots > 0]
        self._seen_bound[slots] += width
        if self._seen_bound.max() <= self._tables.seen_ids.shape[1]:
            return
        self._seen_bound[:] = self._tables.num_seen[:, 0].cpu().numpy()  # waits for the device, once in a doubling
        self._seen_bound[slots] += width
        self._enlarge_counts(0, int(self._seen_bound.max()))

    def _enlarge_counts(self, slots: int, seen: int) -> None:
        tables = self._tables
        slots, seen = _doubled(len(tables.num_seen), slots), _doubled(tables.seen_ids.shape[1], seen)
        if (slots, seen) == tables.seen_ids.shape:
            return
        tables.output_counts = _enlarged(tables.output_counts, slots, self.vocab)
        tables.prompt_seen = _enlarged(tables.prompt_seen, slots, self.vocab)
        tables.seen_ids = _enlarged(tables.seen_ids, slots, seen)
        tables.num_seen = _enlarged(tables.num_seen, slots, 1)
        self._seen_bound = np.concatenate((self._seen_bound, np.zeros(slots - len(self._seen_bound), np.int64)))
        self.generation += 1


def count_tokens(tables: Tables, penalty_slot: Tensor, token_ids: Tensor, num_sampled: Tensor) -> None:
    """Add committed tokens int32 [R, w] to the counts and seen tokens of each row's slot [R]. Static, no host sync."""
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    slot = penalty_slot[:, None].to(torch.int64)
    valid = (column < num_sampled[:, None]) & (slot > 0) & (token_ids >= 0)
    ids = token_ids.clamp(0, tables.output_counts.shape[1] - 1)
    slot = torch.where(valid, slot, 0)  # what is not valid lands in the null slot, as nothing
    tables.output_counts.index_put_((slot, ids.to(torch.int64)), valid.to(torch.int32), accumulate=True)
    place = torch.where(valid, tables.num_seen[slot, 0] + valid.cumsum(dim=1) - 1, 0)
    tables.seen_ids.index_put_((slot, place), torch.where(valid, ids, 0))
    tables.num_seen.index_put_((slot, torch.zeros_like(slot)), valid.to(torch.int32), accumulate=True)


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


def _doubled(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size


def _enlarged(table: Tensor, rows: int, columns: int) -> Tensor:
    larger = table.new_zeros((rows, columns))
    larger[: table.shape[0], : table.shape[1]] = table
    return larger
