"""What works on this machine: devices, versions, attention backends, graphs, and speculation itself, each one tried.

Returns data; printing is the command line's business. Loads no model but the built-in one, for the self-test.
"""

from __future__ import annotations

import platform
import re
import shutil
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbatch import _core
from specbatch.attention.backend import AttentionMetadata
from specbatch.attention.reference import ReferenceBackend
from specbatch.attention.registry import AttentionNeeds, backend_names, create_backend
from specbatch.engine.device import free_memory, resolve_dtype
from specbatch.engine.graphs import CudaCapturer
from specbatch.engine.packing import packed_dtype

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
ROWS = ((5, 40), (1, 170), (9, 0), (37, 12))  # (query tokens, context before them): verify, decode, a prompt, a chunk
LEAST_ACCEPTANCE = 0.98  # of a draft that is the target itself
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "triton")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried."""

    name: str
    works: bool
    detail: str  # what was measured, or why it does not work
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device and what works on it."""

    device: str
    name: str
    capability: str | None  # CUDA only
    total_bytes: int | None
    free_bytes: int
    dtype: str  # what "auto" resolves to
    dtype_reason: str
    backends: list[Check]
    graphs: Check


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that would help here, and how to get it."""

    what: str
    how: str


@dataclass(slots=True)
class Diagnosis:
    """Everything `specbatch doctor` found."""

    versions: dict[str, str | None]  # None: not installed
    driver: str | None  # of an NVIDIA device
    torch_cuda: str | None  # the CUDA that torch was built for
    devices: list[DeviceReport] = field(default_factory=list)
    self_test: Check | None = None
    missing: list[Missing] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Every device has a backend that works, and speculation passed its test."""
        return all(any(c.works for c in d.backends) for d in self.devices) and (
            self.self_test is None or self.self_test.works
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "healthy": self.healthy}


def diagnose(*, self_test: bool = True) -> Diagnosis:
    """Look at every device. Takes seconds (on a GPU: to compile kernels once). What is broken is data, not an error."""
    found = Diagnosis(versions=_versions(), driver=_driver_version(), torch_cuda=torch.version.cuda)
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    found.devices = [_report(torch.device(name)) for name in [*names, "cpu"]]
    if self_test:
        found.self_test = check_speculation(names[0] if names else "cpu")
    found.missing = _missing(found)
    return found


def check_backend(name: str, device: torch.device, dtype: torch.dtype, head_dim: int = 64) -> Check:
    """Write KV and attend over strided pages with one backend; compare with the reference in float32 on the CPU."""
    start = time.perf_counter()
    try:
        backend = create_backend(name, device, dtype, AttentionNeeds(head_dim))
        query, key, value, pages, step = _attention_case(head_dim, dtype)
        here = pages.to(device)
        step_here = _moved(step, device)
        backend.write_kv(key.to(device), value.to(device), here[:, 0], here[:, 1], step_here.slot_mapping)
        scale = head_dim**-0.5
        actual = backend.forward(query.to(device), here[:, 0], here[:, 1], step_here, scale=scale).float().cpu()
    except Exception as error:  # whatever a driver or compiler says is the answer
        return Check(name, False, f"{type(error).__name__}: {_first_line(error)}", time.perf_counter() - start)
    reference = ReferenceBackend()
    wide = pages.float()
    reference.write_kv(key.float(), value.float(), wide[:, 0], wide[:, 1], step.slot_mapping)
    expected = reference.forward(query.float(), wide[:, 0], wide[:, 1], step, scale=scale)
    error_size = (actual - expected)[: step.num_tokens].abs().max().item()
    works = error_size <= TOLERANCE[dtype]  # NaN does not
    kind = str(dtype).removeprefix("torch.")
    return Check(name, works, f"largest error {error_size:.1e} in {kind}", time.perf_counter() - start)


def check_graphs(device: torch.device) -> Check:
    """Capture a graph and replay it over other numbers."""
    if device.type != "cuda":
        return Check("graphs", False, "graphs are for CUDA devices")
    start = time.perf_counter()
    try:
        weight = torch.randn(64, 64, device=device)
        source, target = torch.zeros(8, 64, device=device), torch.zeros(8, 64, device=device)

        def multiply() -> None:
            target.copy_(source @ weight)

        replay = CudaCapturer(device).capture(multiply)
        source.normal_()
        replay()
        works = torch.allclose(target, source @ weight)
    except Exception as error:
        return Check("graphs", False, f"{type(error).__name__}: {_first_line(error)}", time.perf_counter() - start)
    detail = "captured and replayed" if works else "a replay gave another result"
    return Check("graphs", works, detail, time.perf_counter() - start)


def check_speculation(device: str) -> Check:
    """The built-in target drafts for itself: nearly all is accepted, and the tokens are those without drafts."""
    from specbatch.api import Engine
    from specbatch.models.builtin import builtin_paths
    from specbatch.sampling_params import SamplingParams

    start = time.perf_counter()
    settings: dict[str, Any] = {"device": device, "dtype": "float32", "kv_memory_bytes": 64 << 20, "profile": False}
    prompts = [list(range(3, 3 + length)) for length in (4, 9, 17, 33)]
    params = SamplingParams(max_tokens=128, ignore_eos=True)
    try:
        target = str(builtin_paths()[0])
        with Engine(model=target, speculate="off", **settings) as engine:
            plain = engine.generate(prompts, params)
        with Engine(
            model=target, draft_model=target, speculate="draft", num_speculative_tokens=4, **settings
        ) as engine:
            drafted = engine.generate(prompts, params)
    except Exception as error:
        return Check("speculation", False, f"{type(error).__name__}: {_first_line(error)}", time.perf_counter() - start)
    offered, accepted = sum(c.drafted for c in drafted), sum(c.accepted for c in drafted)
    rate = accepted / offered if offered else 0.0
    equal = [c.token_ids for c in plain] == [c.token_ids for c in drafted]
    detail = f"a draft equal to its target: {rate:.1%} of {offered} drafts accepted, " + (
        "tokens equal to those without drafts" if equal else "but other tokens than without drafts"
    )
    return Check("speculation", equal and rate >= LEAST_ACCEPTANCE, detail, time.perf_counter() - start)


def _report(device: torch.device) -> DeviceReport:
    dtype, reason = packed_dtype() if device.type == "cpu" else resolve_dtype("auto", device, 1024)
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return DeviceReport(
        device=str(device),
        name=properties.name if properties else platform.processor() or platform.machine(),
        capability=f"{properties.major}.{properties.minor}" if properties else None,
        total_bytes=properties.total_memory if properties else None,
        free_bytes=free_memory(device),
        dtype=str(dtype).removeprefix("torch."),
        dtype_reason=reason,
        backends=[check_backend(name, device, dtype) for name in backend_names()],
        graphs=check_graphs(device),
    )


def _attention_case(head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, AttentionMetadata]:
    """Query, key, value, pages and metadata of one step of ROWS, on the CPU. All of a row's context is written in the
    step (keys of its context come first in `key`), only its query tokens ask."""
    generator = torch.Generator().manual_seed(0)
    block_size, heads, kv_heads = 16, 8, 2
    lengths = [query + before for query, before in ROWS]
    pages_a_row = [-(-length // block_size) for length in lengths]
    tables = torch.zeros(len(ROWS), max(pages_a_row), dtype=torch.int32)
    slots: list[int] = []
    page = 1
    for row, (length, count) in enumerate(zip(lengths, pages_a_row, strict=True)):
        tables[row, :count] = torch.arange(page, page + count)
        slots += range(page * block_size, page * block_size + length)
        page += count

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    queries = [query for query, _ in ROWS]
    starts = torch.tensor([0, *queries]).cumsum(0)
    own = torch.cat([torch.arange(before, before + query) for query, before in ROWS])
    step = AttentionMetadata(
        query_start_loc=starts.int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        positions=own.int(),
        slot_mapping=torch.tensor(slots, dtype=torch.int32),
        block_tables=tables,
        num_rows=len(ROWS),
        num_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )
    pages = torch.zeros(page, 2, block_size, kv_heads, head_dim, dtype=dtype)
    total = sum(lengths)
    return (
        random(sum(queries), heads, head_dim),
        random(total, kv_heads, head_dim),
        random(total, kv_heads, head_dim),
        pages,
        step,
    )


def _moved(step: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    names = ("query_start_loc", "seq_lens", "positions", "slot_mapping", "block_tables")
    tensors = {name: getattr(step, name).to(device) for name in names}
    return AttentionMetadata(
        **tensors,
        num_rows=step.num_rows,
        num_tokens=step.num_tokens,
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
    )


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "specbatch": _core.__version__}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    versions["torch"] = torch.__version__  # says what it was built for, too
    return versions


def _driver_version() -> str | None:
    """Of the NVIDIA kernel module, if one is loaded."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text("ascii", errors="replace")
    except OSError:
        return None
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return version.group(1) if version else "unknown"


def _missing(found: Diagnosis) -> list[Missing]:
    cuda = [device for device in found.devices if device.capability]
    missing = []
    if found.driver and not cuda:
        if found.torch_cuda is None:
            missing.append(Missing("a torch that can use the NVIDIA device", "install a CUDA build of torch"))
        else:
            how = f"update the driver ({found.driver}) to one for CUDA {found.torch_cuda}, or install an older torch"
            missing.append(Missing("a driver that torch can use", how))
    if cuda and found.versions["triton"] is None:
        missing.append(Missing("Triton, for the fast attention kernels", "pip install triton"))
    for device in cuda:
        broken = [check for check in device.backends if check.name == "triton" and not check.works]
        if broken and found.versions["triton"] and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
            missing.append(Missing(f"a C compiler, which Triton needs on {device.device}", "install gcc or clang"))
    return missing


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
