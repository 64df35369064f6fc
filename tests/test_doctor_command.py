"""`specbatch doctor`: what was found, printed; the finding itself has tests of its own."""

from __future__ import annotations

import json

import pytest

import specbatch.doctor as doctor
from specbatch.cli import main


def a_diagnosis(*, works: bool) -> doctor.Diagnosis:
    graphs = doctor.Check("graphs", False, "graphs are for CUDA devices")
    backends = [doctor.Check("triton", False, "no driver"), doctor.Check("reference", works, "largest error 0", 0.5)]
    device = doctor.DeviceReport("cpu", "a processor", None, None, 4 << 30, "float32", "the faster", backends, graphs)
    return doctor.Diagnosis(
        versions={"python": "3.11", "triton": None},
        driver=None,
        torch_cuda=None,
        devices=[device],
        self_test=doctor.Check("speculation", works, "99 % accepted"),
        missing=[doctor.Missing("a driver", "install it")],
    )


@pytest.mark.parametrize("works", [True, False])
def test_what_works_what_does_not_and_the_verdict(
    works: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(doctor, "diagnose", lambda self_test: asked.append(self_test) or a_diagnosis(works=works))
    assert main(["doctor"]) == (0 if works else 13)
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    text = "\n".join(lines)
    assert "not installed: triton" in text
    assert "backend     triton is of no use here: no driver" in text
    assert ("reference works: largest error 0 (0.5 s)" in text) is works
    assert "missing     a driver: install it" in text
    assert lines[-1] == f"verdict     a job {'can' if works else 'cannot'} run here{'' if works else ' as it is'}"
    assert main(["doctor", "--no-self-test", "--json"]) == (0 if works else 13)
    assert json.loads(capsys.readouterr().out)["healthy"] is works
    assert asked == [True, False]
