"""Whether a draft's tokens mean what the target's mean: the same id must stand for the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbatch.models.tokenizer import HFTokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True, slots=True)
class TokenizerComparison:
    """Compatible: every id either model may see or propose means the same to both."""

    compatible: bool
    reason: str
    first_difference: int | None = None
    shared: int = 0  # ids both use
    target_only: int = 0  # ids only the target's tokenizer uses
    draft_only: int = 0


def compare_folders(
    target: str | Path, draft: str | Path, draft_vocab_size: int, tokenizer: HFTokenizer | None = None
) -> TokenizerComparison:
    """As `compare`, of two folders. Nothing is loaded where they hold the same files. `tokenizer`: the target's, if at hand.

    Raises ValueError as loading a tokenizer does.
    """
    if all(_content(Path(target) / name) == _content(Path(draft) / name) for name in _FILES):
        return TokenizerComparison(True, "both have the same tokenizer files")
    return compare(tokenizer or HFTokenizer(target), HFTokenizer(draft), draft_vocab_size)


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def compare(target: HFTokenizer, draft: HFTokenizer, draft_vocab_size: int | None = None) -> TokenizerComparison:
    """Compare two tokenizers id by id (sizes say nothing: padded vocabularies differ, strangers may agree).

    A draft with more ids than the target is fine, as it is never asked for them. A target with ids that the draft's
    tokenizer lacks is fine while the draft model's embedding (`draft_vocab_size` rows) still holds them.
    """
    ours, theirs = target.vocabulary, draft.vocabulary
    common = sorted(ours.keys() & theirs.keys())
    target_only, draft_only = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    counts = (len(common), len(target_only), len(draft_only))
    if not common:
        return TokenizerComparison(False, "the two tokenizers have no id in common", 0, *counts)
    different = _first_difference(target, draft, common)
    if different is not None:
        reason = (
            f"the draft's tokenizer is another mapping: id {different} is {ours[different]!r} to the target and "
            f"{theirs[different]!r} to the draft"
        )
        return TokenizerComparison(False, reason, different, *counts)
    rows = max(draft_vocab_size or 0, draft.vocab_size)
    missing = sorted(i for i in target_only if i >= rows)
    if missing:
        reason = (
            f"the target uses {len(missing)} ids, from {missing[0]} ({ours[missing[0]]!r}) on, that the draft model "
            f"has no embedding for (it has {rows})"
        )
        return TokenizerComparison(False, reason, missing[0], *counts)
    reason = f"{len(common)} ids mean the same"
    if target_only or draft_only:
        reason += f", {len(target_only)} only in the target's tokenizer, {len(draft_only)} only in the draft's"
    return TokenizerComparison(True, reason, None, *counts)


def _first_difference(target: HFTokenizer, draft: HFTokenizer, common: list[int]) -> int | None:
    """The lowest id of another meaning. Bytes are worked out only where equal names do not settle it."""
    ours, theirs = target.vocabulary, draft.vocabulary
    ours_special, theirs_special = target.special_ids, draft.special_ids
    same_decoder = target.decoder == draft.decoder
    for token_id in common:
        if ours[token_id] == theirs[token_id] and (same_decoder or token_id in ours_special & theirs_special):
            continue
        prints_nothing = token_id in ours_special or token_id in theirs_special
        if prints_nothing or target.byte_table[token_id] != draft.byte_table[token_id]:
            return token_id
    return None
