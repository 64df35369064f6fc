"""Triton kernels of paged attention: attend, combine and write KV.

They own tiling, masking and the online softmax, and know nothing of launch sizes (triton_configs.py) or of torch.
The method is FlashAttention's online softmax (Dao et al. 2022, arXiv:2205.14135) with the context split over
programs as in flash-decoding, over pages as in PagedAttention (Kwon et al. 2023, arXiv:2309.06180).

Words used below: a *query tile* is up to BLOCK_Q query tokens of one row times all GROUP query heads of one KV head,
laid out token-major in BLOCK_M lanes; a *context tile* is BLOCK_N consecutive context indices of that row. Scores live in base 2.
"""
# mypy: ignore-errors
# ruff: noqa: SIM102  (a condition that is known when compiling must stand alone)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _locate(query_start_loc_ptr, num_rows, tile, BLOCK_Q: tl.constexpr, SEARCH: tl.constexpr):
    """(row, first own query token) of a query tile.

    Without SEARCH a row is one tile. With it, row r starts at tile `query_start_loc[r] // BLOCK_Q + r`, which leaves
    every row room for its tiles and needs no table: the row is found by counting those that start at or before `tile`.
    """
    row = tile
    first = 0
    if SEARCH:
        row = -1
        for base in range(0, num_rows, 256):
            rows = base + tl.arange(0, 256)
            in_use = rows < num_rows
            starts = tl.load(query_start_loc_ptr + rows, mask=in_use, other=0) // BLOCK_Q + rows
            row += tl.sum((in_use & (starts <= tile)).to(tl.int32), axis=0)
        first = (tile - tl.load(query_start_loc_ptr + row) // BLOCK_Q - row) * BLOCK_Q
    return row, first


@triton.jit
def _context_range(
    first, query_len, seq_len, window, num_splits, min_split_tiles,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """(first context tile, end context tile, context tiles a split) that a query tile may see.

    The attend and the combine kernel must agree on this, which is why both call it.
    """
    before = seq_len - query_len  # context before this step's tokens
    end = seq_len
    start = 0
    if TREE:
        if window is not None:
            start = tl.maximum(before - window + 1, 0)  # the root stands at `before`, the others after it
    else:
        end = before + tl.minimum(first + BLOCK_Q, query_len)
        if window is not None:
            start = tl.maximum(before + first - window + 1, 0)
    first_tile = start // BLOCK_N
    end_tile = (end + BLOCK_N - 1) // BLOCK_N
    per_split = tl.maximum((end_tile - first_tile + num_splits - 1) // num_splits, min_split_tiles)
    return first_tile, end_tile, per_split


@triton.jit
def _attend_tile(
    acc, total, peak, query, tile, seq_len, before, query_len, query_start, own, own_position, ancestors,
    key_ptr, value_ptr, table_ptr, positions_ptr, score_scale, softcap, window,
    key_stride_page, value_stride_page,
    TOKEN_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: fold context tile `tile` into (acc, total, peak).

    Without MASKED every key of the tile is in use and visible to every query token.
    """
    lane = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_PAD)
    index = tile * BLOCK_N + lane
    in_use = index < seq_len
    offset = index % BLOCK_SIZE
    if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies in one page
        page = tl.load(table_ptr + (tile * BLOCK_N) // BLOCK_SIZE).to(tl.int64)
        offset = (tile * BLOCK_N) % BLOCK_SIZE + lane
    elif MASKED:
        page = tl.load(table_ptr + index // BLOCK_SIZE, mask=in_use, other=0).to(tl.int64)
    else:
        page = tl.load(table_ptr + index // BLOCK_SIZE).to(tl.int64)
    key_at = key_ptr + (page * key_stride_page + offset * TOKEN_STRIDE)[:, None] + dims[None, :]
    value_at = value_ptr + (page * value_stride_page + offset * TOKEN_STRIDE)[:, None] + dims[None, :]
    if MASKED:
        readable = in_use[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(key_at, mask=readable, other=0.0)
        value = tl.load(value_at, mask=readable, other=0.0)
    elif HEAD_DIM != HEAD_PAD:
        key = tl.load(key_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        value = tl.load(value_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        key = tl.load(key_at)
        value = tl.load(value_at)
    key = key.to(query.dtype)
    value = value.to(query.dtype)

    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * score_scale
    if softcap is not None:  # softcap * tanh(scores), with tanh written as 1 - 2 / (1 + e^2x): exact at both ends
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * 2.8853900817779268)))
    if MASKED:
        if TREE:
            twig = index - before  # own number of a query token, negative for the context before the step
            bit = (ancestors[:, None] >> tl.minimum(tl.maximum(twig, 0), 63).to(tl.int64)[None, :]) & 1
            visible = (twig < 0)[None, :] | ((bit != 0) & in_use[None, :])
        else:
            visible = index[None, :] <= own[:, None]
        if window is not None:
            place = index
            if TREE:  # tokens of a tree stand at their depth, not at their index
                is_twig = (twig >= 0) & in_use
                place = tl.where(is_twig, tl.load(positions_ptr + query_start + twig, mask=is_twig, other=0), index)
            visible = visible & (place[None, :] > own_position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))

    higher = tl.maximum(peak, tl.max(scores, axis=1))
    anchor = higher
    if MASKED:  # nothing visible so far: -inf - -inf would be NaN
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - anchor[:, None])
    decay = tl.exp2(peak - anchor)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return acc, total, higher


@triton.jit(do_not_specialize=["window", "num_rows", "num_tokens", "num_splits", "min_split_tiles"])
def attend_kernel(
    out_ptr,  # [T, heads, head_dim] contiguous
    part_ptr,  # float32 [T, heads, num_splits, head_dim] outputs of splits, each normalised; None without splits
    lse_ptr,  # float32 [T, heads, num_splits] their log2-sum-exp2
    query_ptr,  # [T, heads, head_dim]
    key_ptr,  # [pages, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM], any page stride
    value_ptr,
    query_start_loc_ptr,  # [num_rows + 1]
    seq_lens_ptr,  # [num_rows]
    block_tables_ptr,  # [num_rows, pages a row]
    positions_ptr,  # [T], or None: only a tree with a window needs it
    ancestors_ptr,  # int64 [T], or None
    sinks_ptr,  # [heads], or None
    score_scale,  # scale * log2(e); with softcap: scale / softcap
    softcap,  # softcap * log2(e), or None
    window,  # or None
    num_rows,
    num_tokens,
    num_splits,
    min_split_tiles,
    query_stride_token,
    query_stride_head,
    key_stride_page,
    value_stride_page,
    table_stride_row,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Grid (query tiles x KV heads, splits). Tokens that belong to no row are set to zero."""
    TREE: tl.constexpr = ancestors_ptr is not None
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    query_tile = tl.program_id(0) // NUM_KV_HEADS
    split = tl.program_id(1)

    lane = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    token = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    lane_used = lane < BLOCK_Q * GROUP

    if split == 0:  # the tokens after the last row, dealt out over the query tiles
        stride = tl.num_programs(0) // NUM_KV_HEADS * BLOCK_Q
        for base in range(tl.load(query_start_loc_ptr + num_rows) + query_tile * BLOCK_Q, num_tokens, stride):
            spare = (base + token).to(tl.int64)
            at = out_ptr + (spare * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
            empty = ((spare < num_tokens) & lane_used)[:, None] & (dims < HEAD_DIM)[None, :]
            tl.store(at, tl.zeros([BLOCK_M, HEAD_PAD], out_ptr.dtype.element_ty), mask=empty)

    row, first = _locate(query_start_loc_ptr, num_rows, query_tile, BLOCK_Q, SEARCH)
    query_start = tl.load(query_start_loc_ptr + row)
    query_len = tl.load(query_start_loc_ptr + row + 1) - query_start
    if first >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    before = seq_len - query_len
    first_tile, end_tile, per_split = _context_range(
        first, query_len, seq_len, window, num_splits, min_split_tiles, BLOCK_Q, BLOCK_N, TREE
    )
    split_start = first_tile + split * per_split
    if (split > 0) & (split_start >= end_tile):  # the first split always answers, be it with zeros
        return
    split_end = tl.minimum(split_start + per_split, end_tile)

    token = first + token
    used = lane_used & (token < query_len)
    packed = (query_start + token).to(tl.int64)
    writable = used[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(
        query_ptr + (packed * query_stride_token + head * query_stride_head)[:, None] + dims[None, :],
        mask=writable,
        other=0.0,
    )
    own = before + token
    own_position = own
    ancestors = own
    if TREE:
        ancestors = tl.load(ancestors_ptr + packed, mask=used, other=0)
        if window is not None:
            own_position = tl.load(positions_ptr + packed, mask=used, other=0)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        if split == 0:  # a sink is one more key without a value, counted once
            peak = tl.load(sinks_ptr + head, mask=lane_used, other=0.0).to(tl.float32) * 1.4426950408889634
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)

    key_ptr += kv_head * HEAD_DIM
    value_ptr += kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride_row
    masked_from = split_start
    if window is None:
        # Context tiles before every query token of the tile need no mask.
        clear = before if TREE else before + first + 1
        masked_from = tl.maximum(tl.minimum(clear // BLOCK_N, split_end), split_start)
        for tile in range(split_start, masked_from):
            acc, total, peak = _attend_tile(
                acc, total, peak, query, tile, seq_len, before, query_len, query_start, own, own_position, ancestors,
                key_ptr, value_ptr, table_ptr, positions_ptr, score_scale, softcap, window,
                key_stride_page, value_stride_page,
                NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, False, TREE,
            )  # fmt: skip
    for tile in range(masked_from, split_end):
        acc, total, peak = _attend_tile(
            acc, total, peak, query, tile, seq_len, before, query_len, query_start, own, own_position, ancestors,
            key_ptr, value_ptr, table_ptr, positions_ptr, score_scale, softcap, window,
            key_stride_page, value_stride_page,
            NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, True, TREE,
        )  # fmt: skip

    empty = total == 0.0  # a token that sees nothing (in this split)
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    at = packed * NUM_HEADS + head
    if part_ptr is not None:
        if per_split < end_tile - first_tile:
            place = at * num_splits + split
            tl.store(part_ptr + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=writable)
            lse = tl.where(empty, float("-inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
            tl.store(lse_ptr + place, lse, mask=used)
            return
    tl.store(out_ptr + at[:, None] * HEAD_DIM + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=writable)


@triton.jit(do_not_specialize=["window", "num_rows", "num_splits", "min_split_tiles", "tokens_a_tile"])
def combine_kernel(
    out_ptr,
    part_ptr,
    lse_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    window,
    num_rows,
    num_splits,
    min_split_tiles,
    tokens_a_tile,  # query tokens of a tile that may be in use: BLOCK_Q, or the longest row
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    SEARCH: tl.constexpr,
    TREE: tl.constexpr,
):
    """Grid (query tiles x tokens_a_tile, heads): joins the splits of one token and head; a row of one split is done."""
    token = tl.program_id(0) % tokens_a_tile
    head = tl.program_id(1)
    row, first = _locate(query_start_loc_ptr, num_rows, tl.program_id(0) // tokens_a_tile, BLOCK_Q, SEARCH)
    query_start = tl.load(query_start_loc_ptr + row)
    query_len = tl.load(query_start_loc_ptr + row + 1) - query_start
    if first + token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    first_tile, end_tile, per_split = _context_range(
        first, query_len, seq_len, window, num_splits, min_split_tiles, BLOCK_Q, BLOCK_N, TREE
    )
    if per_split >= end_tile - first_tile:
        return
    split = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, HEAD_PAD)
    used = split * per_split < end_tile - first_tile
    at = (query_start + first + token).to(tl.int64) * NUM_HEADS + head
    place = at * num_splits + split
    lse = tl.load(lse_ptr + place, mask=used, other=float("-inf"))
    peak = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    readable = used[:, None] & (dims < HEAD_DIM)[None, :]
    part = tl.load(part_ptr + place[:, None] * HEAD_DIM + dims[None, :], mask=readable, other=0.0)
    total = tl.sum(weights, axis=0)
    out = tl.sum(part * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + at * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def write_kv_kernel(
    key_ptr,  # [T, NUM_KV_HEADS, HEAD_DIM]
    value_ptr,
    key_pages_ptr,  # [pages, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM], any page stride
    value_pages_ptr,
    slot_mapping_ptr,  # [T]
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    key_stride_page,
    value_stride_page,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T, blocks a token): copies one token's keys and values into its slot; a negative slot writes nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = element < NUM_KV_HEADS * HEAD_DIM
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    page = (slot // BLOCK_SIZE).to(tl.int64)
    target = slot % BLOCK_SIZE * (NUM_KV_HEADS * HEAD_DIM) + element
    key = tl.load(key_ptr + token * key_stride_token + head * key_stride_head + dim, mask=valid)
    value = tl.load(value_ptr + token * value_stride_token + head * value_stride_head + dim, mask=valid)
    key = key.to(key_pages_ptr.dtype.element_ty)
    value = value.to(value_pages_ptr.dtype.element_ty)
    tl.store(key_pages_ptr + page * key_stride_page + target, key, mask=valid)
    tl.store(value_pages_ptr + page * value_stride_page + target, value, mask=valid)
