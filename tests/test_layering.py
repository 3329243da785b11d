"""Who may import whom, read from the source: docs and design promise it, and this holds the files to it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES = ("rematc.graph", "rematc.options", "rematc.errors", "rematc.cards")
NO_TORCH = (
    *LEAVES,
    "rematc.cache",
    "rematc.files",
    "rematc.fit",
    "rematc.kernels",
    "rematc.problem",
    "rematc.plan",
    "rematc.plans",
    "rematc.schedule",
    "rematc.simulate",
    "rematc.layers",
    "rematc.mincut",
    "rematc.baselines",
    "rematc.choose",
    "rematc.compare",
    "rematc.exchange",
    "rematc.pareto",
    "rematc.regather",
    "rematc.solve",
    "rematc.report",
    "rematc.share",
)
NO_SOLVER = ("rematc.passes", "rematc.capture", "rematc.simulate", "rematc.exchange")
RUNS_CODE = ("rematc.loader", "rematc.rehearse")  # a user's model file, and what Inductor has just written
UNSAFE = ("eval", "exec", "pickle", "marshal", "shelve", "torch.load")
MAX_LINES = 320
A_LIST = "rematc.compat"  # of small functions, that has to be one file


def sources() -> dict[str, Path]:
    """Each file of rematc/ and passes/, by the name it is imported under."""
    found = {}
    for path in sorted([*(ROOT / "rematc").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "passes":
            parts = ("rematc", *parts)
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


SOURCES = sources()
each_file = pytest.mark.parametrize("name", SOURCES)


def within(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module that the file may import, at its top or inside a function, in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def chains(tree: ast.AST) -> Iterator[str]:
    """Every dotted name, as torch.fx.Node; of a chain, its shorter heads too."""
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(parts)])


def is_private(dotted: str) -> bool:
    """Whether it is a private name of torch: torch._dynamo, torch.fx._lazy, functorch.compile."""
    first, *rest = dotted.split(".")
    hidden = any(p.startswith("_") and not p.startswith("__") for p in rest)
    return first == "functorch" or (first == "torch" and hidden)


def read(name: str) -> tuple[ast.Module, set[str]]:
    path = SOURCES[name]
    tree = ast.parse(path.read_text())
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return tree, set(imports(tree, package))


def test_the_reader_of_imports_sees_every_form() -> None:
    text = """
import torch.fx
from rematc import solve
from . import capture
from ..costs import roofline
def f():
    from torch._inductor import config
"""
    found = set(imports(ast.parse(text), "rematc.solve"))
    assert {"torch.fx", "rematc.solve", "rematc.solve.capture", "rematc.costs.roofline"} <= found
    assert "torch._inductor.config" in found
    assert "torch._dynamo.config" in set(chains(ast.parse("x = torch._dynamo.config.verbose")))
    assert [is_private(n) for n in ("torch._dynamo", "torch.__version__", "torch.fx.Node")] == [1, 0, 0]


@pytest.mark.parametrize("name", [n for n in SOURCES if n in LEAVES])
def test_the_leaves_import_the_standard_library_alone(name: str) -> None:
    allowed = {*sys.stdlib_module_names}
    strangers = [n for n in read(name)[1] if n.split(".")[0] not in allowed and not within(n, *LEAVES)]
    assert not strangers


@pytest.mark.parametrize("name", [n for n in SOURCES if within(n, *NO_TORCH)])
def test_the_solver_s_side_never_imports_torch(name: str) -> None:
    assert not [n for n in read(name)[1] if within(n, "torch", "functorch")]


@pytest.mark.parametrize("name", [n for n in SOURCES if within(n, *NO_SOLVER)])
def test_passes_capture_and_the_judge_never_import_the_solver(name: str) -> None:
    assert not [n for n in read(name)[1] if within(n, "rematc.solve")]


@each_file
def test_private_names_of_torch_stand_in_compat_alone(name: str) -> None:
    tree, imported = read(name)
    if name != "rematc.compat":
        assert not sorted(n for n in {*imported, *chains(tree)} if is_private(n))


@each_file
def test_what_is_said_of_torch_s_settings_has_their_names_from_compat(name: str) -> None:
    tree, _ = read(name)
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    found = [n for text in texts for n in re.findall(r"\btorch(?:\.\w+)+", text) if is_private(n)]
    assert not found or name == "rematc.compat"


@each_file
def test_private_attributes_of_torch_s_ops_are_read_in_compat_alone(name: str) -> None:
    read_here = {n.attr for n in ast.walk(read(name)[0]) if isinstance(n, ast.Attribute)}
    assert not read_here & {"_schema", "_opoverload", "_cdata"} or name == "rematc.compat"


@each_file
def test_nothing_that_is_read_is_run(name: str) -> None:
    tree, imported = read(name)
    called = {n.func for n in ast.walk(tree) if isinstance(n, ast.Call)}
    plain = {n.id for n in called if isinstance(n, ast.Name)}
    used = [n for n in {*imported, *chains(tree), *plain} if within(n, *UNSAFE)]
    assert bool(used) is (name in RUNS_CODE), used


@each_file
def test_each_file_says_what_it_is_and_is_read_in_one_sitting(name: str) -> None:
    assert ast.get_docstring(read(name)[0]), "no module docstring"
    assert len(SOURCES[name].read_text().splitlines()) <= MAX_LINES or name == A_LIST


def chains_stored(statement: ast.stmt) -> set[str]:
    """The dotted names that a statement assigns to, or calls a method of."""
    if isinstance(statement, ast.Assign):
        return {name for target in statement.targets for name in chains(target)}
    return {name for node in ast.walk(statement) if isinstance(node, ast.Call) for name in chains(node.func)}


BENCHMARKS = sorted((ROOT / "benchmarks").glob("[!_]*.py"))


@pytest.mark.parametrize("path", [*BENCHMARKS, *SOURCES.values()], ids=lambda path: path.stem)
def test_to_import_a_file_changes_no_setting_of_the_process(path: Path) -> None:
    """One import of a benchmark by its tests once took the caches of torch from all tests after it."""
    stores = [s for s in ast.parse(path.read_text()).body if isinstance(s, ast.Assign | ast.Expr)]
    assert not [s for s in stores if any(n.startswith("os.environ") for n in chains_stored(s))]


def loaded_by(code: str) -> set[str]:
    """The modules loaded once ``code`` has run in a fresh interpreter."""
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split())


def test_import_rematc_is_light() -> None:
    loaded = loaded_by("import rematc")
    assert "rematc" in loaded
    assert not loaded & {"ortools", "highspy", "torch._inductor"}


def test_the_solver_s_side_loads_without_torch() -> None:
    names = [n for n in SOURCES if within(n, *NO_TORCH) and not n.endswith("__main__")]
    loaded = loaded_by("".join(f"import {n}\n" for n in names))
    assert set(names) <= loaded
    assert "torch" not in loaded
