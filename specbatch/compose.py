"""Puts an engine together from its options: plan, parts, policy. What the command line and the Python API both call.

Knows every layer below the command line; owns none of their work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbatch.control.controller import FixedPolicy, Policy
from specbatch.control.records import METHOD_DRAFT, METHOD_NGRAM, METHOD_NONE
from specbatch.engine.engine import Engine
from specbatch.engine.parts import build_parts
from specbatch.engine.plan import DEFAULT_K, plan_engine
from specbatch.engine_options import EngineOptions
from specbatch.models.tokenizer import HFTokenizer

LogDecision = Callable[[dict[str, Any]], None]


def make_engine(
    options: EngineOptions, *, log_decision: LogDecision | None = None, tokenizer: HFTokenizer | None = None
) -> Engine:
    """Load models and make an engine ready to step. Raises ValueError naming the option or model and the fix."""
    plan = plan_engine(options)
    parts = build_parts(plan, options, tokenizer)
    return Engine(parts, make_policy(options, log_decision))


def make_policy(options: EngineOptions, log: LogDecision | None = None) -> Policy:
    """The policy that --speculate names."""
    k = options.num_speculative_tokens
    if options.speculate == "off" or k == 0:
        return FixedPolicy(METHOD_NONE, 0, log=log)
    method = METHOD_DRAFT if options.speculate == "draft" else METHOD_NGRAM
    return FixedPolicy(method, DEFAULT_K if k is None else k, log=log)
