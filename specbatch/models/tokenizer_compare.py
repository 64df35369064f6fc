"""Whether a draft's tokens mean what the target's mean: the same id must stand for the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.models.tokenizer import HFTokenizer


@dataclass(frozen=True, slots=True)
class TokenizerComparison:
    """Compatible: every id either model may see or propose means the same to both."""

    compatible: bool
    reason: str
    first_difference: int | None = None
    shared: int = 0  # ids with the same meaning
    target_only: int = 0  # ids only the target's tokenizer uses
    draft_only: int = 0


def compare(target: HFTokenizer, draft: HFTokenizer, draft_vocab_size: int | None = None) -> TokenizerComparison:
    """Compare two tokenizers id by id.

    A draft with more ids than the target is fine (it is never asked for them); a target with ids the draft's tokenizer lacks is
    fine while the draft's embedding (`draft_vocab_size` rows) still holds them.
    """
    ours, theirs = target.vocabulary, draft.vocabulary
    common = sorted(ours.keys() & theirs.keys())
    target_bytes, draft_bytes = target.byte_table, draft.byte_table
    for token_id in common:
        if target_bytes[token_id] != draft_bytes[token_id] or (
            ours[token_id] != theirs[token_id] and not target_bytes[token_id]
        ):
            return TokenizerComparison(
                False,
                f"the draft's tokenizer is another mapping: id {token_id} is {ours[token_id]!r} to the target and "
                f"{theirs[token_id]!r} to the draft",
                first_difference=token_id,
            )
    target_only, draft_only = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    if not common:
        return TokenizerComparison(False, "the two tokenizers have no id in common", first_difference=0)
    rows = max(draft_vocab_size or 0, draft.vocab_size)
    missing = sorted(i for i in target_only if i >= rows)
    if missing:
        return TokenizerComparison(
            False,
            f"the target uses id {missing[0]} ({ours[missing[0]]!r}) and {len(missing) - 1} more that the draft model has "
            f"no embedding for (it has {rows})",
            first_difference=missing[0],
            shared=len(common),
            target_only=len(target_only),
            draft_only=len(draft_only),
        )
    reason = f"{len(common)} ids mean the same"
    if target_only or draft_only:
        reason += f", {len(target_only)} only in the target's tokenizer, {len(draft_only)} only in the draft's"
    return TokenizerComparison(True, reason, None, len(common), len(target_only), len(draft_only))
