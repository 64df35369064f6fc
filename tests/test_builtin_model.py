"""The pair that ships in the package: files, data, answers and acceptance, through transformers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest

from specbatch.models.builtin import builtin_logits, builtin_paths

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES / "builtin"))
sys.path.insert(0, str(EXAMPLES))

import messages  # noqa: E402
import phrases  # noqa: E402
import vocabulary  # noqa: E402

TARGET, DRAFT = builtin_paths()
ROWS = 32


def test_paths_need_no_torch() -> None:
    code = (
        "import sys; from specbatch.models.builtin import builtin_paths; builtin_paths(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=EXAMPLES.parent)


def test_files_are_complete_and_small() -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for folder in (TARGET, DRAFT):
        assert {path.name for path in folder.iterdir()} == names
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert sum(path.stat().st_size for folder in (TARGET, DRAFT) for path in folder.iterdir()) < 20e6
    assert (EXAMPLES / "prompts.parquet").stat().st_size < 300e3


def test_git_and_the_wheel_keep_the_files() -> None:
    """The build folder is called target as well, and is ignored."""
    logits = [builtin_logits(TARGET), builtin_logits(DRAFT)]
    assert all(file is not None and file.is_file() for file in logits)
    ignored = subprocess.run(
        ["git", "check-ignore", *map(str, [TARGET / "model.safetensors", DRAFT / "model.safetensors", *logits])],
        cwd=EXAMPLES.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ignored.returncode == 128:
        pytest.skip("not a git checkout")
    assert ignored.stdout == ""


def test_the_pair_shares_one_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (TARGET / name).read_bytes() == (DRAFT / name).read_bytes()


def test_rows_depend_on_their_arguments_alone() -> None:
    forwards = [messages.make_row("train", 3, i) for i in range(40)]
    backwards = [messages.make_row("train", 3, i) for i in reversed(range(40))]
    assert forwards == backwards[::-1]
    assert forwards != [messages.make_row("train", 4, i) for i in range(40)]


def _values(split: vocabulary.Split, rows: int) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"order": set(), "item": set(), "city": set(), "name": set(), "message": set()}
    for i in range(rows):
        row = messages.make_row(split, 0, i)
        found["message"].add(row.message.lower())
        for line in row.expected.lower().splitlines():
            key, value = line.split(": ", 1)
            if value == "none":
                continue
            if key == "name":
                found[key] |= set(value.split())
            elif key == "item":
                found[key].add(value.split(" ", 1)[1])
            elif key in found:
                found[key].add(value)
    return found


def test_held_out_rows_share_no_value_with_training_rows() -> None:
    train, held_out = _values("train", 3000), _values("held_out", 1000)
    for key, values in held_out.items():
        assert len(values) > 50, key
        assert not values & train[key], key
    # The check can fail: two samples of one split do overlap.
    assert _values("train", 200)["name"] & train["name"]


class _Spy(messages._Writer):
    """Keeps the sentences it writes, values still open."""

    def _word(self, options: list[str]) -> str:
        sentence = super()._word(options)
        self.sentences.add(sentence.lower())
        return sentence


def _sentences(split: vocabulary.Split, rows: int) -> set[str]:
    found: set[str] = set()
    for i in range(rows):
        writer = _Spy(Random(f"{split}/0/{i}"), split)
        writer.sentences = found
        assert writer.write() == messages.make_row(split, 0, i)
    return found


def test_held_out_sentences_are_worded_otherwise() -> None:
    train, held_out = _sentences("train", 3000), _sentences("held_out", 1500)
    assert len(train) > 300
    assert len(held_out) > 100
    assert not train & held_out


@pytest.mark.parametrize("options", [*phrases.INTENTS.values(), phrases.HIGH, phrases.LOW, phrases.CITY_LINES])
def test_phrasings_are_listed_once(options: list[str]) -> None:
    assert len(options) == len(set(options))


def test_prompts_file_is_what_its_script_makes() -> None:
    import make_prompts

    shipped = pq.read_table(EXAMPLES / "prompts.parquet")
    assert shipped.equals(make_prompts.table(shipped.num_rows, make_prompts.SEED))
    assert pq.ParquetFile(EXAMPLES / "prompts.parquet").num_row_groups > 1


def test_the_answer_states_what_the_message_says() -> None:
    for i in range(300):
        row = messages.make_row("held_out", 7, i)
        for line in row.expected.splitlines():
            key, value = line.split(": ", 1)
            if key in ("order", "city", "name") and value != "none":
                assert value in row.message, row
        assert not {"\x01", "\x02", "<", "{"} & set(row.message), row


@pytest.fixture(scope="module")
def pair() -> tuple[object, object]:
    torch = pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    target, draft = (LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (TARGET, DRAFT))
    return target, draft


def test_sizes(pair: tuple[object, object]) -> None:
    target, draft = (sum(p.numel() for p in model.parameters()) for model in pair)  # type: ignore[attr-defined]
    assert target >= 2.5 * draft
    assert all(model.config.tie_word_embeddings for model in pair)  # type: ignore[attr-defined]
    assert all(model.config.max_position_embeddings == 1024 for model in pair)  # type: ignore[attr-defined]


def test_chat_template_words_a_prompt_as_training_did() -> None:
    import rows as encoded_rows
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    row = messages.make_row("held_out", 7, 0)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": row.message}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    trained, answer = encoded_rows.encode(Tokenizer.from_file(str(TARGET / "tokenizer.json")), "held_out", 7, 0, 1)[0]
    assert ids == trained[:answer]
    assert tokenizer.decode(trained[answer:], skip_special_tokens=True) == row.expected
    assert trained[-1] == tokenizer.eos_token_id


def test_answers_and_acceptance_on_held_out_rows(pair: tuple[object, object]) -> None:
    """Greedy, float32. The full figures (2,000 rows) are in examples/builtin/README.md."""
    import evaluate
    import rows as encoded_rows
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    pad, end = tokenizer.token_to_id("<|pad|>"), tokenizer.token_to_id("<|end|>")
    rows = encoded_rows.encode(tokenizer, "held_out", 7, 0, ROWS)
    out = evaluate.greedy(pair[0], [ids[:answer] for ids, answer in rows], pad, end, 160)
    exact = sum(ids[answer:] == got for (ids, answer), got in zip(rows, out, strict=True))
    assert exact >= 0.45 * ROWS
    spoken = [(ids[:answer] + got, answer) for (ids, answer), got in zip(rows, out, strict=True)]
    hits = evaluate.argmax_hits(pair[1], spoken, pad)
    assert 0.6 <= evaluate.simulate(hits, 4)["acceptance_rate"] <= 0.9
    # The target drafting for itself misses nothing but what lies beyond a row's end.
    own = evaluate.argmax_hits(pair[0], spoken, pad)
    assert sum(map(sum, own)) >= 0.999 * sum(map(len, own))


def test_simulated_rounds() -> None:
    import evaluate

    # First token from the prefill; then T T F (2 accepted, the miss is the target's own), T T (the row ends: 2).
    assert evaluate.simulate([[True, True, True, False, True, True]], 4) == {
        "acceptance_rate": 4 / 8, "tokens_per_step": 5 / 2, "rounds": 2, "proposed": 8,
    }  # fmt: skip
