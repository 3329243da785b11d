"""Dtypes: what is recomputed has that of the forward pass, and its bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import ROWS, SEVERAL, WIDTH, Case, Results, Trained, assert_as_without, called

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
]
HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)


class Net(nn.Module):
    """Layers with a ``middle`` between them, and a loss in float."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.middle(F.gelu(layer(x))).sin()
        return x.float().square().mean()


# Autocast


def cast(half: torch.dtype, run: Callable[..., Any], inputs: Results) -> Results:
    with torch.autocast("cpu", half):
        return called(run, inputs)


@HALVES
def test_autocast_around_the_forward_pass(half: torch.dtype) -> None:
    assert_as_without(Case(Net, "", step=partial(cast, half)))


class Inside(Net):
    """Autocast in the model, and a part of it that is not cast."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.half = half

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.half):
            for n, layer in enumerate(self.layers):
                with torch.autocast("cpu", enabled=n % 2 == 0):
                    x = F.gelu(layer(x.float())).sin().exp()
            return x.float().square().mean()


@HALVES
def test_autocast_in_the_model_and_a_part_that_is_not_cast(half: torch.dtype) -> None:
    assert_as_without(Case(lambda: Inside(half), ""))


def scaled(t: Trained, half: torch.dtype) -> Results:
    """A step of an optimizer, of gradients that are scaled, checked and scaled back; one in four is not."""
    if not hasattr(t, "scaler"):
        t.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)  # type: ignore[attr-defined]
        t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1)  # type: ignore[attr-defined]
        t.count = 0  # type: ignore[attr-defined]
    scaler, optimizer = t.scaler, t.optimizer  # type: ignore[attr-defined]
    with torch.autocast("cpu", half):
        loss = t.run(*t.inputs)
    t.count += 1  # type: ignore[attr-defined]
    scaler.scale(loss * (torch.inf if t.count == 2 else 1)).backward()  # type: ignore[attr-defined]
    scaler.step(optimizer)
    scaler.update()
    return loss, torch.tensor(scaler.get_scale())


@HALVES
def test_gradients_that_a_scaler_scales(half: torch.dtype) -> None:
    assert_as_without(Case(Net, "", steps=SEVERAL, train=partial(scaled, half=half)))


# Dtypes of parameters and of values


def in_halves(half: torch.dtype) -> Case:
    return Case(lambda: Net().to(half), "", lambda: (torch.randn(ROWS, WIDTH, dtype=half),))


@HALVES
def test_parameters_in_half_precision(half: torch.dtype) -> None:
    assert_as_without(in_halves(half))


def test_parameters_of_several_dtypes() -> None:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            for n, dtype in enumerate((torch.float64, torch.bfloat16)):
                self.layers[n].to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.gelu(layer(x.to(layer.weight.dtype))).sin().exp()
            return x.float().square().mean()

    assert_as_without(Case(Mixed, ""))


def eighths(kind: torch.dtype, x: Tensor) -> Tensor:
    """Kept in 8 bits, read in 32; the gradient goes around it."""
    scale = x.detach().abs().amax() / 8
    small = (x / scale).to(kind)
    return x + (small.to(x.dtype) * scale - x).detach().sin()


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


def sorted_out(x: Tensor) -> Tensor:
    values, places = x.sin().topk(WIDTH // 2, dim=-1)
    counts = F.one_hot(places % 4, 4).sum(1)
    return x.scatter_add(-1, places, values.exp()) + counts.repeat(1, WIDTH // 4).to(x.dtype)


def looked_up(x: Tensor) -> Tensor:
    rows = x.argmax(-1).bitwise_xor(3).clamp(max=ROWS - 1)
    return x + x.exp()[rows].cumsum(-1).sin()


MIDDLES: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8, e4m3": partial(eighths, torch.float8_e4m3fn),
    "fp8, e5m2": partial(eighths, torch.float8_e5m2),
    "complex, by Fourier": in_the_plane,
    "complex, by view": as_complex,
    "booleans": masked,
    "integers, sorted and counted": sorted_out,
    "integers, as indices": looked_up,
    "double": lambda x: x.double().exp().sin().to(x.dtype),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # autograd's own
@pytest.mark.parametrize("name", MIDDLES)
def test_values_of_all_dtypes(name: str) -> None:
    assert_as_without(Case(lambda: Net(MIDDLES[name]), ""))
