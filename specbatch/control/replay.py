"""Runs a policy again over its log: the same observations must give the same decisions. No torch, no device.

Owns reading `decisions.jsonl`. A log holds one start event (options, costs, prior) and then one event a decision, with
the observation it was made on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.control.controller import LOG_FORMAT, Controller, ControllerOptions
from specbatch.control.cost_model import cost_from_json
from specbatch.control.records import Decision, Observation, Policy


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that came out otherwise."""

    index: int  # of the decision, from 0
    logged: Decision
    replayed: Decision

    def __str__(self) -> str:
        for name in (
            "method",
            "k",
            "shards",
            "shadow_ngram",
            "probe_draft_rows",
            "probe_draft_k",
            "changed",
            "reason",
            "least_acceptance",
            "score_fewer",
        ):
            old, new = getattr(self.logged, name), getattr(self.replayed, name)
            if old != new:
                return f"decision {self.index} at step {self.logged.step}: {name} was {old!r}, is {new!r}"
        return f"decision {self.index} at step {self.logged.step} differs"


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found."""

    decisions: int
    differences: tuple[Difference, ...]
    policy: Policy | None  # the last one run, with all it has learned

    @property
    def same(self) -> bool:
        return not self.differences


def read_log(path: str | Path) -> Iterator[dict[str, Any]]:
    """Events of a JSON Lines file. A last line cut short by a crash is left out; other bad lines raise ValueError."""
    with Path(path).open(encoding="utf-8") as file:
        pending: tuple[int, str] | None = None
        for number, line in enumerate(file, 1):
            if pending is not None:
                yield _parse(path, *pending)
            pending = (number, line) if line.strip() else None
        if pending is not None:
            try:
                yield _parse(path, *pending)
            except ValueError:
                if pending[1].endswith("\n"):
                    raise


def _parse(path: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
    if not isinstance(event, dict) or "event" not in event:
        raise ValueError(f"{path}, line {number}: not an event")
    return event


def replay(events: Iterable[dict[str, Any]]) -> Replay:
    """Decide again on every observation. Each start event begins a new controller; decisions before one (a fixed
    policy's) are passed over. Other events are ignored. Raises KeyError or ValueError on a log of another shape."""
    policy: Controller | None = None
    count = 0
    differences: list[Difference] = []
    for event in events:
        if event["event"] == "start":
            if event.get("format", 1) != LOG_FORMAT:
                raise ValueError(
                    f"a log of format {event.get('format', 1)}; decisions of format {LOG_FORMAT} can be made again"
                )
            policy = Controller(
                ControllerOptions.from_json(event["options"]), cost_from_json(event["cost"]), prior=event["prior"]
            )
        elif event["event"] == "decision" and policy is not None:
            logged = Decision.from_json(event["decision"])
            again = policy.decide(Observation.from_json(event["observation"]))
            if again != logged:
                differences.append(Difference(count, logged, again))
            count += 1
    return Replay(count, tuple(differences), policy)
