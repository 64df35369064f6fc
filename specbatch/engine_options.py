"""How an engine is set up: models, device, memory, speculation. The same words on the command line and in Python.

Knows nothing of torch or of the job; says what was asked for, not what it resolves to on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantize = Literal["none", "int8"]
Speculate = Literal["auto", "off", "ngram", "draft"]
Verification = Literal["coupled", "rejection"]
Toggle = Literal["auto", "off"]

MAX_SPECULATIVE_TOKENS = 16
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "speculate": ("auto", "off", "ngram", "draft"),
    "verification": ("coupled", "rejection"),
    "cuda_graphs": ("auto", "off"),
    "quantize": ("none", "int8"),
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of one run's engine. Raises ValueError naming the option, the value and what is allowed.

    None means "decide at start-up" for every number. Sizes are in tokens unless the name says bytes.
    """

    model: str | None = None  # folder of a checkpoint; None: the built-in pair; "stand-in": the test engine
    draft_model: str | None = None  # folder; None: no draft model (the built-in pair brings its own)
    chat_template: str | None = None  # Jinja text, instead of the model's own
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    devices: tuple[int, ...] | Literal["all"] = ()  # CUDA devices to share the shards; (): only `device`
    dtype: Dtype = "auto"
    quantize: Quantize = "none"  # int8: weights and activations of the layers, on a CPU
    attention: str = "auto"  # auto, or a backend's name
    speculate: Speculate = "auto"
    num_speculative_tokens: int | None = None  # None: chosen live
    verification: Verification = "coupled"
    max_num_seqs: int | None = None  # rows running at once
    max_num_batched_tokens: int | None = None  # token budget of a prefill step
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    kv_memory_fraction: float | None = None  # of the memory free after loading the weights, in (0, 1]
    block_size: int | None = None  # target tokens a page
    prefix_cache: bool = True
    profile: bool = True  # measure step times at start-up
    cuda_graphs: Toggle = "auto"
    threads: int | None = None  # CPU threads; None: the cores this process may use
    seed: int = 0  # the run's seed: rows without one derive theirs from it

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        for name, allowed in _CHOICES.items():
            check(getattr(self, name) in allowed, name, "one of " + ", ".join(str(a).lower() for a in allowed))
        for name in ("num_speculative_tokens", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
                     "kv_memory_bytes", "block_size", "threads", "seed"):  # fmt: skip
            value = getattr(self, name)
            check(value is None or (isinstance(value, int) and not isinstance(value, bool)), name, "an integer")
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_memory_bytes", "threads"):
            value = getattr(self, name)
            check(value is None or value >= 1, name, "at least 1")
        check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "at least 2")
        k = self.num_speculative_tokens
        check(k is None or 0 <= k <= MAX_SPECULATIVE_TOKENS, "num_speculative_tokens", f"0 to {MAX_SPECULATIVE_TOKENS}")
        check(self.block_size in (None, *BLOCK_SIZES), "block_size", f"a power of two up to {BLOCK_SIZES[-1]}")
        fraction = self.kv_memory_fraction
        check(fraction is None or 0 < fraction <= 1, "kv_memory_fraction", "above 0 and at most 1")
        check(0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        kind, _, index = self.device.partition(":")
        device_ok = self.device in ("auto", "cpu", "cuda") or (kind == "cuda" and index.isdecimal())
        check(device_ok, "device", "auto, cpu, cuda or cuda:N")
        if self.devices != "all":
            check(all(d >= 0 for d in self.devices), "devices", "all, or device numbers from 0")
            check(len(set(self.devices)) == len(self.devices), "devices", "without repeats")
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Options that contradict each other or would have no effect are refused, not ignored."""

        def refuse(when: bool, message: str) -> None:
            if when:
                raise ValueError(message)

        refuse(self.kv_memory_bytes is not None and self.kv_memory_fraction is not None,
               "kv_memory_bytes and kv_memory_fraction exclude each other")  # fmt: skip
        refuse(self.speculate == "draft" and self.draft_model is None and self.model is not None,
               "speculate 'draft' needs draft_model (with your own model none is chosen for you)")  # fmt: skip
        refuse(self.draft_model is not None and self.speculate in ("off", "ngram"),
               f"draft_model has no effect with speculate {self.speculate!r}")  # fmt: skip
        refuse(self.draft_model is not None and self.model is None,
               "draft_model needs a target of your own: the built-in model brings its draft")  # fmt: skip
        k = self.num_speculative_tokens
        refuse(self.speculate == "off" and k not in (None, 0),
               f"num_speculative_tokens {k} has no effect with speculate 'off'")  # fmt: skip
        refuse(self.device == "cpu" and self.devices != (), "devices are CUDA devices; they exclude device 'cpu'")
        refuse(":" in self.device and self.devices != (), f"devices exclude device {self.device!r}")

    def for_device(self, index: int) -> EngineOptions:
        """The same options for one CUDA device of `devices`."""
        return replace(self, device=f"cuda:{index}", devices=())

    def as_dict(self) -> dict[str, object]:
        """Every field as JSON can hold it, for the plan and the manifest."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
