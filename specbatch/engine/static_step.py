"""A decode step with fixed shapes: the target's pass with sampling and verification, and a draft model's k passes.

Reads and writes buffers that never move, takes every number that varies from the device, and asks nothing of the host:
so each method may be captured in a graph and replayed for other rows. Whether it is, graphs.py decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.attention.backend import AttentionMetadata
from specbatch.engine.model_runner import ModelRunner
from specbatch.engine.rejection import verify_coupled
from specbatch.engine.row_params import RowParams
from specbatch.engine.sampler import draft_prefix, row_of_logit, sample
from specbatch.engine.step_buffers import Bucket, StepArrays
from specbatch.speculators.draft_model import as_wide_as

FIRST_PASS_TOKENS = 2  # a draft that has kept up is behind by one token, after full acceptance by two


class StaticStep:
    """The decode step of one engine over its step arrays and its rows' sampling parameters.

    Rows and tokens past those in use are padding: they read the null page, write no page and commit nothing.
    Verification is coupled (rejection.verify_coupled). Row r's result is `result[r]`: its tokens, last its num_sampled.
    """

    def __init__(
        self,
        arrays: StepArrays,
        rows: RowParams,
        target: ModelRunner,
        draft: ModelRunner | None = None,
        *,
        max_speculative_tokens: int,
        max_model_len: int,
        draft_block_size: int = 0,
    ) -> None:
        self.arrays = arrays
        self.rows = rows
        self.target_runner = target
        self.draft_runner = draft
        self.max_model_len = max_model_len
        self.draft_block_size = draft_block_size
        self.max_width = max_speculative_tokens + 1
        max_rows = arrays.shapes["seq_lens"][0]
        device = arrays.device_type
        self.result = torch.zeros(max_rows, self.max_width + 1, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(max_rows * self.max_width, dtype=torch.float32, device=device)
        self._drafts = torch.zeros(max_rows, max(max_speculative_tokens, 1), dtype=torch.int32, device=device)
        self._counting = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def tokens(self, bucket: Bucket) -> Tensor:
        """Committed tokens int32 [rows, tokens_per_row] of the last target pass, -1 past a row's count."""
        return self.result[: bucket.rows, : bucket.tokens_per_row]

    def num_sampled(self, bucket: Bucket) -> Tensor:
        """Committed tokens of each row int32 [rows], 0 for padding."""
        return self.result[: bucket.rows, -1]

    @torch.inference_mode()
    def target(self, bucket: Bucket) -> None:
        """Run the target over the rows' tokens, sample at each, accept drafts: fills `result`; `logprobs` if asked."""
        width, count = bucket.tokens_per_row, bucket.tokens
        device, rows = self.arrays.device, self.rows
        ids, positions = device["input_ids"][:count], device["positions"][:count]
        starts = device["query_start_loc"][: bucket.rows + 1]
        metadata = self._metadata("", bucket, self.max_model_len)
        logits = self.target_runner.forward(ids, metadata, device["logits_indices"][:count])
        row_index = row_of_logit(starts, count)
        prior = draft_prefix(ids, starts, row_index, width) if rows.any_penalty and width > 1 else None
        samples = sample(logits, rows, row_index, positions, prior_ids=prior, static=True)
        tokens, num_sampled = verify_coupled(
            samples.token_ids, ids, starts, device["num_draft_tokens"][: bucket.rows], width
        )
        self.tokens(bucket).copy_(tokens)
        self.num_sampled(bucket).copy_(num_sampled)
        if samples.logprobs is not None:
            self.logprobs[:count].copy_(samples.logprobs)

    @torch.inference_mode()
    def draft(self, bucket: Bucket, first_tokens: int = FIRST_PASS_TOKENS) -> None:
        """Propose bucket.tokens_per_row - 1 drafts a row, as far as each wants them, and put them into `input_ids`.

        The first pass feeds each row's committed tokens that the draft has not seen (at most `first_tokens`); its last
        token gives draft 1, and each further pass feeds the draft before. Rows that want no further draft go along
        as padding.
        """
        assert self.draft_runner is not None
        count, passes = bucket.rows, bucket.tokens_per_row - 1
        device, runner, params = self.arrays.device, self.draft_runner, self.rows
        first = Bucket(count, first_tokens)
        last = (device["draft_query_start_loc"][1 : count + 1] - 1).clamp(min=0).long()
        metadata = self._metadata("draft_", first, self.max_model_len)
        logits = runner.forward(device["draft_input_ids"][: first.tokens], metadata, last)
        wanted = device["num_draft_tokens"][:count]
        positions = device["draft_positions"][last]
        tables = device["draft_block_tables"][:count]
        row_index = self._counting[:count].long()
        drafts = self._drafts[:count, :passes]
        drafts.fill_(-1)
        for j in range(passes):
            if j > 0:
                positions = positions + 1
                logits = self._draft_one(drafts[:, j - 1], positions, wanted > j, tables)
            prior = drafts[:, :j] if params.any_penalty and j > 0 else None
            samples = sample(
                as_wide_as(logits, params.vocab), params, row_index, positions, prior_ids=prior, static=True
            )
            drafts[:, j].copy_(samples.token_ids.clamp(min=0))  # a failed sample is just a poor draft
        self._place_drafts(bucket, drafts, wanted)

    def _draft_one(self, ids: Tensor, positions: Tensor, active: Tensor, tables: Tensor) -> Tensor:
        """Feed one drafted token a row and return its logits; rows that are not active see the null page alone."""
        rows, size = ids.shape[0], self.draft_block_size
        page = (positions // size).long().clamp(max=tables.shape[1] - 1)
        tables = torch.where(active[:, None], tables, 0)
        slots = tables.gather(1, page[:, None])[:, 0] * size + positions % size
        metadata = AttentionMetadata(
            query_start_loc=self._counting[: rows + 1],
            seq_lens=torch.where(active, positions + 1, 1),
            positions=positions,
            slot_mapping=torch.where(active, slots, -1),
            block_tables=tables,
            num_rows=rows,
            num_tokens=rows,
            max_query_len=1,
            max_seq_len=self.max_model_len,
        )
        assert self.draft_runner is not None
        return self.draft_runner.forward(ids, metadata, self._counting[:rows])

    def _place_drafts(self, bucket: Bucket, drafts: Tensor, wanted: Tensor) -> None:
        """Write each row's drafts behind its committed token in the packed `input_ids`."""
        ids = self.arrays.device["input_ids"][: bucket.tokens]
        starts = self.arrays.device["query_start_loc"][: bucket.rows + 1]
        row = row_of_logit(starts, bucket.tokens)
        number = self._packed_index(bucket.tokens) - starts[row]  # 0 is the committed token
        mine = (number > 0) & (number <= wanted[row])
        column = (number - 1).clamp(0, drafts.shape[1] - 1).long()
        ids.copy_(torch.where(mine, drafts[row, column], ids))

    def _packed_index(self, count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.arrays.device_type)

    def _metadata(self, prefix: str, bucket: Bucket, max_seq_len: int) -> AttentionMetadata:
        device = self.arrays.device
        return AttentionMetadata(
            query_start_loc=device[prefix + "query_start_loc"][: bucket.rows + 1],
            seq_lens=device[prefix + "seq_lens"][: bucket.rows],
            positions=device[prefix + "positions"][: bucket.tokens],
            slot_mapping=device[prefix + "slot_mapping"][: bucket.tokens],
            block_tables=device[prefix + "block_tables"][: bucket.rows],
            num_rows=bucket.rows,
            num_tokens=bucket.tokens,
            max_query_len=bucket.tokens_per_row,
            max_seq_len=max_seq_len,
        )
