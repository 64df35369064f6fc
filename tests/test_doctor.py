"""The doctor proves what it says, on any machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from specbatch import doctor
from specbatch.attention.reference import ReferenceBackend
from specbatch.engine.device import resolve_device
from specbatch.errors import NoDevice

CPU = torch.device("cpu")


def test_a_cpu_has_a_backend_that_works() -> None:
    found = doctor.diagnose(self_test=False)
    cpu = found.devices[-1]
    assert cpu.device == "cpu"
    assert cpu.free_bytes > 0
    checks = {check.name: check for check in cpu.backends}
    assert checks["reference"].works, checks["reference"].detail
    assert not checks["triton"].works
    assert "runs on cuda" in checks["triton"].detail
    assert not cpu.graphs.works
    assert found.versions["torch"] == torch.__version__
    assert found.healthy
    assert json.loads(json.dumps(found.to_dict()))["healthy"] is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_passes_in_every_dtype(dtype: torch.dtype) -> None:
    check = doctor.check_backend("reference", CPU, dtype)
    assert check.works, check.detail


def test_a_broken_backend_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(ReferenceBackend):
        def write_kv(self, key: Any, value: Any, key_pages: Any, value_pages: Any, slot_mapping: Any) -> None:
            super().write_kv(key, value, key_pages, value_pages, slot_mapping + 1)

    class Silent(ReferenceBackend):
        def forward(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full_like(query, float("nan"))

    class Fails(ReferenceBackend):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise RuntimeError("no kernel image is available\nfor this device")

    for broken, words in ((Shifted(), "largest error"), (Silent(), "nan"), (Fails(), "no kernel image is available")):
        monkeypatch.setattr(doctor, "create_backend", lambda *args, broken=broken: broken)
        check = doctor.check_backend("reference", CPU, torch.float32)
        assert not check.works
        assert words in check.detail
        assert "\n" not in check.detail


def test_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**changes: Any) -> str:
        found = doctor.Diagnosis(versions={"triton": "3.6"}, driver=None, torch_cuda="12.8")
        for name, value in changes.items():
            setattr(found, name, value)
        return "; ".join(f"{m.what}: {m.how}" for m in doctor._missing(found))

    broken = doctor.Check("triton", False, "RuntimeError: Failed to find C compiler")
    fine = doctor.Check("reference", True, "")
    gpu = doctor.DeviceReport("cuda:0", "H", "9.0", 1, 1, "bfloat16", "", [broken, fine], fine)
    assert missing() == ""
    assert "CUDA build of torch" in missing(driver="550.54", torch_cuda=None)
    assert "update the driver (450.1)" in missing(driver="450.1")
    assert "pip install triton" in missing(driver="550.54", devices=[gpu], versions={"triton": None})
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "gcc" in missing(driver="550.54", devices=[gpu])


@pytest.mark.slow
def test_speculation_tests_itself() -> None:
    check = doctor.check_speculation("cpu")
    assert check.works, check.detail
    assert "drafts accepted" in check.detail


@pytest.mark.slow
def test_speculation_that_breaks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from specbatch.speculators.draft_model import DraftModelSpeculator

    original = DraftModelSpeculator._one_token

    def one_late(self: Any, info: Any, ids: Any, positions: Any, *rest: Any) -> Any:
        return original(self, info, ids, positions + 1, *rest)

    monkeypatch.setattr(DraftModelSpeculator, "_one_token", one_late)
    check = doctor.check_speculation("cpu")
    assert not check.works
    assert "%" in check.detail


def test_a_device_that_is_not_there_is_a_missing_resource() -> None:
    with pytest.raises(NoDevice, match=r"'cuda:99' was asked for, torch sees \d+ CUDA devices") as caught:
        resolve_device("cuda:99")
    assert caught.value.exit_code == 13
