"""Every example in a docstring of rematc and rematc.passes runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def modules() -> list[str]:
    files = [(path.relative_to(ROOT), "") for path in (ROOT / "rematc").rglob("*.py")]
    files += [(path.relative_to(ROOT), "rematc.") for path in (ROOT / "passes").rglob("*.py")]
    names = [prefix + ".".join(path.with_suffix("").parts) for path, prefix in files]
    return sorted(name.removesuffix(".__init__") for name in names if not name.endswith("__main__"))


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_docstrings_hold(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=FLAGS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples, printed above"


def test_passes_are_found_where_they_are_installed() -> None:
    assert {"rematc", "rematc.graph", "rematc.passes"} <= set(modules())
