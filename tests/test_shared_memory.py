"""Memory that tensors share, with each other or with an input, and parameters that are tied: to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from rematc.options import Inner
from tests.cases import (
    ROWS,
    SEVERAL,
    WIDTH,
    Case,
    Results,
    assert_as_without,
    under_the_smallest_budget,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Overwriting(nn.Module):
    """Writes into its input, which is no leaf, between reads of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x.exp()))
        x.mul_(0.5).add_(h.sin() if x.requires_grad else h.detach().sin())
        return F.gelu(self.down(x.exp() + h)).square().mean()


def of_a_leaf(run: Callable[..., Any], inputs: Results) -> Results:
    """The compiled model is given what was computed of a leaf, and what it leaves there is read, too."""
    x = inputs[0].cos()
    return run(x) + x.square().mean(), x


def of_memory_without_gradient(run: Callable[..., Any], inputs: Results) -> Results:
    return run(*inputs), inputs[0]


class Tied(nn.Module):
    """A table that is the last matrix, too, and a layer that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for _ in range(3):
            x = x + F.gelu(self.layer(F.gelu(x)))
        return F.cross_entropy(self.head(x.tanh()), words)


class Adapted(nn.Module):
    """Frozen layers with small ones beside them that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = F.gelu(frozen(x) + up(down(x)))
        return x.square().mean()


class Sharing(nn.Module):
    """Returns views of its input, and of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Results:
        h = F.gelu(self.down(F.gelu(self.up(x))))
        out = h.sin()
        loss = F.gelu(out).square().mean()
        return loss, x, x.view(-1), x[::2].t(), h, h[:3], h.view(-1), out.detach(), out.chunk(2)[1]


def leaf() -> Results:
    return (torch.randn(ROWS, WIDTH, requires_grad=True),)


def words() -> Results:
    return (torch.randint(0, 16, (ROWS,)),)


SHARED = {
    "an input that is overwritten": Case(Overwriting, "aten.gelu", step=of_memory_without_gradient),
    "tied": Case(Tied, "aten.embedding", words),
    "frozen": Case(Adapted, "aten.gelu"),
    "results that share memory": Case(Sharing, "aten.gelu"),
    "results that share a leaf's memory": Case(Sharing, "aten.gelu", leaf),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_shares_memory_has_the_same_bits_and_is_within_the_budget(name: str, inner: Inner) -> None:
    assert_as_without(SHARED[name], inner)


# What AOTAutograd writes into such an input it writes after the forward graph, which does not know of it.
def test_an_input_with_a_gradient_that_is_overwritten_is_recomputed_from_as_it_was() -> None:
    handed_bytes = 4 * ROWS * WIDTH
    assert_as_without(Case(Overwriting, "aten.gelu", leaf, of_a_leaf, SEVERAL, handed_bytes))


@pytest.mark.parametrize("inputs", [leaf, lambda: (torch.randn(ROWS, WIDTH),)], ids=["leaf", "no gradient"])
def test_results_share_the_memory_that_they_share_without_rematc(inputs: Callable[[], Results]) -> None:
    def shares(backend: Any) -> list[list[bool]]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        model, (x,) = Sharing(), inputs()
        found = [x, *torch.compile(model, backend=backend)(x)]
        return [
            [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in found] for b in found
        ]

    _, backend = under_the_smallest_budget(Case(Sharing, "", inputs))
    assert shares(rematc.Backend(backend.options)) == shares("aot_eager")
