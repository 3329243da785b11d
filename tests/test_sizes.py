"""Sizes that vary, found out by torch or marked: each has a plan of its own, which keeps the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from rematc.measure import measure_each
from rematc.options import Inner
from tests import small
from tests.test_graphs import Around, Situation, assert_kept, broken, compiled, half, rows_of

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
SMALL, LARGE, MIDDLE = 64, 256, 128  # of those the large one alone needs recomputation
SIZES = (SMALL, LARGE, MIDDLE)
Mark = Callable[[Tensor], object]


def sized(*shape: int) -> Situation:
    return lambda _: rows_of(*shape)


def marked(mark: Mark, *shape: int) -> Situation:
    """The batch is made, and marked, anew in each step."""

    def set_up(_: Around) -> Tensor:
        x = rows_of(*shape)
        mark(x)
        return x

    return set_up


def batch(x: Tensor) -> None:
    torch._dynamo.mark_dynamic(x, 0)


def bounded(x: Tensor) -> None:
    torch._dynamo.mark_dynamic(x, 0, min=2, max=1024)


def perhaps(x: Tensor) -> None:
    torch._dynamo.maybe_mark_dynamic(x, 0)


def sequence(x: Tensor) -> None:
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_static(x, 0)


WAYS: dict[str, tuple[Callable[[int], Situation], bool | None]] = {
    "batch, found out": (sized, None),
    "sequence, found out": (lambda length: sized(2, length), None),
    "batch, dynamic": (sized, True),
    "batch, maybe marked": (lambda rows: marked(perhaps, rows), None),
    "batch, marked": (lambda rows: marked(batch, rows), None),
    "sequence, marked": (lambda length: marked(sequence, 2, length), None),
    "batch, marked with bounds, dynamic": (lambda rows: marked(bounded, rows), True),
}


QUICK = ("batch, found out", "sequence, found out", "batch, dynamic", "batch, marked")


@pytest.mark.parametrize("way", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WAYS])
def test_a_plan_is_used_for_the_size_that_it_was_made_for_alone(way: str) -> None:
    of, dynamic = WAYS[way]
    sizes = [of(size) for size in SIZES]
    backend = assert_kept(lambda _: Around(torch.sin), sizes, most=of(LARGE), dynamic=dynamic)
    assert [plan.cost_ns > 0 for plan in backend.plans] == [False, True, False]


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(sized, id="found out"),
        pytest.param(lambda rows: marked(batch, rows), id="marked", marks=pytest.mark.slow),
    ],
)
def test_a_broken_graph_of_varying_sizes_keeps_the_budget_too(of: Callable[[int], Situation]) -> None:
    sizes = [of(size) for size in (SMALL, LARGE)]
    backend = assert_kept(lambda _: Around(broken), sizes, share=0.8)
    assert len(backend.plans) == 2 * 3


def test_what_is_not_trained_is_compiled_once_for_all_sizes_that_are_marked() -> None:
    torch._dynamo.utils.counters.clear()
    backend = rematc.backend("1MB", inner="eager")
    model = Around(torch.sin)
    run = compiled(model, backend)
    with torch.no_grad():
        for rows in SIZES:
            run(marked(batch, rows)(model))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not backend.plans


# Of several inputs, and of texts of several lengths in one tensor

Args = tuple[Tensor, ...]


class Reader(nn.Module):
    """Reads one text in the light of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = half(), half()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.second(self.first(x) * y.mean(1, keepdim=True))  # type: ignore[no-any-return]


class Ragged(Reader):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.second(self.first(x).sin()).values()  # type: ignore[no-any-return]


def two_texts(rows: int, length: int, other: int) -> Args:
    x, y = rows_of(rows, length), rows_of(rows, other)
    torch._dynamo.mark_dynamic(x, (0, 1))
    torch._dynamo.mark_dynamic(y, 0, min=1, max=64)
    torch._dynamo.mark_dynamic(y, 1)
    return x, y


def ragged(*lengths: int) -> Args:
    rows = [rows_of(length) for length in lengths]
    return (torch.nested.nested_tensor(rows, layout=torch.jagged),)


# What makes a model's inputs, of which shapes in turn, of which shape that does not fit, and the budget.
CASES: dict[str, tuple[type[Reader], Callable[..., Args], list[tuple[int, ...]], tuple[int, ...], int]] = {
    "two texts": (Reader, two_texts, [(2, 64, 16), (4, 64, 32), (2, 64, 16)], (8, 128, 32), 430_000),
    "nested": (Ragged, ragged, [(20, 44, 64), (120, 136), (20, 44, 64)], (600, 400), 430_000),
}


def step_of(model: Reader, run: Callable[..., Tensor], given: Args) -> list[Tensor]:
    """The gradients of a step whose loss is computed outside of the graph, so that it is planned anew."""
    run(*given).exp().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def bytes_of(tensors: Iterable[Tensor]) -> int:
    parts = ([t.values(), t.offsets()] if t.is_nested else [t] for t in tensors)
    return sum(part.nbytes for each in parts for part in each)


def most_taken(model: Reader, run: Callable[..., Tensor], batches: Sequence[Args]) -> int:
    """What a step takes at the most, with what is there before it."""
    steps = measure_each([lambda given=given: partial(step_of, model, run, given) for given in batches])
    there = [bytes_of((*model.parameters(), *given)) for given in batches]
    return max(bytes_there + step.peak_bytes for bytes_there, step in zip(there, steps, strict=True))


@pytest.mark.parametrize(
    ("case", "inner"),
    [
        ("two texts", "eager"),
        pytest.param("two texts", "inductor", marks=pytest.mark.slow),
        ("nested", "eager"),
        pytest.param("nested", "inductor", marks=pytest.mark.slow),
    ],
)
def test_each_size_keeps_the_budget_or_is_refused(case: str, inner: Inner) -> None:
    make, of, shapes, too_large, budget = CASES[case]
    batches = [of(*shape) for _ in range(3) for shape in shapes]

    def trained(backend: Any) -> tuple[Reader, Callable[..., Tensor], list[list[Tensor]]]:
        model = make()
        run = compiled(model, backend)
        return model, run, [step_of(model, run, given) for given in batches]

    expected = trained("aot_eager")[2]
    backend = rematc.backend(budget, inner=inner, costs="roofline", time_limit_s=1.0)
    model, run, found = trained(backend)
    for mine, other in zip(found, expected, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a, b) if inner == "eager" else torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    assert [plan.cost_ns > 0 for plan in backend.plans] == [False, True]
    assert most_taken(model, run, batches) <= budget
    with pytest.raises(rematc.BudgetError):
        run(*of(*too_large))
    assert most_taken(model, run, batches) <= budget


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_batch_size_has_a_plan_of_its_own(dynamic: bool) -> None:
    """Also with dynamic=True: a plan keeps the budget at the sizes that it was made for, no others."""
    model, backend = small.Block(), small.eager("2MB")
    run = torch.compile(model, backend=backend, dynamic=dynamic)
    for rows in (256, 64, 256):
        ours = small.gradients(model, run, rows)
        torch.testing.assert_close(ours, small.gradients(model, model, rows))
    assert len(backend.plans) == 2
    assert backend.plans[0].peak_bytes > backend.plans[1].peak_bytes


def test_views_are_views_of_sizes_that_vary_too() -> None:
    """The sizes that they are told are computed in the graph."""
    backend = small.eager(None)
    weight = torch.ones(8, 8, requires_grad=True)

    def flat(x: Tensor) -> Tensor:
        b, t, d = x.shape
        return (x @ weight).view(b * t, d).sin().view(b, t * d).sum()

    run = torch.compile(flat, backend=backend, dynamic=True)
    run(torch.ones(4, 16, 8)).backward()
    graph = backend.problems[0].graph
    views = [i for i, op in enumerate(graph.ops) if op.target == "aten.view.default"]
    assert any(len(graph.ops[i].inputs) > 1 for i in views) and graph.views.issuperset(views)


def test_a_dynamic_size_that_outgrows_the_budget_is_refused() -> None:
    scale = nn.Parameter(torch.ones(32))
    run = torch.compile(lambda x: (x * scale).sin().exp(), backend=small.eager(200_000), dynamic=True)
    run(small.batch(64)).sum().backward()
    with pytest.raises(rematc.BudgetError):
        run(small.batch(4096))


def test_a_number_that_varies_from_call_to_call() -> None:
    """Dynamo makes it an input of the graph from the second call on; the backward pass reads it too."""
    model, backend = small.Block().eval(), small.eager("2MB")

    def scaled(x: Tensor, k: int) -> Tensor:
        return (model(x) * k).sin()

    run = torch.compile(scaled, backend=backend)
    for k in (3, 5, 7):
        ours = small.gradients(model, lambda x, k=k: run(x, k))  # type: ignore[misc]
        torch.testing.assert_close(ours, small.gradients(model, lambda x, k=k: scaled(x, k)))  # type: ignore[misc]
    assert len(backend.plans) == 2


def test_the_last_version_that_torch_compiles_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """For inputs of yet another size it runs the model eagerly."""
    model, backend = nn.Linear(4, 4), small.eager("1MB")
    run = torch.compile(lambda x: model(x).sum(), backend=backend)
    said = []
    with torch._dynamo.config.patch(recompile_limit=3):
        for rows in range(2, 6):
            run(torch.ones(rows, 4)).backward()
            said.append("no budget is kept" in caplog.text)
    assert said == [False, False, True, True]
    assert len(backend.plans) == 3
    assert sum("no budget is kept" in message for message in caplog.messages) == 1
