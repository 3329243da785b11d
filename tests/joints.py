"""Joint graphs of functions, as the tests read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from rematc import compat
from rematc.capture import Capture, capture
from rematc.graph import Graph, Op
from rematc.passes import canonicalize
from rematc.rounding import Rounding, exactly
from rematc.trace import trace_joint


class _StopError(Exception):
    pass


def joint_of(fn: Callable[..., Any], *args: Any, inductor_ops: bool = False) -> tuple[fx.GraphModule, int]:
    """The joint graph of ``fn(*args)``, and how many of its outputs are forward's."""
    torch._dynamo.reset()
    found: list[tuple[fx.GraphModule, int]] = []

    def keep(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        found.append((joint, num_fwd_outputs))
        raise _StopError

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        if inductor_ops:
            return trace_joint(gm, inputs, inductor_ops=True, partition_fn=keep)
        return compat.aot_eager(gm, inputs, partition_fn=keep, compiler=lambda g, _: g)

    with pytest.raises(Exception, match="_StopError"):
        torch.compile(fn, backend=backend)(*args)
    return found[0]


def read(fn: Callable[..., Any], *args: Any, rounded: Rounding = exactly) -> Capture:
    joint, outputs = joint_of(fn, *args)
    return capture(canonicalize(joint, outputs), outputs, rounded)


def graph_of(fn: Callable[..., Any], *args: Any) -> Graph:
    return read(fn, *args).graph


def op(graph: Graph, name: str) -> Op:
    """The first op whose target has ``name`` in it."""
    return next(o for o in graph.ops if name in o.target)


def storages(graph: Graph, values: tuple[int, ...]) -> list[int]:
    return [graph.values[v].storage for v in values]


def needs_grad(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, requires_grad=True)
