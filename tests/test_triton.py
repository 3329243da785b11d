"""Users' Triton kernels: run once, unless they are declared pure.

Torch traces them as for a GPU, and finds what they write; all that is not so is what runs in their place.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from tests.cases import WIDTH, Case, assert_as_without, under_the_smallest_budget

triton: Any = pytest.importorskip("triton", reason="needs Triton, which comes with torch for a GPU")
tl: Any = importlib.import_module("triton.language")
BLOCK = 256

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "on_cpu")


@triton.jit
def cube_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x * x * x, mask=at < n)


@triton.jit
def halve_kernel(x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) / 2, mask=at < n)


ON_CPU = {
    cube_kernel: lambda x, out, *rest, **how: torch.pow(x, 3, out=out),
    halve_kernel: lambda x, *rest, **how: x.div_(2),
}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler: Any = importlib.import_module("triton.backends.compiler")

    class Driver:
        def get_current_target(self) -> Any:
            return compiler.GPUTarget("cuda", 80, 32)

    monkeypatch.setattr("torch.utils._triton.has_triton", lambda **how: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(importlib.import_module("rematc.pure"), "_DECLARED", set())
    for kernel, run in ON_CPU.items():
        monkeypatch.setattr(kernel, "run", run)


def over(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), BLOCK),)


def cubed(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    cube_kernel[over(x)](x, out, x.numel(), BLOCK=BLOCK)
    return out


def grad_of_cube(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * 3 * x * x


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return cubed(x)

    backward = staticmethod(grad_of_cube)


class Halved(torch.autograd.Function):
    """Written where its argument stands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.exp()
        halve_kernel[over(x)](x, x.numel(), BLOCK=BLOCK)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


@torch.library.triton_op("test_triton::cube", mutates_args={})
def cube(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.library.wrap_triton(cube_kernel)[over(x)](x, out, x.numel(), BLOCK=BLOCK)
    return out


cube.register_autograd(grad_of_cube, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def by_function(x: Tensor) -> Tensor:
    out: Tensor = Cube.apply(x)
    return out


def in_place(x: Tensor) -> Tensor:
    out: Tensor = Halved.apply(x)
    return out


HOW = {"function": by_function, "in place": in_place, "op": cube}


class Net(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.lines, self.op = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), op

    def forward(self, x: Tensor) -> Tensor:
        for line in self.lines:
            x = self.op(line(x).sin()).cos()
        return x.square().mean()


def kernels(backend: rematc.Backend) -> tuple[list[str | None], int]:
    """Why each may not run again, and how many do."""
    (problem,), (plan,) = backend.problems, backend.plans
    ops = problem.graph.ops
    found = [i for i in problem.graph.forward if "triton" in ops[i].target]
    return [ops[i].pin for i in found], len(set(found) & set(plan.backward))


@pytest.mark.parametrize("how", HOW)
def test_a_kernel_runs_once_and_what_is_around_it_again(how: str, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(partial(Net, HOW[how]), "triton_kernel")
    assert_as_without(case)
    pins, again = kernels(under_the_smallest_budget(case)[1])
    assert [str(pin).split(",")[0] for pin in pins] == ["effect: a Triton kernel"] * 4
    assert not again
    assert "is not known" not in caplog.text  # what it takes: its results, as torch makes them


@pytest.mark.parametrize("how", ["function", "op"])
def test_a_kernel_that_is_declared_pure_runs_again(how: str) -> None:
    case = Case(partial(Net, HOW[how]), "triton_kernel")
    least = under_the_smallest_budget(case)[1].options.budget
    assert rematc.pure(cube_kernel) is cube_kernel
    assert_as_without(case)
    backend = under_the_smallest_budget(case)[1]
    pins, again = kernels(backend)
    assert pins == [None] * 4
    assert again > 1
    assert backend.options.budget < least


def test_of_an_op_that_torch_looks_into_the_kernels_are_declared() -> None:
    with pytest.raises(rematc.OptionError, match="give the Triton kernels in it"):
        rematc.pure(cube)


def test_it_is_known_within_what_tunes_it() -> None:
    """As torch may have it in the graph: what chooses parameters, around the kernel."""
    around = triton.heuristics({"BLOCK": lambda args: BLOCK})(cube_kernel)
    rematc.pure(triton.autotune([triton.Config({})], key=["n"])(around))
    backend = under_the_smallest_budget(Case(partial(Net, by_function), "triton_kernel"))[1]
    assert kernels(backend)[0] == [None] * 4
