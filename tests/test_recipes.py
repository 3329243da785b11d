"""The recipes of docs/recipes.md, each run as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend

import rematc
from rematc.backend import backend as backend_of
from rematc.measure import measure
from rematc.options import parse_budget
from tests.small import same_bits

DOCS = Path(__file__).parent.parent / "docs"
RECIPES: dict[str, str] = dict(
    re.findall(r"^## (.+?)\n.*?^```python\n(.+?)^```", (DOCS / "recipes.md").read_text(), flags=re.M | re.S)
)

# That no graph reads: a data set; a whole number that is there once the division by it was compiled.
BESIDE_BYTES = {"Lightning": 512 * 32 * 4, "Gradients that accumulate": 8}

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Of torch's pytree, as Lightning calls it.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]


class Reference:
    """In a backend's place: AOTAutograd alone, and what recipes print."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.plans, self.resident_bytes = [SimpleNamespace(peak_bytes=0)], 0

    def __call__(self, gm: Any, inputs: Any) -> Any:
        return lookup_backend("aot_eager")(gm, inputs)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[rematc.Backend]:
    """The backends that a recipe makes."""
    monkeypatch.chdir(tmp_path)
    return noted(monkeypatch)


def noted(monkeypatch: pytest.MonkeyPatch, budget_bytes: int | None = None) -> list[rematc.Backend]:
    """Backends that are made from now on, with this budget in place of their own."""
    found = list[rematc.Backend]()

    def make(budget: Any, **kwargs: Any) -> rematc.Backend:
        found.append(backend_of(budget_bytes or budget, **kwargs))
        return found[-1]

    monkeypatch.setattr(rematc, "backend", make)
    return found


def follow(name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run it; returns its names."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = ModuleType("recipe")  # the oldest torch looks for it
    monkeypatch.setitem(sys.modules, "recipe", module)
    exec(compile(code, name, "exec"), module.__dict__)
    return vars(module)


def trained(names: dict[str, Any]) -> list[Tensor]:
    """What the recipe's model has learned, and its gradients."""
    model = names["module" if "module" in names else "model"]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.clone() for t in (*model.state_dict().values(), *grads)]


def step_of(model: Any) -> None:
    model(torch.randn(256, 32)).square().mean().backward()


def least(name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The smallest budget that all of its steps keep."""
    budget_bytes = 1
    for _ in range(5):  # a later step may need more than the first
        noted(monkeypatch, budget_bytes)
        try:
            follow(name, code, monkeypatch)
        except rematc.BudgetError as e:
            budget_bytes = e.minimum_bytes
        else:
            return budget_bytes
    raise AssertionError(f"{name} has no smallest budget")


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


LONG = "Hugging Face Trainer"  # makes a trainer for each budget that is tried
AT_THE_SMALLEST = [
    pytest.param(name, code, id=name, marks=pytest.mark.slow if name == LONG else ())
    for name, code in RECIPES.items()
]


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(("name", "code"), AT_THE_SMALLEST)
def test_at_the_smallest_budget_it_learns_what_it_does_without_one_and_takes_no_more(
    name: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget_bytes = least(name, code, monkeypatch)
    monkeypatch.setattr(rematc, "backend", Reference)
    expected = trained(follow(name, code, monkeypatch))
    made = noted(monkeypatch, budget_bytes)
    names = follow(name, code, monkeypatch)
    assert same_bits(trained(names), expected)
    plans = made[0].plans
    assert sum(plan.cost_ns for plan in plans) > 0 and max(plan.peak_bytes for plan in plans) <= budget_bytes
    if name == "Blocks, compiled one by one":  # of which the first step may take more
        peak = made[0].resident_bytes + measure(lambda: step_of(names["model"])).peak_bytes
    else:  # the whole recipe, with a model, an optimizer and data that are made in it
        peak = measure(lambda: follow(name, code, monkeypatch)).peak_bytes - BESIDE_BYTES.get(name, 0)
    assert peak <= budget_bytes


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
