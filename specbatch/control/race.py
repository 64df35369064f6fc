"""Every forced setting and `auto` over the same rows with the same luck, on a simulated device.

Owns the comparison. Knows nothing of where rows or device times come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbatch.control.controller import Controller, ControllerOptions, FixedPolicy
from specbatch.control.cost_model import StepCost
from specbatch.control.records import METHOD_NONE, Policy
from specbatch.control.simulate import TEACHER_FORCED, Rows, SimDevice, SimResult, simulate

Setting = tuple[int, int]  # (method, k)


@dataclass(frozen=True, slots=True)
class Race:
    """Results of the forced settings and of auto."""

    fixed: dict[Setting, SimResult]
    auto: SimResult

    @property
    def best(self) -> Setting:
        """The forced setting that was fastest in hindsight."""
        return max(self.fixed, key=lambda setting: self.fixed[setting].rate)

    @property
    def score(self) -> float:
        """auto's tokens a second over those of the best forced setting."""
        return self.auto.rate / self.fixed[self.best].rate

    @property
    def off(self) -> SimResult:
        """Without speculation."""
        return self.fixed[METHOD_NONE, 0]

    @property
    def teacher_forced_share(self) -> float:
        """Share of auto's time that went into running the draft over produced tokens."""
        return self.auto.seconds_by_mode.get(TEACHER_FORCED, 0.0) / self.auto.seconds


def race(
    make_rows: Callable[[], Rows],
    settings: Sequence[Setting],
    options: ControllerOptions,
    device: SimDevice,
    tokens: int,
    *,
    believed: StepCost | None = None,
) -> Race:
    """Run AR, each of `settings`, and a controller under `options`. tokens: what the rows produce in all; believed: the
    step times the controller starts from, the device's own if None."""

    def go(policy: Policy) -> SimResult:
        return simulate(make_rows(), policy, device, tokens)

    fixed = {setting: go(FixedPolicy(*setting)) for setting in ((METHOD_NONE, 0), *settings)}
    return Race(fixed, go(Controller(options, believed or device.cost)))
