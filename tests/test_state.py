"""State that forward reads and changes: as without rematc, to the bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from tests.cases import (
    SEVERAL,
    WIDTH,
    Case,
    Results,
    Trained,
    assert_as_without,
    under_the_smallest_budget,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Ended(nn.Module):
    """``body``, and a loss."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def layers(between: Callable[[], nn.Module], linear: Callable[[nn.Module], nn.Module] = lambda m: m) -> Ended:
    return Ended(*(m for _ in range(3) for m in (linear(nn.Linear(WIDTH, WIDTH)), nn.GELU(), between())))


def norms() -> nn.Module:
    return Ended(
        *(m for _ in range(2) for m in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Sigmoid()))
    )


def images() -> Results:
    return (torch.randn(4, 4, 16, 16), torch.randn(4, 4, 16, 16))


def both_then_backward(run: Callable[..., Any], inputs: Results) -> Results:
    """Two calls of the compiled model, and one backward pass through both."""
    first, second = (run(x) for x in inputs)
    return (first + second.sin(), first, second)


class Both(nn.Module):
    """The same model twice, in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.model = norms()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(x) + self.model(y).sin()


class Cumulative(nn.Module):
    """Statistics that are means over all batches: torch reads their number, and breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(F.gelu(self.up(x)).tanh()))
        return F.gelu(F.gelu(self.down(x)).tanh()).square().mean()


class Observed(nn.Module):
    """An observer, and the fake quantization that reads what it has just seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(1))
        self.register_buffer("high", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.low.copy_(torch.minimum(self.low, x.min()))
            self.high.copy_(torch.maximum(self.high, x.max()))
        scale, zero = (self.high - self.low) / 255, torch.zeros(1, dtype=torch.int)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, -128, 127)


class Averaged(nn.Module):
    """A slow copy of a weight, read before and after it moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slow", self.up.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(F.gelu(self.up(x)), self.slow.clone()))
        with torch.no_grad():
            self.slow.lerp_(self.up.weight, 0.1)
        return F.gelu(self.down(h) + F.linear(h.sin(), self.slow)).square().mean()


class Attention(nn.Module):
    """Keys and values of earlier tokens are in a cache; those of 4 new ones are written into it."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.write, self.qkv, self.out = write, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", torch.randn(8, 12, WIDTH))
        self.register_buffer("values", torch.randn(8, 12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.gelu(x)).sin().chunk(3, -1)
        for cache, new in ((self.keys, k), (self.values, v)):
            self.write(cache, new.detach())
        keys, values = torch.cat([self.keys[:, :8], k], 1), torch.cat([self.values[:, :8], v], 1)
        mixed = (q @ keys.mT).softmax(-1) @ values.tanh()
        return self.out(mixed.exp().sin()).square().mean()


def by_index(cache: Tensor, new: Tensor) -> None:
    cache.index_copy_(1, torch.arange(8, 12), new)


def tokens() -> Results:
    return (torch.randn(8, 4, WIDTH),)


STATE = {
    "batch norm, two calls in a graph": Case(Both, "batch_norm", images),
    "batch norm, two calls of a graph": Case(norms, "batch_norm", images, both_then_backward, SEVERAL),
    "batch norm, mean of all batches": Case(Cumulative, "aten.", steps=SEVERAL),
    "spectral norm": Case(lambda: layers(nn.GELU, spectral_norm), "aten.mv"),
    "observer": Case(lambda: layers(Observed), "fake_quantize"),
    "average of a weight": Case(Averaged, "aten.mm"),
    "cache by index": Case(lambda: Attention(by_index), "aten.index_copy", tokens),
}


SHORTEST, LONGEST = "batch norm, mean of all batches", "spectral norm"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == LONGEST else ()) for name in STATE]
)
def test_state_changes_once_and_what_is_recomputed_reads_it_as_it_was(name: str) -> None:
    assert_as_without(STATE[name])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == SHORTEST else pytest.mark.slow) for name in STATE]
)
def test_under_inductor_state_changes_once_and_what_its_code_keeps_is_counted(name: str) -> None:
    assert_as_without(STATE[name], "inductor")


class Written(nn.Module):
    """A few of many rows are overwritten, by slice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.randn(2, 64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        new = F.gelu(F.gelu(self.up(x)).tanh())
        self.cache[:, :4] = new.detach()
        return F.gelu(new * self.cache[:, 4:8].sin()).square().mean()


# aten.copy into a slice copies all of the memory that the slice lies in; its fake tensor has less.
def test_a_cache_that_is_written_by_slice_is_within_the_budget() -> None:
    assert_as_without(Case(Written, "aten.gelu", lambda: (torch.randn(2, 4, WIDTH),)))


def fake_quantized() -> nn.Module:
    made = {"observer": MovingAverageMinMaxObserver, "quant_min": 0, "quant_max": 255}
    return layers(lambda: FusedMovingAvgObsFakeQuantize(**made))


def test_torch_s_own_fake_quantization_where_dynamo_is_told_to_look_into_it() -> None:
    with torch._dynamo.config.patch(dont_skip_tracing=True):
        assert_as_without(Case(fake_quantized, "fused_moving_avg_obs_fq"))


# Dynamo does not look into torch.ao, and where a module of an nn.Sequential breaks the graph torch runs the
# whole nn.Sequential eagerly: what is compiled is the loss alone.
def test_an_nn_sequential_that_torch_does_not_compile_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(fake_quantized, "")
    with caplog.at_level(logging.WARNING, "rematc"):
        ours, backend = under_the_smallest_budget(case)
        measured = backend.resident_bytes + ours.peak_bytes()
    said = "what a step trains before its first compiled graph runs eagerly" in caplog.text
    assert said is (measured > backend.options.budget)
    theirs = Trained(case, "aot_eager")
    for mine, other in zip(ours.states, theirs.states, strict=True):
        assert all(map(torch.equal, mine, other))
