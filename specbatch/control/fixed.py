"""The policy of `--speculate off | ngram | draft` with a k: it does as it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbatch.control.records import METHOD_NAMES, METHOD_NONE, Decision, Observation, ShardDecision


class FixedPolicy:
    """`--speculate off | ngram | draft`: one method and k for every shard, for the whole run."""

    def __init__(self, method: int, k: int, *, log: Callable[[dict[str, Any]], None] | None = None) -> None:
        if method not in METHOD_NAMES:
            raise ValueError(f"method must be one of {sorted(METHOD_NAMES)}, got {method!r}")
        if (method == METHOD_NONE) != (k == 0) or k < 0:
            raise ValueError(f"k must be 0 for AR and at least 1 otherwise, got method {METHOD_NAMES[method]}, k {k}")
        self.method = method
        self.k = k
        self.log = log
        self._decided = False

    def due(self, step: int, running: int, waiting: int) -> bool:
        return not self._decided

    def decide(self, observation: Observation) -> Decision:
        reason = f"forced: {METHOD_NAMES[self.method]} k={self.k}"
        shards = tuple(
            ShardDecision(s.shard, self.method, self.k, reason, switched=not self._decided) for s in observation.shards
        )
        decision = Decision(
            step=observation.step,
            method=self.method,
            k=self.k,
            shards=shards,
            shadow_ngram=0,
            probe_draft_rows=0,
            probe_draft_k=0,
            max_rows=0,
            changed=not self._decided,
            reason=reason,
        )
        self._decided = True
        if self.log is not None:
            self.log({"event": "decision", "observation": observation.to_json(), "decision": decision.to_json()})
        return decision
