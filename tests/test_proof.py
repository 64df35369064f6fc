"""Logits kept from transformers: the first load proves through it, later ones without; nothing wrong ever passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specbatch.attention.cpu_paged import CpuPagedAttention
from specbatch.cache import cache_folder
from specbatch.control.cost_model import Affine, AffineCost, CostCache
from specbatch.engine import packing
from specbatch.engine.model_check import compare_logits, paged_logits, sample_rows
from specbatch.engine.packing import load_for_cpu
from specbatch.engine.proof import Proof, kept_file, load_proof, store_proof
from specbatch.models.builtin import builtin_logits, builtin_paths
from specbatch.models.loading import LoadedModel, load_model
from specbatch.models.packed import PackedDecoder
from tests.test_packed import logits_of
from tests.tiny import write_llama

VOCAB = 260


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specbatch"


class Loads:
    """Loads of one model; counts those through transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.folder, self.dtype, self.through = folder, dtype, 0

    def __call__(self) -> LoadedModel:
        def load() -> LoadedModel:
            self.through += 1
            return load_model(self.folder, dtype=self.dtype)

        model, compute = load_for_cpu(str(self.folder), self.dtype, CpuPagedAttention(), 1, load)
        assert compute.startswith("packed weights")
        return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_is_needed_once(tiny_target: Path, cache: Path, dtype: torch.dtype) -> None:
    load = Loads(tiny_target, dtype)
    first, second = load(), load()
    assert load.through == 1
    assert first.module is not None
    assert second.module is None
    assert all(torch.equal(a, b) for a, b in zip(logits_of(first), logits_of(second), strict=True))
    assert [f.parent for f in (kept_file(tiny_target, dtype), *cache.iterdir())] == [cache, cache]


def test_another_dtype_or_config_is_another_model(tiny_target: Path, tmp_path: Path, cache: Path) -> None:
    other = write_llama(tmp_path / "other", seed=1, rms_norm_eps=1e-3)
    files = {
        kept_file(tiny_target, torch.float32),
        kept_file(tiny_target, torch.bfloat16),
        kept_file(other, torch.float32),
    }
    assert len(files) == 3


def test_other_weights_under_the_same_names_are_proved_again(tmp_path: Path, cache: Path) -> None:
    folder = write_llama(tmp_path / "model", seed=1)
    load = Loads(folder)
    load()
    write_llama(folder, seed=2)
    assert load().module is not None
    assert load().module is None
    assert load.through == 2


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def nan(proof: Proof) -> Proof:
    proof.logits[0][3, 7] = torch.nan
    return proof


def nan_in_the_second_row(proof: Proof) -> Proof:
    proof.logits[1][0, 0] = torch.nan
    return proof


def one_off(proof: Proof) -> Proof:
    """By two thousandths of the largest."""
    proof.logits[1][2, -1] += 2e-3 * max(float(part.abs().max()) for part in proof.logits)
    return proof


def narrow(proof: Proof) -> Proof:
    return Proof(proof.rows, [part[:, :-1] for part in proof.logits])


def foreign(proof: Proof) -> Proof:
    proof.rows[0][0] = VOCAB
    return proof


@pytest.mark.parametrize(
    "damage", [None, b"", b"{}", b"\xff" * 200, nan, nan_in_the_second_row, one_off, narrow, foreign]
)
def test_a_damaged_file_costs_a_load(
    tiny_target: Path, cache: Path, damage: bytes | Callable[[Proof], Proof] | None
) -> None:
    load = Loads(tiny_target)
    load()
    file = kept_file(tiny_target, torch.float32)
    if callable(damage):
        proof = load_proof(file, VOCAB)
        assert proof is not None
        store_proof(file, damage(Proof(proof.rows, [part.clone() for part in proof.logits])))
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage is None else damage)
    assert load().module is not None
    assert load.through == 2
    assert load().module is None, "what was damaged is whole again"


@pytest.mark.parametrize("row", [0, 1])
def test_no_number_is_not_near_a_number(row: int) -> None:
    """Wherever it stands, in what came out or in what should."""
    fine = [torch.ones(2, 3), torch.ones(4, 3)]
    bad = [part.clone() for part in fine]
    bad[row][1, 2] = torch.nan
    assert compare_logits(fine, fine) == 0
    assert not compare_logits(bad, fine) <= 1
    assert not compare_logits(fine, bad) <= 1


def test_a_wrong_decoder_goes_through_transformers_and_is_found_there(
    tiny_target: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Loads(tiny_target)()
    original = PackedDecoder.logits

    def wrong(self: PackedDecoder, *args: torch.Tensor) -> torch.Tensor:
        out = original(self, *args)
        out[0, 5] += 0.1 * out.abs().max()
        return out

    monkeypatch.setattr(PackedDecoder, "logits", wrong)
    kept = kept_file(tiny_target, torch.float32).read_bytes()
    load = lambda: load_model(tiny_target)  # noqa: E731
    model, compute = load_for_cpu(str(tiny_target), torch.float32, CpuPagedAttention(), 1, load)
    assert model.packed is None
    assert "other logits" in compute
    assert kept_file(tiny_target, torch.float32).read_bytes() == kept


@pytest.mark.parametrize("home", [True, False])
def test_a_cache_that_cannot_be_written_is_no_error(
    tiny_target: Path, tmp_path: Path, cache: Path, home: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home:
        (tmp_path / "cache").write_text("a file in its place")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    load = Loads(tiny_target)
    load(), load()
    assert load.through == 2
    costs = CostCache(cache_folder())
    assert costs.load({"a": "b"}) is None
    with pytest.raises(OSError, match=r"exists|directory"):
        costs.store({"a": "b"}, AffineCost(Affine(1.0, 1.0, 1.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 1])
def test_the_built_in_pair_needs_no_transformers(number: int, dtype: torch.dtype, cache: Path) -> None:
    load = Loads(builtin_paths()[number], dtype)
    assert load().module is None
    assert not cache.exists()


@pytest.mark.parametrize("number", [0, 1])
def test_logits_of_the_built_in_pair_are_those_of_transformers(number: int) -> None:
    """As examples/builtin/proof.py wrote them: float32, the rows that are compared."""
    folder = builtin_paths()[number]
    file = builtin_logits(folder)
    assert file is not None
    proof = load_proof(file, 1536)
    assert proof is not None
    model = load_model(folder)
    assert all(torch.equal(a, b) for a, b in zip(proof.rows, sample_rows(1536, model.device), strict=True))
    runner = packing.ModelRunner(model, packing._scratch(model), CpuPagedAttention())
    assert compare_logits(paged_logits(runner, proof.rows), proof.logits) < 1e-5
    assert min(float(part.abs().max()) for part in proof.logits) > 5, "something to compare"


def test_a_copy_of_the_built_in_pair_is_a_model_as_any_other(tmp_path: Path) -> None:
    assert builtin_logits(tmp_path / "builtin" / "target") is None
