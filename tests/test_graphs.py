"""What Dynamo makes of a model that is not one graph of fixed sizes: within the budget, and the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from rematc.measure import measure_each

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
WIDTH, ROWS, SEED = 32, 256, 3
Middle = Callable[[Tensor], Tensor]


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())


class Around(nn.Module):
    """Two small nets, and between them what a test is about."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.first, self.second, self.drop = half(), half(), nn.Dropout(0.2)
        self.middle, self.drops, self.flag = middle, False, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x))
        if self.flag:
            x = x.sin().exp()
        x = self.drop(x) if self.drops else x
        return self.second(x).square().mean()


Situation = Callable[[Around], Tensor]  # changes the model, perhaps, and returns the batch of a step
Make = Callable[[Any], Around]  # from what is to compile it


def rows_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    make = torch.Generator().manual_seed(SEED)
    return torch.randn(*shape, WIDTH, generator=make).to(dtype)


def plain(_: Around) -> Tensor:
    return rows_of(ROWS)


def compiled(model: Callable[..., Any], backend: Any, **how: Any) -> Callable[..., Any]:
    """``model`` as if nothing was compiled before."""
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, **how)


def eager(budget: Any, **how: Any) -> rematc.Backend:
    return rematc.backend(budget, inner="eager", costs="roofline", time_limit_s=1.0, **how)


def step_of(model: Around, run: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """The loss and the gradients of one step."""
    torch.manual_seed(SEED)
    loss = run(x)
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def by_turns(
    model: Around, run: Callable[..., Any], situations: Sequence[Situation], rounds: int = 3
) -> list[Tensor]:
    """The numbers of three steps in each of ``situations``."""
    return [t for _ in range(rounds) for set_up in situations for t in step_of(model, run, set_up(model))]


def peaks(model: Around, run: Callable[..., Any], situations: Sequence[Situation]) -> list[int]:
    """What a step takes in each of ``situations``, parameters and batch included."""
    there: list[int] = []

    def prepared(set_up: Situation) -> Callable[[], object]:
        x = set_up(model)
        there.append(sum(t.numel() * t.element_size() for t in (*model.parameters(), x)))

        def step() -> None:
            run(x).backward()
            model.zero_grad()

        return step

    steps = measure_each([partial(prepared, set_up) for set_up in situations])
    return [bytes_there + step.peak_bytes for bytes_there, step in zip(there, steps, strict=True)]


def unlimited(make: Make, situation: Situation, rounds: int = 3, **how: Any) -> int:
    """What is predicted where nothing is recomputed."""
    backend = eager("1GB")
    model = make(backend)
    by_turns(model, compiled(model, backend, **how), (situation,), rounds)
    assert sum(plan.cost_ns for plan in backend.plans) == 0
    return max(plan.peak_bytes for plan in backend.plans)


def assert_kept(
    make: Make,
    situations: Sequence[Situation] = (plain,),
    share: float = 0.75,
    most: Situation = plain,
    rounds: int = 3,
    **how: Any,
) -> rematc.Backend:
    """At ``share`` of what ``most`` takes there is recomputation, to the same bits, within the budget."""
    budget = int(share * unlimited(make, most, rounds, **how))
    model = make("aot_eager")
    expected = by_turns(model, compiled(model, "aot_eager", **how), situations, rounds=1)
    backend = eager(budget)
    model = make(backend)
    run = compiled(model, backend, **how)
    found = by_turns(model, run, situations, rounds)
    assert len(expected) > len(situations)
    assert all(torch.equal(a, b) for a, b in zip(found, rounds * expected, strict=True))
    assert sum(plan.cost_ns for plan in backend.plans) > 0
    assert max(plan.peak_bytes for plan in backend.plans) <= budget
    assert max(peaks(model, run, (*situations, *situations))) <= budget
    return backend


# Several graphs


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.sin()


def broken_often(x: Tensor) -> Tensor:
    x = x.sin().exp()
    torch._dynamo.graph_break()
    x = x.tanh()
    torch._dynamo.graph_break()
    return x.cos()


def printed(x: Tensor) -> Tensor:
    print(end="")
    return x.sin()


def asked(x: Tensor) -> Tensor:
    return x.sin() if x.sum().item() > -(10**9) else x.cos()


def some_rows(x: Tensor) -> Tensor:
    return x + x[x.sum(1) > 0].exp().mean(0)


def places(x: Tensor) -> Tensor:
    return x * (x > 0).nonzero().float().mean()


@pytest.mark.parametrize(
    ("middle", "graphs"),
    [(broken, 3), (broken_often, 4), (printed, 3), (asked, 3), (some_rows, 3), (places, 3)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_parts_of_a_broken_graph_share_the_budget(middle: Middle, graphs: int) -> None:
    """In a loop a break would leave the whole function to eager PyTorch, so these have none."""
    backend = assert_kept(lambda _: Around(middle), share=0.8)
    assert len(backend.plans) >= graphs


# Compiled anew


def flag(value: bool) -> Situation:
    def set_up(model: Around) -> Tensor:
        model.flag = value
        return rows_of(ROWS)

    return set_up


def mode(is_training: bool) -> Situation:
    def set_up(model: Around) -> Tensor:
        model.drops = True
        model.train(is_training)
        return rows_of(ROWS)

    return set_up


def typed(dtype: torch.dtype) -> Situation:
    def set_up(model: Around) -> Tensor:
        model.to(dtype)
        return rows_of(ROWS, dtype=dtype)

    return set_up


CHANGES = {
    "a flag": (flag(False), flag(True)),
    "train and eval": (mode(False), mode(True)),
    "a dtype": (typed(torch.bfloat16), typed(torch.float64)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_compiled_anew_is_planned_anew(change: str) -> None:
    """And what was planned for smaller values is not used for larger ones."""
    situations = CHANGES[change]
    backend = assert_kept(lambda _: Around(torch.sin), situations, most=situations[-1])
    assert [plan.cost_ns > 0 for plan in backend.plans] == [change != "a dtype", True]


# Compiled in what is compiled


def wavy(x: Tensor) -> Tensor:
    return x.sin().exp()


@pytest.mark.parametrize("inside", ["aot_eager", "of its own"])
def test_what_was_compiled_by_itself_is_part_of_the_graph_that_calls_it(inside: str) -> None:
    backend = eager("1GB") if inside == "of its own" else inside
    found = assert_kept(lambda _: Around(torch.compile(wavy, backend=backend)))
    assert len(found.plans) == 1
    assert {"aten.sin.default", "aten.exp.default"} <= {op.target for op in found.problems[0].graph.ops}


def with_a_part_compiled_by_itself(backend: Any) -> Around:
    """Dynamo does not look into what calls it."""
    model = Around(torch.sin)
    part = half()
    model.add_module("part", part)
    run = torch.compile(lambda x: part(x), backend=backend)

    def called(x: Tensor) -> Tensor:
        out: Tensor = run(x)
        return out

    model.middle = torch._dynamo.disable(called, recursive=False)
    return model


@pytest.mark.parametrize("inside", ["the same", "aot_eager"])
def test_a_part_that_eager_code_calls_is_of_the_step_whatever_compiled_it(inside: str) -> None:
    """By the same backend it shares the budget, by another it is found to lie outside, in the third step."""

    def make(backend: Any) -> Around:
        return with_a_part_compiled_by_itself(backend if inside == "the same" else inside)

    backend = assert_kept(make, share=0.8, rounds=5)
    assert len(backend.plans) == (3 if inside == "the same" else 2)


def test_what_another_backend_compiles_around_it_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """The outer backend gets all of it, so rematc is not asked, and no budget is kept."""
    mine = eager("5MB")
    model = Around(torch.compile(wavy, backend=mine))
    step_of(model, compiled(model, "aot_eager"), plain(model))
    assert mine.plans == []
    del mine, model
    torch._dynamo.reset()
    gc.collect()
    assert "nothing was compiled by rematc.backend(budget='5MB')" in caplog.text
