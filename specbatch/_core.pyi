"""Typed surface of the Rust core (the contract between Python and Rust).

Rust owns token ids, counts, statuses, queues, pages and stop conditions; Python owns tensors, sampling,
Parquet and policy. No per-sequence object crosses this boundary: everything is an integer or a C-contiguous array.

Letters in shapes: R = rows a step can hold, T = packed tokens a step can hold, L = logits a step can ask for,
P / Pd = pages a row can hold in the target / draft table, n = requests in a call.
"""

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ERROR_EMPTY_PROMPT",
    "ERROR_NONE",
    "ERROR_PROMPT_TOO_LONG",
    "ERROR_TOO_FEW_PAGES",
    "FINISH_ABORTED",
    "FINISH_ERROR",
    "FINISH_LENGTH",
    "FINISH_STOP",
    "METHOD_DRAFT",
    "METHOD_EXTERNAL",
    "METHOD_NGRAM",
    "METHOD_NGRAM_SHADOW",
    "METHOD_NONE",
    "STEP_DECODE",
    "STEP_DRAFT_PREFILL",
    "STEP_IDLE",
    "STEP_PREFILL",
    "AcceptanceCounts",
    "CpuDecoder",
    "CpuLayerPages",
    "FinishedBatch",
    "Scheduler",
    "StepBuffers",
    "StepInfo",
    "__version__",
    "accept_drafts",
    "cpu_attention",
    "cpu_draft",
    "cpu_write_kv",
    "find_ngram",
]

__version__: Final[str]

# StepInfo.kind
STEP_IDLE: Final[int]  # 0: nothing can run (all done, or nothing was added)
STEP_PREFILL: Final[int]  # 1: chunks of prompts (or of preempted rows being recomputed)
STEP_DECODE: Final[int]  # 2: one committed token a row, plus its drafts to verify
STEP_DRAFT_PREFILL: Final[int]  # 3: only the draft model runs, to close gaps in its KV (catch-up)

# Speculation methods
METHOD_NONE: Final[int]  # 0: autoregressive
METHOD_NGRAM: Final[int]  # 1: proposals looked up in Rust and already in input_ids
METHOD_DRAFT: Final[int]  # 2: Python proposes with a draft model that keeps its KV in the draft tenant
METHOD_EXTERNAL: Final[int]  # 3: Python proposes; no KV of its own
METHOD_NGRAM_SHADOW: Final[int]  # 4: only in AcceptanceCounts: what n-gram would have got on the tokens rows committed

# FinishedBatch.finish_reason
FINISH_STOP: Final[int]  # 1
FINISH_LENGTH: Final[int]  # 2
FINISH_ERROR: Final[int]  # 3
FINISH_ABORTED: Final[int]  # 4

# FinishedBatch.error_code
ERROR_NONE: Final[int]  # 0
ERROR_PROMPT_TOO_LONG: Final[int]  # 1: prompt leaves no room in max_model_len
ERROR_TOO_FEW_PAGES: Final[int]  # 2: the row alone needs more pages than the pool has
ERROR_EMPTY_PROMPT: Final[int]  # 3: no token at all

@final
class StepBuffers:
    """The step's arrays: all int32, C-contiguous, allocated (and kept alive) by Python, filled in place by Rust.

    Everything past the rows and tokens in use is padding: ids and positions 0, slots -1, block tables 0 (the null
    page), seq_lens 0, seq_index -1, start locations equal to the last used one. So a captured graph may always read
    a whole bucket. Raises ValueError that names the array, the expected and the actual dtype or shape.
    """

    def __new__(
        cls,
        *,
        seq_index: NDArray[np.int32],  # [R] handle of the row
        query_start_loc: NDArray[np.int32],  # [R + 1] packed token range of each row
        seq_lens: NDArray[np.int32],  # [R] tokens of context at the end of this step, its own tokens included
        num_draft_tokens: NDArray[np.int32],  # [R] drafts reserved for (n-gram: proposed to) the row, 0..k
        input_ids: NDArray[np.int32],  # [T] a decode row: last committed token, then its drafts
        positions: NDArray[np.int32],  # [T]
        slot_mapping: NDArray[np.int32],  # [T] page * block_size + offset
        block_tables: NDArray[np.int32],  # [R, P]
        logits_start_loc: NDArray[np.int32],  # [R + 1] range of each row in logits_indices
        logits_indices: NDArray[np.int32],  # [L] packed token whose logits are wanted
        draft_query_start_loc: NDArray[np.int32],  # [R + 1] committed tokens the draft has not seen yet
        draft_seq_lens: NDArray[np.int32],  # [R]
        draft_input_ids: NDArray[np.int32],  # [T]
        draft_positions: NDArray[np.int32],  # [T]
        draft_slot_mapping: NDArray[np.int32],  # [T] page * draft_block_size + offset
        draft_block_tables: NDArray[np.int32],  # [R, Pd] also covers the slots of this step's own drafts
    ) -> StepBuffers: ...

@final
class StepInfo:
    """What one step is: plain ints, frozen. Give step_id back with the step's result."""

    step_id: int
    kind: int
    method: int  # METHOD_* used in this step (decode steps; NONE when no row has a draft)
    num_rows: int
    num_tokens: int  # packed target tokens (draft tokens for STEP_DRAFT_PREFILL are in draft_num_tokens)
    num_logits: int
    max_query_len: int
    max_seq_len: int
    total_seq_len: int  # sum of seq_lens: what attention reads
    num_draft_tokens: int  # sum over rows
    max_draft_tokens: int  # max over rows
    draft_num_tokens: int  # packed tokens of the draft model's first pass
    draft_max_query_len: int
    draft_max_seq_len: int
    num_running: int
    num_waiting: int
    num_finished: int  # waiting for take_finished
    num_preempted: int  # in this step
    num_draft_dropped: int  # rows whose draft pages were taken back in this step
    free_pages: int
    cached_pages: int  # reference count 0, kept for the prefix cache
    target_pages: int
    draft_pages: int

@final
class FinishedBatch:
    """Finished rows as arrays; values + offsets for what has no fixed length."""

    handle: NDArray[np.int32]  # [n] free for reuse from now on
    request_id: NDArray[np.int64]
    shard: NDArray[np.int32]
    finish_reason: NDArray[np.uint8]
    error_code: NDArray[np.uint8]
    stop_token: NDArray[np.int32]  # the id that ended the row, -1: none
    num_prompt_tokens: NDArray[np.int32]
    num_cached_tokens: NDArray[np.int32]  # prompt tokens not computed at first admission, thanks to the prefix cache
    num_output_tokens: NDArray[np.int32]
    num_steps: NDArray[np.int32]  # decode steps the row took part in
    num_drafted: NDArray[np.int32]
    num_accepted: NDArray[np.int32]
    num_wasted: NDArray[np.int32]  # drafts dropped unverified by a preemption or an aborted step
    num_preempted: NDArray[np.int32]
    token_values: NDArray[np.int32]  # output tokens, stop token included
    token_offsets: NDArray[np.int64]  # [n + 1]
    text_values: NDArray[np.uint8]  # bytes of the output tokens; stop token and stop string cut off
    text_offsets: NDArray[np.int64]  # [n + 1]
    def __len__(self) -> int: ...

@final
class AcceptanceCounts:
    """Counts since the last call, one line a (shard, method), and one for each k of the shadow and of rounds of fewer drafts
    within real ones (set_score_fewer). Position j counts rounds in which
    j drafts before it were accepted."""

    shard: NDArray[np.int32]  # [m]
    method: NDArray[np.int32]  # [m]
    rounds: NDArray[np.int64]  # [m] row-steps in which a proposal was asked for
    proposed: NDArray[np.int64]  # [m] row-steps in which there was one (n-gram: a match)
    offered: NDArray[np.int64]  # [m, max_speculative_tokens]
    accepted: NDArray[np.int64]  # [m, max_speculative_tokens]
    committed: NDArray[np.int64]  # [m] tokens committed by those row-steps
    k: NDArray[np.int64]  # [m] of scored rounds: drafts a round; of real ones 0

@final
class Scheduler:
    """Block pool, queues, scheduling and stop conditions of one device.

    The interpreter is released during every call. Arguments are checked before anything changes.
    """

    def __new__(
        cls,
        *,
        num_pages: int,  # page 0 is the null page and is never handed out
        block_size: int,  # target tokens a page
        draft_block_size: int = 0,  # draft tokens the same bytes hold; 0: no draft tenant
        max_num_seqs: int,  # rows running at once
        max_num_batched_tokens: int,  # token budget of a prefill (or draft prefill) step
        max_model_len: int,
        draft_max_model_len: int = 0,  # 0: as the target; rows beyond it are not drafted for
        max_speculative_tokens: int = 8,
        eos_token_ids: NDArray[np.int32] | None = None,
        prefix_cache: bool = True,
        ngram_min: int = 2,
        ngram_max: int = 4,
    ) -> Scheduler: ...
    def set_token_bytes(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        """Bytes of every vocabulary entry (special tokens: none); needed for stop strings and text_values."""
    def add_requests(
        self,
        *,
        request_id: NDArray[np.int64],  # [n]
        shard: NDArray[np.int32],  # [n]
        prompt_values: NDArray[np.int32],
        prompt_offsets: NDArray[np.int64],  # [n + 1]
        max_tokens: NDArray[np.int32],  # [n] >= 1
        min_tokens: NDArray[np.int32] | None = None,  # [n]
        ignore_eos: NDArray[np.bool_] | None = None,  # [n]
        may_draft: NDArray[np.bool_] | None = None,  # [n] False: the row always runs AR
        stop_token_values: NDArray[np.int32] | None = None,
        stop_token_offsets: NDArray[np.int64] | None = None,  # [n + 1]
        stop_string_values: NDArray[np.uint8] | None = None,  # bytes of all stop strings
        stop_string_offsets: NDArray[np.int64] | None = None,  # [s + 1] into the bytes
        stop_string_rows: NDArray[np.int64] | None = None,  # [n + 1] into the strings
    ) -> NDArray[np.int32]:
        """Queue requests; returns their handles [n] (small ints, stable until taken, reused afterwards).

        A row that can never run is finished at once with its error_code."""
    def step(
        self,
        step_id: int,
        token_ids: NDArray[np.int32],  # [B, w] sampled tokens of the last step's rows, in its row order
        num_sampled: NDArray[
            np.int32
        ],  # [B] valid tokens of each row: accepted drafts + 1 (0: a prefill chunk without logits)
        num_draft: NDArray[np.int32],  # [B] drafts really proposed to and verified for the row
        buffers: StepBuffers,
    ) -> StepInfo:
        """Apply the result of step `step_id` (B = 0 when there is none), schedule the next, fill `buffers`.

        A step_id that is not the outstanding step raises ValueError and changes nothing. After STEP_DRAFT_PREFILL
        pass B = 0 and its step_id."""
    def abort_step(self, step_id: int) -> None:
        """Forget the outstanding step (an exception between draft and verify): reservations go back, nothing is committed.

        Nothing happens when the last step was idle or is forgotten already; ValueError for any other step_id."""
    def set_speculation(self, method: int, k: int, shard: int | None = None) -> None:
        """What rows do from the next step on; for one shard, or (None) for all and for shards to come.

        Leaving METHOD_DRAFT gives that shard's draft pages back with the next step."""
    def set_shadow_ngram(self, k: int) -> None:
        """Score n-gram rounds of 1, 2 ... k drafts against what rows commit, in any mode (0: off)."""
    def set_score_fewer(self, on: bool) -> None:
        """Score, within the rounds that rows really have, those of fewer drafts (METHOD_DRAFT and METHOD_EXTERNAL; n-gram
        rounds have set_shadow_ngram): what came of 4 drafts tells what 1, 2 and 3 would have brought, but for the token
        after a round that accepted all of its drafts, which counts as not offered."""
    def set_least_acceptance(self, least: float, usual: float = 0.0, weight: float = 0.0) -> None:
        """From which chance of being accepted a draft of METHOD_DRAFT pays, 0 <= least < 1 (0: no matter). A row whose own
        drafts are accepted less often rests from them for a while, and after a long rest gives its draft pages back.

        usual: that chance over all rows; weight: how many of a row's own drafts weigh as much (few where rows differ)."""
    def set_max_num_seqs(self, n: int) -> None:
        """Change how many rows may run; surplus rows are preempted, youngest first."""
    def preempt(self, handle: int) -> bool:
        """Put a running row back to the front of the queue (recompute). False when it is not running."""
    def lend_draft(self, rows: int, buffers: StepBuffers) -> StepInfo:
        """Between two steps: lend draft pages to up to `rows` rows that decode without a draft model and fill the draft_*
        arrays with all but the last of their committed tokens, as a STEP_DRAFT_PREFILL would (num_rows 0: no row could
        be taken, nothing was lent). The draft model may then be run over what they produced; drop_draft of each row
        (seq_index) gives the pages back and must come before the next step. ValueError without draft tenant."""
    def drop_draft(self, handle: int | None = None) -> int:
        """Give back draft pages of one row or of all; returns how many pages."""
    def abort(self, handle: int) -> bool:
        """Finish a waiting or running row with FINISH_ABORTED."""
    def take_finished(self) -> FinishedBatch: ...
    def take_acceptance(self) -> AcceptanceCounts: ...
    def clear_prefix_cache(self) -> int: ...
    def check_integrity(self) -> None:
        """free + owned + cached = total, committed <= allocated, nothing owned twice; RuntimeError that says what is not."""
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_unfinished(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...

def find_ngram(
    tokens: NDArray[np.int32],  # [m]
    k: int,
    ngram_min: int,
    ngram_max: int,
) -> NDArray[np.int32]:
    """The proposal the n-gram proposer makes after `tokens`: up to k ids, [0] when there is no match."""

@final
class CpuLayerPages:
    """Where one layer's keys and values are in the KV storage: offsets and strides in elements. ValueError for a zero size."""

    def __new__(
        cls, *, key_offset: int, value_offset: int, page_stride: int, block_size: int, kv_heads: int, head_dim: int
    ) -> CpuLayerPages: ...

def cpu_write_kv(
    storage: NDArray[np.float32] | NDArray[np.uint16],  # [N] the whole KV storage; uint16: bfloat16 bits
    pages: CpuLayerPages,
    key: NDArray[np.float32] | NDArray[np.uint16],  # [T, kv_heads, head_dim] of the storage's type
    value: NDArray[np.float32] | NDArray[np.uint16],
    slots: NDArray[np.int32],  # [T]; negative: nowhere
) -> None:
    """Store keys and values in the pages. ValueError when a slot is outside them; nothing is written then."""

def cpu_attention(
    query: NDArray[np.float32],  # [T, heads, head_dim]
    storage: NDArray[np.float32] | NDArray[np.uint16],
    pages: CpuLayerPages,
    query_start_loc: NDArray[np.int32],  # [R + 1]
    seq_lens: NDArray[np.int32],  # [R]
    block_tables: NDArray[np.int32],  # [R, P]
    out: NDArray[np.float32],  # [T, heads, head_dim]
    *,
    scale: float,
    positions: NDArray[np.int32] | None = None,  # [T]; for the window of a tree's tokens
    tree_ancestors: NDArray[np.int64] | None = None,  # [T]
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: NDArray[np.float32] | None = None,  # [heads]
) -> None:
    """Attention over pages read in place, into `out`. ValueError when sizes or pages do not fit; `out` is untouched then."""

@final
class CpuDecoder:
    """The layers of a pre-norm decoder (RMS norm, rotary attention over grouped KV heads, gated MLP) in packed weights.

    Every number of a row is computed in the same order whatever else a step holds. Weights are [out, in], float32 or
    uint16 (bfloat16 bits), and copied. ValueError names the size, TypeError the dtype that does not fit.
    """

    def __new__(
        cls,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        intermediate_size: int,  # a multiple of 16
        eps: float,
        activation: str,  # silu, gelu_pytorch_tanh
        scale: float,  # of attention scores
        bfloat16: bool,  # multiply bfloat16 activations where this processor can
        threads: int,  # the caller's thread among them; decoders of one number share their threads
        int8: bool = False,  # round weights (a scale a row) and activations (a scale a token); not the head
    ) -> CpuDecoder: ...
    def add_layer(
        self,
        *,
        attention_norm: NDArray[np.float32],  # [hidden]
        q: NDArray[np.float32] | NDArray[np.uint16],
        k: NDArray[np.float32] | NDArray[np.uint16],
        v: NDArray[np.float32] | NDArray[np.uint16],
        o: NDArray[np.float32] | NDArray[np.uint16],
        mlp_norm: NDArray[np.float32],  # [hidden]
        gate: NDArray[np.float32] | NDArray[np.uint16],
        up: NDArray[np.float32] | NDArray[np.uint16],
        down: NDArray[np.float32] | NDArray[np.uint16],
        qkv_bias: NDArray[np.float32] | None = None,
        o_bias: NDArray[np.float32] | None = None,
        query_norm: NDArray[np.float32] | None = None,  # [head_dim]
        key_norm: NDArray[np.float32] | None = None,
        sliding_window: int | None = None,
    ) -> None: ...
    def set_head(
        self,
        norm: NDArray[np.float32],
        weight: NDArray[np.float32] | NDArray[np.uint16],
        *,
        screen: bool = False,  # `best` of few tokens goes through an int8 copy first: faster, the same tokens
    ) -> None: ...
    def set_angles(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
        """Rotary tables [positions, rotary size], both halves alike."""

    def forward(
        self,
        hidden: NDArray[np.float32],  # [T, hidden] embeddings in, the last layer's output (before the final norm) out
        *,
        storage: NDArray[np.float32] | NDArray[np.uint16],  # [N] the whole KV storage
        pages: list[CpuLayerPages],  # one a layer
        positions: NDArray[np.int32],  # [T]
        slot_mapping: NDArray[np.int32],  # [T]; negative: nowhere
        query_start_loc: NDArray[np.int32],  # [R + 1]
        seq_lens: NDArray[np.int32],  # [R]
        block_tables: NDArray[np.int32],  # [R, P]
        tree_ancestors: NDArray[np.int64] | None = None,  # [T]
        wanted: NDArray[np.int32]
        | None = None,  # [L] rising: other tokens' rows of `hidden` may hold anything after it
    ) -> None:
        """Run the layers; keys and values go to the pages. ValueError when something does not fit: no page is written then."""

    def logits(self, hidden: NDArray[np.float32], indices: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Logits of tokens `indices` [L] of `hidden` as `forward` left it, into `out` [L, vocabulary]."""

    def best(self, hidden: NDArray[np.float32], indices: NDArray[np.int32], limit: int, out: NDArray[np.int32]) -> None:
        """The first token of the largest logit among the first `limit`, into `out` [L]; -1 where it is NaN or infinite."""

    @property
    def kernel(self) -> str:
        """The instructions that multiply in the layers, for people."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def threads(self) -> int: ...

def cpu_draft(
    decoder: CpuDecoder,
    *,
    embedding: NDArray[np.float32] | NDArray[np.uint16],  # [vocab, hidden]
    limit: int,  # tokens from here on are never proposed
    storage: NDArray[np.float32] | NDArray[np.uint16],
    pages: list[CpuLayerPages],
    draft_input_ids: NDArray[np.int32],  # [T] as in StepBuffers, cut to the step
    draft_positions: NDArray[np.int32],  # [T]
    draft_slot_mapping: NDArray[np.int32],  # [T]
    draft_query_start_loc: NDArray[np.int32],  # [R + 1]
    draft_seq_lens: NDArray[np.int32],  # [R]
    draft_block_tables: NDArray[np.int32],  # [R, Pd]
    num_draft_tokens: NDArray[np.int32],  # [R] drafts a row wants
    query_start_loc: NDArray[np.int32],  # [R + 1] packed range of each row in input_ids
    input_ids: NDArray[np.int32],  # [T] drafts are written behind each row's first token
) -> None:
    """The greedy drafts of a step, pass after pass. ValueError names what does not fit; drafts may be written in part then."""

def accept_drafts(
    best: NDArray[np.int32],  # [T] the target's token after each packed token, -1: none
    input_ids: NDArray[np.int32],  # [T]
    query_start_loc: NDArray[np.int32],  # [R + 1]
    num_draft: NDArray[np.int32],  # [R] drafts really proposed
    width: int,  # the most tokens a row may commit
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """token_ids [R, width] (-1 past a row's count) and num_sampled [R], as specbatch.engine.rejection.verify_coupled.

    ValueError when the arrays do not fit together.
    """
