"""`specbatch plan`: what a pair of models would do on a device, by arithmetic alone. No weights, no run.

Owns the arithmetic and its result as data and tables. How it is printed or drawn is in plan_show.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specbatch.control.cost_model import AffineCost, roofline
from specbatch.control.memory import DEFAULT_HEADROOM, MemoryBudget
from specbatch.models.support import ModelShape, count_parameters, read_config, shape_from_config
from specbatch.plan_gpus import BANDWIDTH_REACHED, FLOPS_REACHED, STEP_OVERHEAD, Gpu

KS = (1, 2, 3, 4, 6, 8)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
EXACT = {"gpt2", "opt", "bloom", "gpt_neox", "gpt_bigcode", "phi", "falcon", "mpt", "starcoder2"}  # no gate in the MLP
RULE_BATCH, RULE_ACCEPTANCE, RULE_MEMORY = 8, 0.6, 0.2


def round_tokens(acceptance: float, k: int) -> float:
    """Expected tokens of a round that proposes k drafts, each accepted with the same chance: (1-a^(k+1)) / (1-a).

    Leviathan et al., 2022 (arXiv:2211.17192), equation 1. Raises ValueError for a chance outside [0, 1] or k < 0.
    """
    if not 0.0 <= acceptance <= 1.0 or k < 0:
        raise ValueError(f"acceptance must be in [0, 1] and k at least 0, got {acceptance} and {k}")
    if acceptance == 1.0:
        return k + 1.0
    return float((1.0 - acceptance ** (k + 1)) / (1.0 - acceptance))


def load_shape(path: str | Path) -> ModelShape:
    """Shape of a model folder or of a lone config.json; parameters from the weights' headers, else estimated.

    Raises ValueError that names the folder when it has no usable config.json.
    """
    path = Path(path)
    folder = path.parent if path.suffix == ".json" else path
    config = read_config(folder)
    return shape_from_config(config, num_parameters=count_parameters(folder) or estimate_parameters(config))


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Shape from the values of a config.json, parameters estimated."""
    return shape_from_config(config, num_parameters=estimate_parameters(config))


def estimate_parameters(config: Mapping[str, Any]) -> int:
    """Parameters of a decoder from its config: embeddings, attention, (gated) MLP or experts, norms. Within 1 % for
    the common families; all experts of a mixture are counted."""
    shape = shape_from_config(dict(config))
    hidden, layers = shape.hidden_size, shape.num_layers
    inner = int(config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_dim") or 4 * hidden)
    matrices = 2 if shape.model_type in EXACT else 3
    attention = 2 * hidden * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    if shape.num_experts:
        expert = int(config.get("moe_intermediate_size") or inner)
        mlp = shape.num_experts * matrices * hidden * expert + hidden * shape.num_experts
    else:
        mlp = matrices * hidden * inner
    embeddings = shape.vocab_size * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(embeddings + layers * (attention + mlp + 2 * hidden) + hidden)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan for. Raises ValueError naming the option."""

    target: ModelShape
    gpu: Gpu
    draft: ModelShape | None = None  # None: n-gram, which needs neither memory nor passes
    gpus: int = 1  # bytes and rates taken times this, as if split without loss
    itemsize: int = 2
    context: int = 1024  # tokens a row holds, on average over its life
    output: int = 256
    headroom: float = DEFAULT_HEADROOM
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("gpus", "context", "output", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.itemsize not in (1, 2, 4):
            raise ValueError(f"itemsize must be 1, 2 or 4 bytes, got {self.itemsize}")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of thumb, tested."""

    text: str
    holds: bool
    found: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer, in numbers."""

    request: PlanRequest
    memory: MemoryBudget
    cost: AffineCost
    rows_without_draft: int
    rows_ar: int
    rows_speculative: int
    rows_static_split: int  # AR rows of an engine that reserves the draft's share
    # (acceptance, rows) -> ratio at the best k, and that k
    speedup: dict[tuple[float, int], tuple[float, int]] = field(default_factory=dict)
    break_even: dict[int, float | None] = field(default_factory=dict)  # rows -> least acceptance that pays
    crossover: dict[float, int | None] = field(default_factory=dict)  # acceptance -> most rows that still pay
    # acceptance -> the same with the memory full: as many rows as fit, for either
    full: dict[float, tuple[float, int]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()

    def step_seconds(self, rows: float, k: int) -> float:
        """Predicted seconds of one step that verifies k drafts a row."""
        context = rows * self.request.context
        seconds = self.cost.target(rows, rows * (k + 1), context)
        return seconds + k * self.cost.draft(rows, rows, context)

    def ratio(self, acceptance: float, k: int, rows: float, ar_rows: float | None = None) -> float:
        """Tokens a second of `rows` speculating over those of `ar_rows` (the same by default) in AR."""
        ar_rows = rows if ar_rows is None else ar_rows
        return (rows * round_tokens(acceptance, k) / self.step_seconds(rows, k)) / (
            ar_rows / self.step_seconds(ar_rows, 0)
        )

    def best(self, acceptance: float, rows: float, ar_rows: float | None = None) -> tuple[float, int]:
        """The best ratio over k, and that k."""
        ratio, least = max((self.ratio(acceptance, k, rows, ar_rows), -k) for k in KS)
        return ratio, -least

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        request = self.request
        return {
            "gpu": request.gpu.name,
            "gpus": request.gpus,
            "context": request.context,
            "output": request.output,
            "itemsize": request.itemsize,
            "target_parameters": request.target.num_parameters,
            "draft_parameters": request.draft.num_parameters if request.draft else 0,
            "memory": self.memory.describe(request.context),
            "cost": self.cost.to_json(),
            "speedup": [
                {"acceptance": a, "rows": r, "ratio": x, "k": k} for (a, r), (x, k) in sorted(self.speedup.items())
            ],
            "break_even": [{"rows": r, "acceptance": a} for r, a in sorted(self.break_even.items())],
            "crossover": [{"acceptance": a, "rows": r} for a, r in sorted(self.crossover.items())],
            "memory_full": [{"acceptance": a, "ratio": x, "k": k} for a, (x, k) in sorted(self.full.items())],
            "rules": [{"rule": r.text, "holds": r.holds, "found": r.found} for r in self.rules],
        }


def make_plan(request: PlanRequest, batches: Sequence[int] = BATCHES) -> Plan:
    """All numbers for a request. Raises ValueError when the target does not fit the device."""
    target, draft = request.target, request.draft
    memory = MemoryBudget(
        device_bytes=request.gpu.memory_bytes * request.gpus,
        target_weights=target.parameter_bytes(request.itemsize),
        target_kv_per_token=target.kv_bytes_per_token(request.itemsize),
        draft_weights=draft.parameter_bytes(request.itemsize) if draft else 0,
        draft_kv_per_token=draft.kv_bytes_per_token(request.itemsize) if draft else 0,
        block_size=request.block_size,
        headroom=request.headroom,
    )
    if memory.rows_without_draft(request.context) < 1:
        raise ValueError(
            f"the target's weights take {memory.target_weights / 1e9:.1f} GB: no row of {request.context} tokens fits "
            f"{request.gpus} x {request.gpu.name} ({memory.device_bytes / 1e9:.1f} GB)"
        )
    plan = Plan(
        request=request,
        memory=memory,
        cost=_cost(request),
        rows_without_draft=memory.rows_without_draft(request.context),
        rows_ar=memory.rows_ar(request.context),
        rows_speculative=memory.rows_speculative(request.context),
        rows_static_split=memory.rows_ar_static_split(request.context),
    )
    fitting = [b for b in batches if b <= plan.rows_speculative]
    plan.speedup.update({(a, b): plan.best(a, b) for a in ACCEPTANCES for b in fitting})
    plan.break_even.update({b: _break_even(plan, b) for b in fitting})
    plan.crossover.update({a: _crossover(plan, a) for a in ACCEPTANCES})
    if plan.rows_speculative:
        plan.full.update({a: plan.best(a, plan.rows_speculative, plan.rows_ar) for a in ACCEPTANCES})
    return replace(plan, rules=_rules(plan))


def _cost(request: PlanRequest) -> AffineCost:
    bandwidth = request.gpu.bandwidth * request.gpus
    flops = request.gpu.flops * request.gpus * FLOPS_REACHED

    def affine(shape: ModelShape, overhead: float) -> Any:
        step = roofline(
            parameter_bytes=shape.parameter_bytes(request.itemsize),
            parameters=shape.num_parameters,
            kv_bytes_per_token=shape.kv_bytes_per_token(request.itemsize),
            bandwidth=bandwidth * BANDWIDTH_REACHED,
            flops=flops,
            overhead=overhead,
        )
        return replace(step, per_kv_token=shape.kv_bytes_per_token(request.itemsize) / bandwidth)

    draft = affine(request.draft, STEP_OVERHEAD / 4) if request.draft else None
    return AffineCost(affine(request.target, STEP_OVERHEAD), draft, source=f"data sheet: {request.gpu.name}")


def _break_even(plan: Plan, rows: int) -> float | None:
    """The least acceptance at which some k is no slower than AR on the same rows; None when even 1 is."""
    if plan.best(1.0, rows)[0] < 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if plan.best(middle, rows)[0] < 1.0 else (low, middle)
    return high


def _crossover(plan: Plan, acceptance: float) -> int | None:
    """The most rows at which speculation at its best k beats AR on the same rows; None: never. The memory is the limit
    where it beats AR all the way."""
    most = plan.rows_speculative
    if most < 1 or plan.best(acceptance, 1)[0] <= 1.0:
        return None
    if plan.best(acceptance, most)[0] > 1.0:
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan.best(acceptance, middle)[0] > 1.0 else (low, middle)
    return low


def _rules(plan: Plan) -> tuple[Rule, ...]:
    """The three rules of thumb in circulation, held against this plan."""
    memory, most = plan.memory, plan.rows_speculative
    crossover = plan.crossover[0.7]
    if crossover is None:
        found = "at acceptance 0.7 it does not pay at any batch"
    elif crossover >= most:
        found = f"at acceptance 0.7 it pays up to all {most} rows that fit"
    else:
        found = f"at acceptance 0.7 it pays up to {crossover} rows"
    batch = Rule(
        f"speculate only up to a batch of {RULE_BATCH}",
        crossover is not None and RULE_BATCH / 2 <= crossover <= RULE_BATCH * 2,
        found,
    )
    levels = {b: a for b, a in plan.break_even.items() if a is not None}
    shown = ", ".join(f"{a:.2f} at {b}" for b, a in levels.items() if b in (1, 8, 64, 256))
    acceptance = Rule(
        f"speculate only above an acceptance of {RULE_ACCEPTANCE}",
        bool(levels) and all(abs(a - RULE_ACCEPTANCE) <= 0.1 for a in levels.values()),
        f"it pays from an acceptance of {shown} rows" if levels else "it does not pay at any acceptance",
    )
    if not memory.draft_weights:
        return batch, acceptance, Rule("keep 20 % of the memory for the draft", False, "n-gram needs none")
    kv = most * -(-plan.request.context // memory.draft_block_size) * memory.page_bytes if most else 0
    share = (memory.draft_weights + kv) / memory.device_bytes
    room = Rule(
        f"keep {RULE_MEMORY:.0%} of the memory for the draft",
        abs(share - RULE_MEMORY) <= 0.05,
        f"it takes {share:.0%}: {memory.draft_weights / 1e9:.1f} GB of weights, {kv / 1e9:.1f} GB of KV at {most} rows",
    )
    return batch, acceptance, room
