"""`specbatch doctor`: what works on this machine, printed. The trying is in doctor.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specbatch.errors import ExitCode
from specbatch.streams import SafeStream
from specbatch.units import format_bytes

if TYPE_CHECKING:
    from specbatch.doctor import Check, DeviceReport, Diagnosis

Line = tuple[str, str, str]  # label, words, state: "", "good" or "bad"


def examine(*, self_test: bool, as_json: bool) -> int:
    """Print what was found. 0 when a job would run, else 13."""
    SafeStream(sys.stderr).line("trying devices, backends and speculation ...")
    from specbatch.doctor import diagnose

    found = diagnose(self_test=self_test)
    stdout = SafeStream(sys.stdout)
    if as_json:
        stdout.line(json.dumps(found.to_dict()))
    else:
        from specbatch.console import print_page
        from specbatch.console_tables import print_lines

        print_page(stdout, lambda console: print_lines(console, describe(found)))
    stdout.require_delivered()
    return ExitCode.OK if found.healthy else ExitCode.RESOURCE


def describe(found: Diagnosis) -> Iterator[Line]:
    """The diagnosis as labelled lines."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items() if version)
    yield "versions", versions, ""
    absent = ", ".join(name for name, version in found.versions.items() if version is None)
    if absent:
        yield "", f"not installed: {absent}", ""
    if found.driver:
        yield (
            "driver",
            f"NVIDIA {found.driver}; torch is built for CUDA {found.torch_cuda or '-, without GPU support'}",
            "",
        )
    for device in found.devices:
        yield from _device(device)
    if found.self_test is not None:
        yield "", "", ""
        yield _check("test", found.self_test)
    for item in found.missing:
        yield "missing", f"{item.what}: {item.how}", "bad"
    yield "", "", ""
    verdict = "a job can run here" if found.healthy else "a job cannot run here as it is"
    yield "verdict", verdict, "good" if found.healthy else "bad"


def _device(device: DeviceReport) -> Iterator[Line]:
    yield "", "", ""
    memory = f"{format_bytes(device.free_bytes)} free"
    if device.total_bytes:
        memory += f" of {format_bytes(device.total_bytes)}"
    capability = f", compute capability {device.capability}" if device.capability else ""
    yield device.device, f"{device.name}{capability}, {memory}", ""
    yield "dtype", f"{device.dtype} ({device.dtype_reason})", ""
    for check in device.backends:
        yield _check("backend", check)
    if device.capability:
        yield _check("graphs", device.graphs)


def _check(label: str, check: Check) -> Line:
    took = f" ({check.seconds:.1f} s)" if check.seconds >= 0.1 else ""
    return (
        label,
        f"{check.name} {'works' if check.works else 'is of no use here'}: {check.detail}{took}",
        ("good" if check.works else "bad"),
    )
