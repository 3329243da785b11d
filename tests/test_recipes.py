"""The recipes of docs/recipes.md, each run as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rematc
from rematc.options import parse_budget

DOCS = Path(__file__).parent.parent / "docs"
RECIPES: dict[str, str] = dict(
    re.findall(r"^## (.+?)\n.*?^```python\n(.+?)^```", (DOCS / "recipes.md").read_text(), flags=re.M | re.S)
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Of torch's pytree, as Lightning calls it.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[rematc.Backend]:
    """The backends that a recipe makes."""
    found, make = list[rematc.Backend](), rematc.backend

    def noted(*args: Any, **kwargs: Any) -> rematc.Backend:
        found.append(make(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(rematc, "backend", noted)
    monkeypatch.chdir(tmp_path)
    return found


def follow(name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("recipe")  # the oldest torch looks for it
    monkeypatch.setitem(sys.modules, "recipe", module)
    exec(compile(code, name, "exec"), module.__dict__)


@pytest.mark.parametrize(("name", "code"), RECIPES.items(), ids=RECIPES)
def test_the_recipe_runs_and_is_planned_within_its_budget(
    name: str, code: str, made: list[rematc.Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(name, code, monkeypatch)
    for backend in made:
        budget = parse_budget(backend.options.budget, None)
        assert budget is not None and backend.plans, "nothing was planned"
        assert backend.resident_bytes < max(plan.peak_bytes for plan in backend.plans) <= budget
    assert made


SWITCHES = [
    ("model.compile(", "model.activation_checkpointing_enable()\nmodel.compile("),
    ("TrainingArguments(\n", "TrainingArguments(gradient_checkpointing=True,\n"),
]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("switch", SWITCHES, ids=["the model", "the trainer"])
def test_who_switches_on_gradient_checkpointing_too_is_told(
    switch: tuple[str, str],
    made: list[rematc.Backend],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    code = RECIPES["Hugging Face Trainer"]
    switched = code.replace(*switch)
    assert switched != code
    follow("Hugging Face Trainer", switched, monkeypatch)
    assert "the model has regions under torch.utils.checkpoint (gradient_checkpointing" in caplog.text
    assert made[0].plans


def test_there_is_a_recipe_for_each_framework() -> None:
    assert {"A plain loop", "Hugging Face Trainer", "Accelerate", "Lightning"} <= RECIPES.keys()
    assert "Blocks, compiled one by one" in RECIPES
