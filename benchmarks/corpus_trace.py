"""A model's training step as a `Problem`: on tensors without memory, at rates that are written down.

The line is the backend's own (trace, canonicalize, capture, price) up to where that asks the device: it
measures rates and scratch memory, which differ from run to run and need a model that fits in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from rematc import compat
from rematc.capture import capture
from rematc.costs import Prices, Rates
from rematc.passes import canonicalize
from rematc.problem import Problem
from rematc.resident import epilogue_bytes, resident_bytes
from rematc.rounding import Rounding, exactly, in_units


@dataclass(frozen=True, slots=True)
class Device:
    """What a step is priced for: rates, and what the allocator gives for so many bytes."""

    rates: Rates
    rounded: Rounding


# Round figures of what large ops reach in practice, of the order of an NVIDIA A100's with 80 GB (peaks:
# 2.0e12 bytes per second, 1.56e14 FLOP per second in TF32, twice that in bfloat16).
A100 = Device(
    Rates(
        stream=1.5e12, strided=1.0e12, special=1.4e12, reduce=1.2e12, gather=6e11, random=6e11,
        matmul=1.1e14, conv=8e13, attention=6e13, overhead_ns=5_000,
        faster={"bfloat16": 2.0, "float16": 2.0},
    ),
    rounded=in_units,
)  # fmt: skip
# The same of two cores of a server.
CPU = Device(
    Rates(
        stream=1e11, strided=1.3e10, special=1.3e10, reduce=2.5e10, gather=2.5e10, random=2.5e10,
        matmul=1.8e11, conv=1.9e11, attention=1.5e11, overhead_ns=4_000,
        faster={"bfloat16": 2.0, "float16": 2.0},
    ),
    rounded=exactly,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model in train mode, the arguments of its forward pass, and the loss of its output."""

    model: nn.Module
    inputs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]


def pose(make: Callable[[], Case], device: Device = A100) -> Problem:
    """The problem of one training step of what ``make()`` returns, with no budget; nothing is run."""
    torch.compiler.reset()
    with compat.fake_tensors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
        case = make()
        tracer = _Tracer(device)
        try:
            step = torch.compile(_step(case), backend=tracer, fullgraph=True, dynamic=False)
            step(case.model, **case.inputs)
        except _Stop:
            pass
    if tracer.error is not None:
        raise tracer.error
    assert tracer.posed is not None, "nothing requires a gradient"
    return tracer.posed


def _step(case: Case) -> Callable[..., Tensor]:
    # Its first argument is called self so that module paths start below the model.
    def step(self: nn.Module, **inputs: Tensor) -> Tensor:
        return case.loss(self(**inputs))

    return step


class _Stop(BaseException):
    """Ends the trace. No `Exception`: Dynamo may swallow those and run the step after all."""


class _Tracer:
    """A backend that poses the problem, keeps it, and stops."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.posed: Problem | None = None
        self.error: Exception | None = None

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        def partition_fn(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
            try:
                self.posed = self.read(joint, num_fwd_outputs)
            except Exception as e:  # kept, not raised: Dynamo would wrap it in words of its own
                self.error = e
            raise _Stop

        compat.aot_eager(gm, inputs, partition_fn=partition_fn, compiler=_stop)
        raise _Stop

    def read(self, joint: fx.GraphModule, num_fwd_outputs: int) -> Problem:
        """Joint graph -> problem, with no budget."""
        canonicalize(joint, num_fwd_outputs, runs_here=False)
        captured = capture(joint, num_fwd_outputs, self.device.rounded)
        prices = Prices(self.device.rates)
        costs = tuple(prices.of(nodes[0]) for nodes in captured.nodes)
        resident = resident_bytes(captured.graph, torch.device("cpu"))
        return Problem(captured.graph, costs, None, resident, epilogue_bytes(joint, captured))


def _stop(*_: Any, **__: Any) -> Any:
    raise _Stop
