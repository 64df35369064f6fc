"""`specbatch plan`: options in, tables and pictures out. The arithmetic is in plan.py, the wording in plan_show.py."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

from specbatch.commands import PLAN
from specbatch.errors import ExitCode, UsageError
from specbatch.streams import SafeStream
from specbatch.values import parse_value

SCHEMA_VERSION: Final = 1
BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_FLAGS: Final = {option.field: option.flag for option in PLAN.options}


def plan(given: Mapping[str, Any]) -> int:
    """Print the plan. Raises UsageError for options and models it cannot be made of."""
    specs = {option.name: option for option in PLAN.options}
    values = {
        spec.field: parse_value(spec, given[name], spec.flag) for name, spec in specs.items() if given[name] is not None
    }
    try:
        return _print(values)
    except ValueError as error:
        words = str(error)
        field = re.match(r"(\w+) must ", words)
        known = field is not None and field[1] in _FLAGS
        raise UsageError(_FLAGS[field[1]] + words[len(field[1]) :] if known and field else words) from None


def _print(values: dict[str, Any]) -> int:
    from specbatch.models.builtin import builtin_paths
    from specbatch.plan import PlanRequest, load_shape, make_plan
    from specbatch.plan_gpus import find_gpu
    from specbatch.plan_show import chart, to_text, write_html

    if "draft_model" in values and "model" not in values:
        raise UsageError("--draft-model needs --model: the built-in model brings its draft")
    model, draft = values.pop("model", None), values.pop("draft_model", None)
    if model is None:
        model, draft = map(str, builtin_paths())
    plot, page, as_json = values.pop("plot", None), values.pop("html", None), values.pop("json", False)
    request = PlanRequest(
        target=load_shape(model),
        draft=load_shape(draft) if draft is not None else None,
        gpu=find_gpu(str(values.pop("gpu", "h100"))),
        itemsize=BYTES[values.pop("dtype", "bfloat16")],
        **values,
    )
    found = make_plan(request)
    try:
        if plot is not None:
            chart(found).write(plot)
        if page is not None:
            write_html(found, page)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from None
    stdout = SafeStream(sys.stdout)
    if as_json:
        stdout.line(json.dumps({"schema_version": SCHEMA_VERSION, **found.to_json()}))
    else:
        stdout.line(to_text(found).rstrip("\n"))
    stdout.require_delivered()
    return ExitCode.OK
