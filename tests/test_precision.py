"""Dtypes: what is recomputed has that of the forward pass, and its bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rematc.options import Inner
from tests.cases import ROWS, SEVERAL, WIDTH, Case, Results, Trained, assert_as_without, called
from tests.nets import Net, leaf

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
]
INNER = pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)


# Autocast


def cast(half: torch.dtype, run: Callable[..., Any], inputs: Results) -> Results:
    with torch.autocast("cpu", half):
        return called(run, inputs)


@HALVES
def test_autocast_around_the_forward_pass(half: torch.dtype) -> None:
    assert_as_without(Case(Net, "to_copy", leaf, partial(cast, half)))


class Inside(Net):
    """Autocast in the model, and parts of it that are not cast."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.low = half

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.low):
            for layer in self.layers:
                x = F.gelu(layer(x)).sin()
                with torch.autocast("cpu", enabled=False):
                    x = F.linear(x.float(), layer.weight).exp()  # type: ignore[arg-type]
            return x.float().square().mean()


@HALVES
def test_autocast_in_the_model_and_parts_that_are_not_cast(half: torch.dtype) -> None:
    assert_as_without(Case(lambda: Inside(half), "to_copy", leaf))


class Scaled(Net):
    """Its gradients are scaled, by more as long as none is infinite.

    The optimizer makes nothing in its step: that would be above what so small a model is planned for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)  # type: ignore[assignment]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        self.tried = 0


def scaled(half: torch.dtype, t: Trained) -> Results:
    """A step of an optimizer; the second is not taken."""
    assert isinstance(t.model, Scaled)
    scaler, weight = t.model.scaler, t.model.layers[0].weight
    before = weight._version
    with torch.autocast("cpu", half):
        loss = t.run(*t.inputs)
    t.model.tried += 1
    scaler.scale(loss * (torch.inf if t.model.tried == 2 else 1)).backward()
    scaler.step(t.model.optimizer)
    scaler.update()
    assert (weight._version == before) is (t.model.tried == 2)
    return loss, torch.tensor(scaler.get_scale())


@HALVES
@INNER
def test_gradients_that_a_scaler_scales_and_checks(half: torch.dtype, inner: Inner) -> None:
    assert_as_without(Case(Scaled, "to_copy", leaf, steps=SEVERAL, train=partial(scaled, half)), inner)


# Dtypes of parameters and of values


def stepped(t: Trained) -> Results:
    t.run(*t.inputs).backward()
    assert isinstance(t.model, Net)
    t.model.optimizer.step()
    return ()


@HALVES
def test_parameters_in_half_precision_and_what_an_optimizer_makes_of_them(half: torch.dtype) -> None:
    def inputs() -> Results:
        return (torch.randn(ROWS, WIDTH, dtype=half, requires_grad=True),)

    assert_as_without(Case(lambda: Net().to(half), "gelu", inputs, steps=SEVERAL, train=stepped))


def test_parameters_of_several_dtypes() -> None:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            for n, dtype in enumerate((torch.float64, torch.bfloat16)):
                self.layers[n].to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.gelu(layer(x.to(layer.weight.dtype))).sin().exp()  # type: ignore[arg-type]
            return x.float().square().mean()

    assert_as_without(Case(Mixed, "to_copy", leaf))


# Values of few bits, complex ones, integers and booleans


def eighths(kind: torch.dtype, x: Tensor) -> Tensor:
    """Rounded to 8 bits and read in 32; the gradient goes around it."""
    scale = x.detach().abs().amax() / 8
    small = (x / scale).to(kind)
    return x + (small.to(x.dtype) * scale - x).detach().sin()


class Kept(torch.autograd.Function):
    """Its activation is kept for backward in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.to(torch.float8_e5m2))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (small,) = ctx.saved_tensors
        return grad * small.to(grad.dtype).cos()


class Product(torch.autograd.Function):
    """A matrix product of factors in 8 bits, which are kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        one, small, weights = torch.ones(()), *(t.to(torch.float8_e4m3fn) for t in (x, weight))
        ctx.save_for_backward(small, weights)
        return torch._scaled_mm(small, weights.t(), one, one, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        small, weights = (t.to(grad.dtype) for t in ctx.saved_tensors)
        return grad @ weights, grad.t() @ small


class Eighths(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(Product.apply(x, layer.weight) + layer.bias).sin().exp()
        return x.square().mean()


@INNER
def test_products_in_8_bits(inner: Inner) -> None:
    assert_as_without(Case(Eighths, "scaled_mm", leaf), inner)


def in_the_plane(x: Tensor) -> Tensor:
    waves = torch.fft.rfft(x, dim=-1)
    turned = waves * torch.polar(torch.ones(waves.shape[-1]), torch.arange(waves.shape[-1]) / 7)
    return torch.fft.irfft(turned * waves.abs().sigmoid(), n=x.shape[-1], dim=-1)


def as_complex(x: Tensor) -> Tensor:
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * z.conj().exp()).flatten(-2).sin()


def masked(x: Tensor) -> Tensor:
    mask = (x.exp() > 1) & (x.sin() > 0)
    return torch.where(mask, x, 0.1 * x).masked_fill(~mask & (x < -1), 0.5)


def scattered(x: Tensor) -> Tensor:
    values, places = x.topk(WIDTH // 2, dim=-1)
    return x.scatter_add(-1, places, values.exp()) * F.one_hot(places[:, 0], WIDTH)


def looked_up(x: Tensor) -> Tensor:
    rows = x.argmax(-1).bitwise_xor(3).clamp(max=ROWS - 1)
    return x + x.exp()[rows].cumsum(-1).sin()


MIDDLES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {  # and an op of it
    "fp8, e4m3": (partial(eighths, torch.float8_e4m3fn), "to_copy"),
    "fp8, e5m2": (partial(eighths, torch.float8_e5m2), "to_copy"),
    "fp8, kept for backward": (
        lambda x: Kept.apply(x),
        "to_copy",
    ),  # the oldest torch does not see a bare apply
    "complex, by Fourier": (in_the_plane, "fft_r2c"),
    "complex, by view": (as_complex, "view_as_complex"),
    "booleans": (masked, "bitwise_and"),
    "integers, the places of the largest": (scattered, "topk"),
    "integers, as indices": (looked_up, "argmax"),
    "double": (lambda x: x.double().exp().sin().to(x.dtype), "to_copy"),
}


# By Fourier a part of a tensor is copied, and the copy is larger than it says.
UNDER_INDUCTOR = [pytest.param(name, "inductor", marks=pytest.mark.slow) for name in MIDDLES]


@pytest.mark.parametrize(("name", "inner"), [*((name, "eager") for name in MIDDLES), *UNDER_INDUCTOR])
@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # autograd's own
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning")
def test_values_of_all_dtypes(name: str, inner: Inner) -> None:
    middle, op = MIDDLES[name]
    assert_as_without(Case(lambda: Net(middle), op, leaf), inner)


class Words(Net):
    """Tokens and their places are looked up; the labels are integers, and some don't count."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, WIDTH), nn.Embedding(8, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(len(tokens)) % 8
        x = self.words(tokens) + self.places(place)
        for layer in self.layers:
            x = F.gelu(layer(x)).sin().exp()
        labels = torch.where(tokens > 40, -100, tokens.roll(-1))
        return F.cross_entropy(x @ self.words.weight.t(), labels)


def test_integers_that_are_looked_up_in_tables() -> None:
    assert_as_without(Case(Words, "embedding", lambda: (torch.randint(50, (ROWS,)),)))
