"""A device in miniature for the Rust core: KV memory a slot, a target and a draft model that see nothing but the step's
arrays, and checks that every entry a model reads is the one it should be.

Knows no policy: what runs when is the scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch import _core
from tests.row_model import Model, Request

Ints = NDArray[np.int32]
Result = tuple[Ints, Ints, Ints]


def offsets_of(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(np.array(lengths, np.int64)))).astype(np.int64)


def make_arrays(rows: int, tokens: int, logits: int, width: int, draft_width: int) -> dict[str, Ints]:
    """The step's arrays, full of garbage."""
    shapes: dict[str, Any] = {"block_tables": (rows, width), "draft_block_tables": (rows, draft_width)}
    shapes |= {"seq_index": rows, "num_draft_tokens": rows, "logits_start_loc": rows + 1, "logits_indices": logits}
    for prefix in ("", "draft_"):
        shapes |= {prefix + "query_start_loc": rows + 1, prefix + "seq_lens": rows}
        shapes |= {prefix + name: tokens for name in ("input_ids", "positions", "slot_mapping")}
    return {name: np.full(shape, 23130, np.int32) for name, shape in shapes.items()}


@dataclass
class Finished:
    """One row of a FinishedBatch."""

    request_id: int
    tokens: list[int]
    text: bytes
    reason: int
    error: int
    stop_token: int
    cached: int
    steps: int
    drafted: int
    accepted: int
    wasted: int
    preempted: int


@dataclass
class PagedDevice:
    """Scheduler, arrays and memory, driven a step at a time."""

    model: Model = field(default_factory=Model)
    num_pages: int = 64
    block_size: int = 4
    draft_block_size: int = 0
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    max_model_len: int = 64
    draft_max_model_len: int = 0
    max_speculative_tokens: int = 5
    eos: tuple[int, ...] = ()
    prefix_cache: bool = True
    token_room: int = 0  # 0: room for every row's drafts
    logits_room: int = 0

    def __post_init__(self) -> None:
        most = self.max_num_seqs * (self.max_speculative_tokens + 1)
        self.token_room = max(self.token_room or most, self.max_num_batched_tokens)
        self.logits_room = self.logits_room or most
        self.core = _core.Scheduler(
            num_pages=self.num_pages,
            block_size=self.block_size,
            draft_block_size=self.draft_block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            draft_max_model_len=self.draft_max_model_len,
            max_speculative_tokens=self.max_speculative_tokens,
            eos_token_ids=np.array(self.eos, np.int32),
            prefix_cache=self.prefix_cache,
        )
        table = [self.model.bytes_of(token) for token in range(self.model.vocabulary)]
        self.core.set_token_bytes(np.frombuffer(b"".join(table), np.uint8), offsets_of([len(b) for b in table]))
        self.arrays = make_arrays(
            self.max_num_seqs,
            self.token_room,
            self.logits_room,
            -(-self.max_model_len // self.block_size),
            -(-self.max_model_len // self.draft_block_size) if self.draft_block_size else 1,
        )
        self.buffers = _core.StepBuffers(**self.arrays)
        # page, offset -> model, its life on the page, context
        self.memory: dict[tuple[int, int], tuple[str, int, tuple[int, ...]]] = {}
        self.tenant: dict[int, tuple[str, int]] = {}  # page -> model that wrote it last, and how often it changed hands
        self.tokens: dict[int, list[int]] = {}  # handle -> committed tokens as far as known
        self.requests: dict[int, Request] = {}  # handle -> request
        self.finished: dict[int, Finished] = {}  # request id -> answer
        self.result: Result = self.nothing()
        self.found: dict[int, tuple[list[int], int]] = {}  # handle -> tokens, drafts of the step under way
        self.info: _core.StepInfo | None = None

    @staticmethod
    def nothing() -> Result:
        return np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)

    def add(self, requests: list[Request]) -> list[int]:
        n = len(requests)
        strings = [stop for request in requests for stop in request.stop_strings]
        handles = self.core.add_requests(
            request_id=np.array([r.request_id for r in requests], np.int64),
            shard=np.array([r.shard for r in requests], np.int32),
            prompt_values=np.array([t for r in requests for t in r.prompt], np.int32),
            prompt_offsets=offsets_of([len(r.prompt) for r in requests]),
            max_tokens=np.array([r.max_tokens for r in requests], np.int32),
            min_tokens=np.array([r.min_tokens for r in requests], np.int32),
            ignore_eos=np.array([r.ignore_eos for r in requests], np.bool_),
            may_draft=np.array([r.may_draft for r in requests], np.bool_),
            stop_token_values=np.array([t for r in requests for t in r.stop_tokens], np.int32),
            stop_token_offsets=offsets_of([len(r.stop_tokens) for r in requests]),
            stop_string_values=np.frombuffer(b"".join(strings), np.uint8),
            stop_string_offsets=offsets_of([len(stop) for stop in strings]),
            stop_string_rows=offsets_of([len(r.stop_strings) for r in requests]),
        ).tolist()
        assert len(set(handles)) == n
        for handle, request in zip(handles, requests, strict=True):
            assert handle not in self.requests, "a handle in use was given again"
            self.requests[handle] = request
            self.tokens[handle] = list(request.prompt)
        return handles

    # -- what may happen between two steps -------------------------------------------------------------------------

    def preempt(self, handle: int) -> bool:
        done = self.core.preempt(handle)
        if done:
            self.found.pop(handle, None)
        return done

    def abort(self, handle: int) -> bool:
        done = self.core.abort(handle)
        if done:
            self.found.pop(handle, None)
        return done

    def abort_step(self) -> None:
        assert self.info is not None
        self.core.abort_step(self.info.step_id)
        self.result = self.nothing()
        self.found.clear()

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> _core.StepInfo:
        """Give the last result, take the next step, run the models on it."""
        self.advance()
        assert self.info is not None
        self.forward()
        return self.info

    def advance(self) -> None:
        step_id = self.info.step_id if self.info else 0
        self.info = self.core.step(step_id, *self.result, self.buffers)
        self.result = self.nothing()
        for handle, (tokens, _) in self.found.items():
            self.tokens[handle].extend(tokens)
        self.found = {}
        self.core.check_integrity()
        self.take()
        self.check_padding()

    def take(self) -> None:
        batch = self.core.take_finished()
        for i, handle in enumerate(batch.handle.tolist()):
            request = self.requests.pop(handle)
            answer = Finished(
                request_id=int(batch.request_id[i]),
                tokens=batch.token_values[batch.token_offsets[i] : batch.token_offsets[i + 1]].tolist(),
                text=batch.text_values[batch.text_offsets[i] : batch.text_offsets[i + 1]].tobytes(),
                reason=int(batch.finish_reason[i]),
                error=int(batch.error_code[i]),
                stop_token=int(batch.stop_token[i]),
                cached=int(batch.num_cached_tokens[i]),
                steps=int(batch.num_steps[i]),
                drafted=int(batch.num_drafted[i]),
                accepted=int(batch.num_accepted[i]),
                wasted=int(batch.num_wasted[i]),
                preempted=int(batch.num_preempted[i]),
            )
            assert answer.request_id == request.request_id
            assert batch.shard[i] == request.shard
            assert batch.num_prompt_tokens[i] == len(request.prompt)
            assert batch.num_output_tokens[i] == len(answer.tokens)
            known = self.tokens.pop(handle)[len(request.prompt) :]
            assert known[: len(answer.tokens)] == answer.tokens
            self.finished[answer.request_id] = answer

    def run(self, most: int = 10_000) -> dict[int, Finished]:
        """Step until nothing is left to run."""
        for _ in range(most):
            if self.step().kind == _core.STEP_IDLE:
                assert self.core.num_unfinished == 0
                return self.finished
        raise AssertionError(f"no end after {most} steps: {self.info}")

    def check_answer(self, request: Request) -> None:
        """The row's answer is the one it would have alone, one token at a time."""
        answer = self.finished[request.request_id]
        expected = self.model.complete(request, self.eos, self.max_model_len)
        assert (answer.tokens, answer.text, answer.reason) == expected, (request, answer)

    def check_padding(self) -> None:
        info = self.info
        assert info is not None
        rows = info.num_rows
        for name, array in self.arrays.items():
            used = rows
            if name.endswith("start_loc"):
                last = {"q": info.num_tokens, "l": info.num_logits, "d": info.draft_num_tokens}[name[0]]
                assert (array[rows:] == last).all(), (name, array)
                continue
            if name.endswith(("input_ids", "positions", "slot_mapping")):
                used = info.draft_num_tokens if name.startswith("draft") else info.num_tokens
            elif name == "logits_indices":
                used = info.num_logits
            padding = -1 if name.endswith(("slot_mapping", "seq_index")) else 0
            assert (array[used:] == padding).all(), (name, used, array)

    # -- the models ------------------------------------------------------------------------------------------------

    def slot(self, prefix: str, row: int, position: int) -> tuple[int, int]:
        size = self.draft_block_size if prefix else self.block_size
        page = int(self.arrays[prefix + "block_tables"][row, position // size])
        assert page > 0, f"no {prefix or 'target '}page for position {position} of row {row}"
        return page, position % size

    def compute(self, prefix: str, row: int, tokens: tuple[int, ...], first: int) -> None:
        """Entries of tokens[first:], then read every entry of the row."""
        for position in range(first, len(tokens)):
            page, offset = self.slot(prefix, row, position)
            owner, life = self.tenant.get(page, ("", 0))
            if owner != prefix + "model":
                owner, life = prefix + "model", life + 1
                self.tenant[page] = (owner, life)
            self.memory[page, offset] = (owner, life, tokens[: position + 1])
        for position in range(len(tokens)):
            page, offset = self.slot(prefix, row, position)
            owner, life = self.tenant.get(page, ("", 0))
            expected = (prefix + "model", life, tokens[: position + 1])
            held = self.memory.get((page, offset))
            assert owner == prefix + "model", (prefix, row, position, owner)
            assert held == expected, (prefix, row, position)

    def packed(self, prefix: str, row: int) -> tuple[slice, int, int]:
        """A row's packed range, its first position, its context length; positions and slots are checked."""
        starts = self.arrays[prefix + "query_start_loc"]
        where = slice(int(starts[row]), int(starts[row + 1]))
        length = int(self.arrays[prefix + "seq_lens"][row])
        first = length - (where.stop - where.start)
        size = self.draft_block_size if prefix else self.block_size
        for at, position in zip(range(where.start, where.stop), range(first, length), strict=True):
            page, offset = self.slot(prefix, row, position)
            assert self.arrays[prefix + "positions"][at] == position
            assert self.arrays[prefix + "slot_mapping"][at] == page * size + offset
        return where, first, length

    def forward(self) -> None:
        info = self.info
        assert info is not None
        lines, sampled, drafted = [], [], []
        for row in range(info.num_rows):
            handle = int(self.arrays["seq_index"][row])
            known = tuple(self.tokens[handle])
            drafts = self.propose(row, known)
            if info.kind == _core.STEP_DRAFT_PREFILL:
                self.found[handle] = ([], 0)
                continue
            found = self.verify(row, known, drafts)
            reserved = int(self.arrays["num_draft_tokens"][row])
            self.found[handle] = (found, reserved)
            lines.append(found + [0] * (self.max_speculative_tokens + 1 - len(found)))
            sampled.append(len(found))
            drafted.append(reserved)
        if lines:
            self.result = (np.array(lines, np.int32), np.array(sampled, np.int32), np.array(drafted, np.int32))

    def propose(self, row: int, known: tuple[int, ...]) -> list[int]:
        """What the draft model (or whoever proposes outside) says; it computes its KV on the way."""
        info = self.info
        assert info is not None
        k = int(self.arrays["num_draft_tokens"][row])
        where, first, length = self.packed("draft_", row)
        if where.start == where.stop:
            assert not self.arrays["draft_block_tables"][row].any()
            assert k == 0 or info.method != _core.METHOD_DRAFT
        else:
            assert self.arrays["draft_input_ids"][where].tolist() == list(known[first:length])
            assert info.kind == _core.STEP_DRAFT_PREFILL or length == len(known)
            self.compute("draft_", row, known[:length], first)
        if info.kind != _core.STEP_DECODE or info.method not in (_core.METHOD_DRAFT, _core.METHOD_EXTERNAL):
            return []
        drafts: list[int] = []
        for j in range(k):
            if j > 0 and info.method == _core.METHOD_DRAFT:
                self.compute("draft_", row, known + tuple(drafts), len(known) + j - 1)
            drafts.append(self.model.draft(known + tuple(drafts)))
        return drafts

    def verify(self, row: int, known: tuple[int, ...], drafts: list[int]) -> list[int]:
        """What the target commits: the accepted drafts and one token more."""
        info = self.info
        assert info is not None
        where, first, length = self.packed("", row)
        ids = self.arrays["input_ids"][where].tolist()
        k = int(self.arrays["num_draft_tokens"][row])
        committed = len(ids) - k
        if info.method == _core.METHOD_NGRAM:
            drafts = ids[committed:]
        assert len(drafts) == k
        assert ids[:committed] == list(known[first : first + committed])
        tokens = known[: first + committed] + tuple(drafts)
        assert len(tokens) == length
        self.compute("", row, tokens, first)
        starts = self.arrays["logits_start_loc"]
        wanted = self.arrays["logits_indices"][starts[row] : starts[row + 1]].tolist()
        if info.kind == _core.STEP_PREFILL:
            assert k == 0
            assert wanted == ([where.stop - 1] if length == len(known) else [])
        else:
            assert first == len(known) - 1
            assert wanted == list(range(where.start, where.stop))
        found: list[int] = []
        if wanted:
            for j in range(k + 1):
                found.append(self.model.next(known + tuple(found)))
                if j < k and drafts[j] != found[j]:
                    break
        return found


def prompts(count: int, length: int = 6, shared: int = 0) -> list[tuple[int, ...]]:
    """Prompts of different tokens and slightly different lengths, the first `shared` tokens in common."""
    common = tuple(range(shared))
    return [common + tuple((7 * i + j) % 5 for j in range(length + i % 3)) for i in range(count)]


def run(
    device: PagedDevice, requests: list[Request], method: int = _core.METHOD_NONE, k: int = 0
) -> dict[int, Finished]:
    device.core.set_speculation(method, k)
    device.add(requests)
    return device.run()


def bare(max_num_seqs: int, eos: list[int] | None = None) -> tuple[_core.Scheduler, dict[str, Ints], _core.StepBuffers]:
    """Scheduler, arrays and buffers without a model: the test makes the tokens up."""
    device = PagedDevice(num_pages=16, max_num_seqs=max_num_seqs, eos=tuple(eos or ()))
    return device.core, device.arrays, device.buffers


def add_bare(
    core: _core.Scheduler,
    max_tokens: int,
    request_id: int = 0,
    shard: int = 0,
    stop_tokens: list[int] | None = None,
) -> int:
    handles = core.add_requests(
        request_id=np.array([request_id], np.int64),
        shard=np.array([shard], np.int32),
        prompt_values=np.array([1, 2, 3], np.int32),
        prompt_offsets=np.array([0, 3], np.int64),
        max_tokens=np.array([max_tokens], np.int32),
        stop_token_values=np.array(stop_tokens or [], np.int32),
        stop_token_offsets=np.array([0, len(stop_tokens or [])], np.int64),
    )
    return int(handles[0])


def result(tokens: list[list[int]], num_draft: list[int]) -> Result:
    """A step's result from the tokens of each row."""
    width = max(len(line) for line in tokens)
    ids = np.array([line + [0] * (width - len(line)) for line in tokens], np.int32)
    return ids, np.array([len(line) for line in tokens], np.int32), np.array(num_draft, np.int32)
