"""What Inductor makes of a joint graph: the values that it writes, and the peak of its code for a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rematc import compat, compat_inductor
from rematc.baselines import min_cut
from rematc.capture import Capture
from rematc.costs import Rates, kernel_ns
from rematc.fuse import fuse
from rematc.passes import split
from rematc.problem import OpCost, Problem
from rematc.rehearse import Rehearsal

Modules = tuple[fx.GraphModule, fx.GraphModule]


def in_kernels(
    joint: fx.GraphModule, num_fwd_outputs: int, captured: Capture, problem: Problem, rates: Rates
) -> tuple[Capture, Problem]:
    """The same step with what Inductor writes as its values, read off one split that is lowered."""
    plan = min_cut(problem.with_budget(None))
    forward, backward = split(joint, captured, plan, num_fwd_outputs)
    fused = fuse(
        captured,
        plan,
        compat_inductor.lower(forward, backward=False, planned=False).kernels,
        compat_inductor.lower(backward, backward=True, planned=False).kernels,
    )
    costs = tuple(_cost(fused, i, rates) for i in range(len(fused.graph.ops)))
    return fused, replace(problem, graph=fused.graph, costs=costs)


def _cost(fused: Capture, op: int, rates: Rates) -> OpCost:
    moved = [fused.value_nodes[v] for v in (*fused.graph.ops[op].inputs, *fused.graph.ops[op].outputs)]
    return OpCost(kernel_ns(fused.nodes[op], moved, rates))


def peak_of_code(
    modules: Modules, num_fwd_outputs: int, epilogue_bytes: int, allocation_bytes: int, *, planned: bool
) -> int:
    """Bytes that Inductor's code for forward and backward needs above what is resident.

    ``planned``: it is compiled as planned (see `compat_inductor.as_planned`). What forward returns to the
    caller is held to the end, and so is the gradient of a scalar loss, by ``loss.backward()``.
    """
    forward, backward = modules
    inputs, names = _inputs(forward), _output_nodes(forward)
    with compat.fake_mode_of(inputs):
        rehearsal = Rehearsal(inputs, allocation_bytes)
        code = compat_inductor.lower(forward, backward=False, planned=planned).source
        results = rehearsal.play(code, inputs)
        saved = {n.name: t for n, t in zip(names, results, strict=True) if n is not None}
        code = compat_inductor.lower(
            backward, backward=True, planned=planned, donated=_donated(modules, num_fwd_outputs)
        ).source
        arguments = [saved.get(n.name, n.meta["val"]) for n in backward.graph.find_nodes(op="placeholder")]
        tangents = [n.meta["val"] for n in backward.graph.find_nodes(op="placeholder") if n.name not in saved]
        rehearsal.hold([t for t in tangents if compat.holds_tangents() or t.dim() == 0])
        rehearsal.release(results[num_fwd_outputs:])
        rehearsal.play(code, arguments)
    return max(rehearsal.peak_bytes, rehearsal.live_bytes + epilogue_bytes)


def _donated(modules: Modules, num_fwd_outputs: int) -> list[int]:
    """Positions of backward's inputs whose memory is its own: nobody else holds what was saved there."""
    forward, backward = modules
    results = _output_nodes(forward)
    held = [*forward.graph.find_nodes(op="placeholder"), *results[:num_fwd_outputs], *_output_nodes(backward)]
    taken = set(_keys(held))
    saved = {n.name for n in results[num_fwd_outputs:] if n is not None}
    inputs = backward.graph.find_nodes(op="placeholder")
    return [i for i, n in enumerate(inputs) if n.name in saved and taken.isdisjoint(_keys([n]))]


def _keys(nodes: Iterable[fx.Node | None]) -> list[int]:
    vals = [n.meta.get("val") for n in nodes if n is not None]
    return [compat.storage_key(v) for v in vals if isinstance(v, torch.Tensor)]


def _inputs(module: fx.GraphModule) -> list[Any]:
    return [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]


def _output_nodes(module: fx.GraphModule) -> list[fx.Node | None]:
    (output,) = module.graph.find_nodes(op="output")
    return [n if isinstance(n, fx.Node) else None for n in output.args[0]]
