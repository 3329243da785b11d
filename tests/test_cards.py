"""Plans for a card that is not here: its data, what they make costs, and `explain --device`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from rematc.cards import cards
from rematc.costs import Prices, Rates, rates_of_card
from rematc.errors import OptionError
from rematc.explain import main
from rematc.options import Options
from rematc.partition import partition
from tests.joints import joint_of
from tests.test_costs import leaf, ops_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("name", cards())
def test_a_card_has_rates_in_the_order_that_physics_has_them(name: str) -> None:
    card = cards()[name]
    rates = rates_of_card(card)
    assert card.memory_bytes > 1e9
    assert 0.1e12 < rates.gather < rates.stream < card.bytes_per_s < 1e13
    assert rates.matmul < card.flops["float32"] <= card.flops["tf32"] < card.flops["bfloat16"]
    assert rates.times(torch.bfloat16) > 1 == rates.times(torch.float64)


def test_products_in_tf32_are_faster_where_torch_may_use_them() -> None:
    slow = rates_of_card(cards()["h100"])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert rates_of_card(cards()["h100"]).matmul == pytest.approx(slow.matmul * 494 / 67)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_plan_for_a_card_says_so_and_knows_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematc.costs.table.timings", pytest.fail)  # nothing is measured here
    joint, outputs = joint_of(lambda x, w: (x @ w).relu().sum(), leaf(64, 64), leaf(64, 64))
    done = partition(joint, outputs, Options("50%", "eager", costs="rtx4090"))
    assert done.plan.budget_bytes == 12_000_000_000
    assert any("GeForce RTX 4090" in note for note in done.plan.notes)
    assert all(size % 512 == 0 for size in done.problem.graph.storage_bytes)


@pytest.mark.parametrize(("costs", "copied"), [("roofline", 60), ("h100", 512)])
def test_copies_of_gradients_are_rounded_up_on_a_card(costs: str, copied: int) -> None:
    """The gradient of the transposed weight is transposed, and copied in the parameter's strides."""
    joint, outputs = joint_of(lambda w: w.t().contiguous().sin().sum(), leaf(3, 5))
    problem = partition(joint, outputs, Options(None, "eager", costs=costs)).problem
    assert problem.epilogue_bytes == copied


@pytest.mark.parametrize(("costs", "ops"), [("h100", 1), ("roofline", 0)])
def test_dropout_is_one_op_on_a_card_wherever_it_is_traced(costs: str, ops: int) -> None:
    joint, outputs = joint_of(lambda x: F.dropout(x.exp()).sum(), leaf(64, 64))
    graph = partition(joint, outputs, Options(None, "eager", costs=costs)).problem.graph
    assert [op.target for op in graph.ops].count("aten.native_dropout.default") == ops


@pytest.mark.parametrize("spelling", ["H100", "h-100", "NVIDIA H100"])
def test_cards_have_names_in_any_spelling(spelling: str) -> None:
    assert Options(None, costs=spelling).costs == spelling


def test_a_card_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(OptionError, match=r"no card is called 'b300': give h200, h100"):
        Options(None, costs="b300")


def test_a_product_in_another_dtype_is_as_much_faster() -> None:
    single, half = (
        ops_of(lambda a: (a @ a).sum(), leaf(512, 512, dtype=d)) for d in (torch.float32, torch.bfloat16)
    )
    prices = Prices(Rates(1e13, 1e13, 1e13, 1e13, 1e13, 1e13, 1e9, 1e9, 1e9, 0, {"bfloat16": 4.0}))
    mm = [next(n for n in nodes if "aten.mm." in str(n.target)) for nodes in (single, half)]
    assert prices.of(mm[0]).runtime_ns == pytest.approx(4 * prices.of(mm[1]).runtime_ns)


# explain --device

MODEL = """
import torch
from torch import nn

def build():
    body = [layer for _ in range(4) for layer in (nn.Linear(40_000, 40_000, bias=False), nn.Tanh())]
    model = nn.Sequential(*body).to(torch.bfloat16)
    return model, torch.randn(16_384, 40_000, dtype=torch.bfloat16), lambda y: y.float().mean()

def reads():
    model = nn.Linear(4, 4)
    if model.weight.sum().item() > 0:
        print("positive")
    return model, torch.ones(4, 4), torch.sum
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_model_larger_than_this_machine_is_planned_for_a_card(
    inner: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(file), "--device", "h100", "--inner", inner]
    assert main([*given, "--budget", "50%"]) == 0
    out = capsys.readouterr().out
    assert "6,400,000,000 parameters on an NVIDIA H100 SXM that is not here" in out
    assert re.search(r"budget +40\.00 GB", out) and "data sheet" in " ".join(out.split())
    assert main([*given, "--budget", "26GB"]) == 3
    assert "does not fit" in capsys.readouterr().err


def test_what_can_t_be_built_without_memory_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{file}:reads", "--device", "h100", "--inner", "eager"]) == 2
    err = capsys.readouterr().err
    assert "model.weight.sum().item()" in err and "With --device tensors have no memory" in err
    assert main([f"{file}:reads", "--inner", "eager"]) == 0


def test_a_card_that_is_not_known(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "--device", "b300"]) == 2
    assert "h200, h100" in capsys.readouterr().err
