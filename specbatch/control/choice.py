"""When a shard changes its mode, and when it tries one out: hysteresis, dwell, and the value of knowing more.

Owns one shard's mode and its history. Knows nothing of how scores come about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specbatch.control.correction import Arm
from specbatch.control.records import METHOD_DRAFT, METHOD_NAMES


@dataclass(frozen=True, slots=True)
class Limits:
    """How eager a controller is. Steps are engine steps; shares are of time."""

    switch_gain: float = 0.05  # worth a switch when seen twice in a row
    switch_k_gain: float = 0.02  # the same between two k of one method, which costs nothing
    clear_k_gain: float = 0.06  # worth it at once, where it is more than a standard deviation
    steady_gain: float = 0.03  # worth a switch when seen `steady_times` in a row
    steady_k_gain: float = 0.007  # the same between two k of one method
    steady_times: int = 6
    tie: float = 0.01  # gain over AR below which a draft model is no better, when seen `steady_times` in a row
    large_gain: float = 0.25  # shortens the dwell to a quarter
    dwell: int = 8
    max_dwell: int = 256
    first_gain: float = 0.05  # over AR, for a first choice on a prior alone
    first_draft_gain: float = 0.15  # the same where the draft's KV has to be filled first
    probe_share: float = 0.015  # of time, for trying modes out
    shadow_share: float = 0.005  # of time, for running the draft teacher-forced
    probe_rounds: int = 64
    max_probe_steps: int = 12
    horizon_steps: int = 1500  # how long what a probe teaches is taken to hold


FIRST_RETRY = 32  # steps, doubled, before a mode that was tried may be tried again
SURE = 2.0  # standard deviations of a large gain that need no second look


def name(arm: Arm) -> str:
    """ "ar", "ngram k=4", "draft k=3"."""
    return "ar" if arm[1] == 0 else f"{METHOD_NAMES[arm[0]]} k={arm[1]}"


@dataclass(slots=True)
class ShardState:
    """One shard's mode, and what argues for leaving it."""

    arm: Arm
    since: int  # step of the last change
    dwell: int
    strong: int = 0  # evaluations in a row with a gain worth a switch
    steady: int = 0
    ties: int = 0  # evaluations in a row in which the draft model in force was no better than AR
    switches: int = 0
    home: Arm | None = None  # during a probe: the mode to go back to
    probe_goal: int = 0  # decode steps in the mode (over the whole run) at which the probe has seen enough
    probe_ends: int = 0  # step at which it ends in any case
    contenders: frozenset[Arm] = frozenset()  # modes that may be the best, when all were last scored ...
    contenders_at: float = 0.0  # ... at so many running rows
    left: dict[Arm, int] = field(default_factory=dict)  # mode -> step at which it was last left
    tried: dict[Arm, int] = field(default_factory=dict)  # probes of a mode
    retry: dict[Arm, int] = field(default_factory=dict)  # step before which it is not probed again

    @property
    def base(self) -> Arm:
        """The mode thought best so far (not the one on probe)."""
        return self.home if self.home is not None else self.arm

    def wants(self, step: int, arm: Arm, gain: float, limits: Limits, sd: float = math.inf) -> bool:
        """Whether a best candidate that promises `gain` (log of the ratio), give or take `sd`, is to be switched to now."""
        enough = limits.switch_k_gain if arm[0] == self.arm[0] else limits.switch_gain
        self.strong = self.strong + 1 if gain >= math.log1p(enough) else 0
        little = limits.steady_k_gain if arm[0] == self.arm[0] else limits.steady_gain
        self.steady = self.steady + 1 if gain >= math.log1p(little) else 0
        cheap = METHOD_DRAFT not in (arm[0], self.arm[0])  # no KV to fill on the way there or back
        if cheap and gain >= max(math.log1p(limits.large_gain), SURE * sd):
            return True
        if arm[0] == self.arm[0] and gain >= max(math.log1p(limits.clear_k_gain), sd):
            return True  # costs nothing, there and back
        dwell = self.dwell // 4 if gain >= math.log1p(limits.large_gain) else self.dwell
        if step - self.since < dwell:
            return False
        return self.strong >= 2 or self.steady >= limits.steady_times

    def tied(self, gain: float, limits: Limits) -> bool:
        """Whether the draft model in force, with this gain over AR, has been no better for long enough to be given up: what
        it costs that no score counts (gaps, rests, pages of others) decides then."""
        self.ties = self.ties + 1 if gain < math.log1p(limits.tie) else 0
        return self.ties >= limits.steady_times

    def switch(self, step: int, arm: Arm, limits: Limits) -> None:
        """Change for good. Coming back to a mode left not long ago doubles the dwell, a calm time halves it."""
        if step - self.left.get(arm, -(1 << 40)) < 8 * self.dwell:
            self.dwell = min(self.dwell * 2, limits.max_dwell)
        elif step - self.since > 16 * self.dwell:
            self.dwell = max(self.dwell // 2, limits.dwell)
        self.left[self.base] = step
        self.arm, self.home, self.since = arm, None, step
        self.strong = self.steady = self.ties = 0
        self.switches += 1

    def probe(self, step: int, arm: Arm, steps: int, done: int, patience: int) -> None:
        """Try a mode until it has run `steps` decode steps more than the `done` so far, or `patience` engine steps
        went by. The same one again only after a while that doubles each time."""
        self.home, self.arm = self.arm, arm
        self.probe_goal, self.probe_ends = done + steps, step + steps + patience
        tries = self.tried[arm] = self.tried.get(arm, 0) + 1
        self.retry[arm] = step + steps + min(FIRST_RETRY << min(tries, 8), 4096)

    def end_probe(self) -> None:
        if self.home is not None:
            self.arm, self.home = self.home, None

    def may_probe(self, step: int, arm: Arm) -> bool:
        return step >= self.retry.get(arm, 0)


def expected_improvement(gain: float, sd: float) -> float:
    """E[max(0, X)] of X ~ Normal(gain, sd): what knowing X is worth a unit of time (Jones et al., 1998)."""
    if sd <= 0.0:
        return max(gain, 0.0)
    z = gain / sd
    if z < -8.0:
        return 0.0
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return sd * density + gain * 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))
