"""Settings of Inductor's own under which budgets hold all the same."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from rematc.measure import measure

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.second(F.gelu(self.first(x)))
        return x.square().mean()


SETTINGS = [
    ("cpp_wrapper", True),
    pytest.param("cpp_wrapper", False, marks=pytest.mark.slow),
    pytest.param("triton.cudagraphs", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("setting", "is_dynamic"), SETTINGS)
def test_the_budget_bounds_the_peak_and_gradients_are_eager_s(setting: str, is_dynamic: bool) -> None:
    """With a wrapper in C++ a loop over the kernels ended in a TypeError, and sizes are tensors there.

    Where CUDA graphs were asked for, a CPU's code took 1.6 times what it was said to.
    """
    torch.manual_seed(2)
    model, x = Net(), torch.randn(192, 16)
    budget = kept(model, x) * 3 // 4
    backend = rematc.backend(budget, costs="roofline")
    run = torch.compile(model, backend=backend, dynamic=is_dynamic)

    def step() -> None:
        run(x).backward()
        model.zero_grad()

    with importlib.import_module("torch._inductor.config").patch({setting: True}):
        run(x).backward()
        ours = [p.grad for p in model.parameters()]
        model.zero_grad()
        measured = backend.resident_bytes + measure(step).peak_bytes
    (plan,) = backend.plans
    assert plan.cost_ns > 0
    assert measured == plan.peak_bytes <= budget
    model(x).backward()
    torch.testing.assert_close(ours, [p.grad for p in model.parameters()])


@pytest.mark.slow
def test_code_that_asks_for_numbers_is_refused() -> None:
    """Dynamo took the error for a reason to break the graph."""
    settings = importlib.import_module("torch._inductor.config").patch(nan_asserts=True)
    with settings, pytest.raises(rematc.CaptureError, match="can't follow: assert not"):
        torch.compile(Net(), backend=rematc.backend(10**9))(torch.randn(192, 16))


def kept(model: nn.Module, x: Tensor) -> int:
    """What the model takes where all is saved, op by op."""
    backend = rematc.backend(None, inner="eager", costs="roofline")
    torch.compile(model, backend=backend)(x)
    torch._dynamo.reset()
    return backend.plans[0].peak_bytes
