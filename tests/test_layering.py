"""Who may import whom, read from the source; and what asking for help may load, measured in a fresh process.

cli -> job -> {control, engine} -> _core; console is the only importer of rich, cli of typer; control imports neither
torch nor _core; job no torch; nothing points back up.
"""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "specbatch"
MODULES = {".".join(("specbatch", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in PACKAGE.rglob("*.py")}

# What every layer may use. All other modules at the top face people: they may import the job, not the other way round.
SHARED = {"__init__", "errors", "requests", "sampling_params", "engine_options", "units", "cache"}
FRONT = {p.stem for p in PACKAGE.glob("*.py")} - SHARED
FORBIDDEN = {
    "control": ("torch", "transformers", "specbatch._core", "specbatch.engine", "specbatch.job", "specbatch.models",
                "specbatch.attention", "specbatch.speculators"),
    "job": ("torch", "transformers", "specbatch._core", "specbatch.engine", "specbatch.models", "specbatch.attention",
            "specbatch.speculators"),
    "engine": ("pyarrow", "specbatch.job"),
    "models": ("pyarrow", "specbatch.job", "specbatch.control"),
    "attention": ("pyarrow", "specbatch.job", "specbatch.control", "specbatch.speculators"),
    "speculators": ("pyarrow", "specbatch.job", "specbatch.control"),
}  # fmt: skip


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Absolute names of everything imported anywhere in a module, inside functions too; type-checking blocks apart."""
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parents, *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported(module: str) -> set[str]:
    path = MODULES[module]
    return set(imports(path.read_text(), module.removesuffix(".__init__"), is_package=path.name == "__init__.py"))


def violations(layer: str, module: str, names: set[str]) -> list[str]:
    bad = FORBIDDEN[layer] + tuple(f"specbatch.{name}" for name in sorted(FRONT))
    return [
        f"{module} imports {name}" for name in sorted(names) if any(name == b or name.startswith(f"{b}.") for b in bad)
    ]


def test_layers_point_downwards() -> None:
    found = [
        line
        for module in MODULES
        if (layer := module.split(".")[1]) in FORBIDDEN
        for line in violations(layer, module, imported(module))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("library", "owners"),
    [("rich", {"specbatch.console", "specbatch.console_tables"}), ("typer", {"specbatch.cli"}), ("click", set())],
)
def test_a_library_has_one_importer(library: str, owners: set[str]) -> None:
    users = {m for m in MODULES if any(name.split(".")[0] == library for name in imported(m))}
    assert users == owners


def test_the_check_sees_what_it_is_there_for() -> None:
    source = "if TYPE_CHECKING:\n    import torch\ndef f():\n    from ..engine import plan\n    import rich.table"
    names = set(imports(source, "specbatch.job.run"))
    assert names == {"specbatch.engine", "specbatch.engine.plan", "rich.table"}
    assert violations("job", "specbatch.job.run", names) == [
        "specbatch.job.run imports specbatch.engine",
        "specbatch.job.run imports specbatch.engine.plan",
    ]
    assert set(imports("from . import lock", "specbatch.job", is_package=True)) == {
        "specbatch.job",
        "specbatch.job.lock",
    }


HEAVY = ("torch", "transformers", "tokenizers", "pyarrow", "numpy", "pydantic", "rich", "typer", "click")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["inspect", "--help"], ["--version"], []])
def test_help_loads_nothing_heavy_and_takes_under_0_3_seconds(arguments: list[str]) -> None:
    script = (
        "import sys; from specbatch.cli import main; code = main(sys.argv[1:])\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert done.stderr == "[]\n"
    assert "specbatch" in done.stdout
    # Processor time, since a busy machine must not fail this; on an idle one the wall clock reads the same.
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.3


def test_importing_the_package_and_the_job_options_loads_no_torch() -> None:
    script = (
        "import specbatch, specbatch.settings, specbatch.job.options, sys\n"
        "print('torch' in sys.modules, 'pyarrow' in sys.modules)"
    )
    environ = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.split() == ["False", "False"]
