"""State that forward reads and changes, and memory that tensors share: as without rematc, to the bit."""

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

import rematc
from rematc.options import Inner
from tests.cases import (
    ROWS,
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
        return self.out((q @ keys.mT).softmax(-1) @ values.tanh()).square().mean()


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


@pytest.mark.parametrize("name", STATE)
def test_state_changes_once_and_what_is_recomputed_reads_it_as_it_was(name: str) -> None:
    assert_as_without(STATE[name])


LAID_OUT_ANEW = "batch norm, two calls of a graph"  # Inductor keeps a copy of the image


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == LAID_OUT_ANEW else pytest.mark.slow) for name in STATE]
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


# Memory that is shared


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
