"""Random numbers: each is drawn once, and whatever is recomputed around it, the bits are the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from rematc.baselines import recompute_all
from tests.cases import ROWS, SEVERAL, WIDTH, Case, Trained, assert_as_without

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Noisy(nn.Module):
    """Two layers, each with noise in its midst."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(self.noise(F.gelu(layer(x)))).tanh()
        return x.square().mean()


def attended(x: Tensor) -> Tensor:
    q = x.view(4, ROWS // 4, 2, WIDTH // 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q.sin(), q.cos(), q, dropout_p=0.2).transpose(1, 2).reshape(x.shape)


def chosen(x: Tensor) -> Tensor:
    rows: Tensor = x[torch.multinomial(x.detach().abs().sum(1) + 1, ROWS, replacement=True)]
    return x + rows


NOISE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dropout": (lambda x: F.dropout(x, 0.3), "native_dropout"),
    "dropout, a module": (nn.Dropout(0.3), "native_dropout"),
    "dropout of channels": (
        lambda x: F.dropout2d(x.view(4, -1, WIDTH, 1), 0.3).view(ROWS, WIDTH),
        "bernoulli",
    ),
    "alpha dropout": (nn.AlphaDropout(0.3), "bernoulli"),
    "dropout in attention": (attended, "native_dropout"),
    "rrelu": (nn.RReLU(), "rrelu"),
    "bernoulli": (lambda x: x * torch.bernoulli(x.sigmoid()), "bernoulli"),
    "rand": (lambda x: x * torch.rand(ROWS, 1), "rand"),
    "randn_like": (lambda x: x + 0.1 * torch.randn_like(x), "randn"),
    "normal in place": (lambda x: x * torch.empty_like(x).normal_(1, 0.1), "normal"),
    "randint": (lambda x: x * torch.randint(1, 3, (ROWS, 1)), "randint"),
    "randperm": (lambda x: x + x[torch.randperm(ROWS)], "randperm"),
    "multinomial": (chosen, "multinomial"),
    "gumbel_softmax": (lambda x: x * F.gumbel_softmax(x, hard=True), "exponential"),
}
LONGEST = ("dropout in attention", "gumbel_softmax")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LONGEST else ()) for name in NOISE],
)
def test_random_numbers_are_drawn_once_and_the_generator_moves_on_as_ever(name: str) -> None:
    noise, op = NOISE[name]
    assert_as_without(Case(lambda: Noisy(noise), op))


def as_inductor_alone(noise: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Whatever can be is recomputed; returns what is."""
    monkeypatch.setattr("rematc.partition.unlimited", lambda problem, _: recompute_all(problem))
    case = Case(lambda: Noisy(noise), "")
    backend = rematc.backend(None, costs="roofline")
    ours, theirs = Trained(case, backend), Trained(case, "inductor")
    for mine, its in zip(ours.states, theirs.states, strict=True):
        assert torch.equal(mine[-1], its[-1])
        for a, b in zip(mine, its, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    (problem,), (plan,) = backend.problems, backend.plans
    again = (problem.graph.ops[i] for i in plan.backward)
    return {op.target for op in again if op.phase == "forward"}


def test_under_inductor_they_are_drawn_again_from_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays is not kept: Inductor draws it in the kernel that it is for."""
    assert "prims.inductor_random.default" in as_inductor_alone(nn.Dropout(0.3), monkeypatch)


EACH = [name for name in NOISE if name != "randperm"]  # Inductor alone fails to compile an index of it


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_under_inductor_they_are_those_that_inductor_draws(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert as_inductor_alone(NOISE[name][0], monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "draw",
    [F.dropout, torch.rand_like, torch.bernoulli, attended, chosen, partial(F.gumbel_softmax, hard=True)],
)
def test_the_generator_of_a_gpu_moves_on_as_ever(draw: Callable[..., Tensor]) -> None:
    def state_after(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = Noisy(lambda x: x * draw(x.sigmoid())).cuda()
        run = torch.compile(model, backend=backend)
        run(torch.randn(ROWS, WIDTH, device="cuda")).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [*grads, torch.cuda.get_rng_state()]

    with pytest.raises(rematc.BudgetError) as refused:
        state_after(rematc.backend(1, inner="eager", costs="roofline", time_limit_s=0.5))
    least = refused.value.minimum_bytes
    del refused  # and the frames that it came through, with a model on the GPU
    gc.collect()
    ours = state_after(rematc.backend(least, inner="eager", costs="roofline", time_limit_s=0.5))
    assert all(map(torch.equal, ours, state_after("aot_eager")))


class Twice(nn.Module):
    """The same noise on the same values, two times: it is not the same."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.noise = nn.Linear(WIDTH, WIDTH), noise

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.layer(x))
        first, second = self.noise(x), self.noise(x)
        return (first.tanh() - 2 * second.tanh()).square().mean()


AGAIN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    **NOISE,
    "randint_like": (lambda x: x * torch.randint_like(x, 1, 3), "randint"),
    "normal of tensors": (lambda x: x + torch.normal(x.detach(), 0.1), "normal"),
    "log-normal": (lambda x: x * torch.empty_like(x).log_normal_(), "log_normal"),
    "uniform": (lambda x: x * torch.empty_like(x).uniform_(), "uniform"),
    "cauchy": (lambda x: x * torch.empty_like(x).cauchy_().tanh(), "cauchy"),
    "geometric": (lambda x: x * torch.empty_like(x).geometric_(0.5), "geometric"),
    "poisson": (lambda x: x * torch.poisson(x.detach().abs()), "poisson"),
    "binomial": (lambda x: x * torch.binomial(x.detach().abs().ceil(), x.detach().sigmoid()), "binomial"),
}


@pytest.mark.parametrize("name", AGAIN)
def test_ops_that_look_the_same_draw_numbers_of_their_own(name: str) -> None:
    noise, op = AGAIN[name]
    case = Case(lambda: Twice(noise), op)
    ours = Trained(case, rematc.backend("1GB", inner="eager"))
    theirs = Trained(case, "eager")  # `aot_eager` has them draw the same numbers
    for mine, its in zip(ours.states, theirs.states, strict=True):
        assert all(map(torch.equal, mine, its))


class Halves(nn.Module):
    """Two halves, with noise between them; a generator of its own."""

    def __init__(self, noise: Callable[[Tensor, torch.Generator], Tensor]) -> None:
        super().__init__()
        halves = ([m for _ in range(2) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())] for _ in range(2))
        self.first, self.second = (nn.Sequential(*half) for half in halves)
        self.noise, self.generators = noise, [torch.Generator().manual_seed(5)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.noise(self.first(x).tanh(), self.generators[0])
        return self.second(x).tanh().square().mean()


def forked(x: Tensor, _: torch.Generator) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return F.dropout(x, 0.3)


def seeded_anew(x: Tensor, _: torch.Generator) -> Tensor:
    torch.manual_seed(7)
    return F.dropout(x, 0.3)


BREAKING: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "rand of a generator": lambda x, own: x * torch.rand(x.shape, generator=own),
    "fork_rng": forked,
    "manual_seed": seeded_anew,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "fork_rng" else pytest.mark.slow) for name in BREAKING]
)
def test_what_breaks_the_graph_runs_eagerly_between_parts_that_keep_the_budget(name: str) -> None:
    """Torch does not trace generators: it computes eagerly what they make, and what needs that there."""
    assert_as_without(Case(lambda: Halves(BREAKING[name]), "aten.", steps=SEVERAL))


# The graph of such a sum has a backward pass without ops: it hands the gradient on.
def test_a_part_whose_backward_pass_has_no_ops_shares_the_budget() -> None:
    assert_as_without(
        Case(
            lambda: Halves(lambda x, own: x + torch.normal(0.0, 0.1, x.shape, generator=own)),
            "aten.",
            steps=SEVERAL,
        )
    )


def test_a_loop_around_fork_rng_is_not_compiled_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Torch breaks no graph within a loop: it leaves the function to Python."""
    noise = torch.Generator()
    case = Case(lambda: Noisy(lambda x: forked(x, noise)), "")
    backend = rematc.backend(1, inner="eager")
    ours, theirs = Trained(case, backend), Trained(case, "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(ours.states[-1], theirs.states[-1], strict=True))
    assert not backend.plans
    del ours, backend
    torch._dynamo.reset()
    gc.collect()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("rematc")]
    assert len(said) == 1 and said[0].startswith("nothing was compiled by rematc.backend(budget=1)")
