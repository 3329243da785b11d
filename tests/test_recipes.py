"""The recipes of docs/recipes.md, each run as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"
RECIPES = re.findall(
    r"^## (.+?)\n.*?^```python\n(.+?)^```", (DOCS / "recipes.md").read_text(), flags=re.M | re.S
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Of torch's pytree, as Lightning calls it.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]


@pytest.mark.parametrize(("name", "code"), RECIPES, ids=[name for name, _ in RECIPES])
def test_the_recipe_runs_and_its_budget_is_planned_for(
    name: str,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("recipe")  # the oldest torch looks for it
    monkeypatch.setitem(sys.modules, "recipe", module)
    exec(compile(code, name, "exec"), module.__dict__)
    if "print(" in code:
        printed = [line for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"[\d ]+", line)]
        assert printed, "nothing was planned"


def test_there_is_a_recipe_for_each_framework() -> None:
    assert {"A plain loop", "Hugging Face Trainer", "Accelerate", "Lightning"} <= {
        name for name, _ in RECIPES
    }
