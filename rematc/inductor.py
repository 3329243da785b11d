"""What Inductor makes of a joint graph: the values that it writes, and code in the kernels of a plan."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import fx

from rematc import compat
from rematc.baselines import min_cut
from rematc.capture import Capture
from rematc.costs import Prices
from rematc.fuse import Kernel, fuse
from rematc.garbage import garbage_waits
from rematc.mincut import constants
from rematc.over import over
from rematc.passes import split
from rematc.passes.replay import STEP, Place
from rematc.problem import OpCost, Problem
from rematc.schedule import saving

log = logging.getLogger(__name__)
NOWHERE = Place(-1, -1, -1)
LOWERING = 4  # counts the ways in which Inductor was asked to lower: code of another way is not taken
RETAINED = (
    "the first backward pass keeps its graph (retain_graph=True), so that Inductor can't have what was saved "
    "written over: this and later steps may need more memory than planned\n"
    "  what to try: %s = False before the model is compiled: plans count on that"
)


def compile_as_planned(gm: fx.GraphModule, inputs: Any, partitioner: Any) -> Any:
    """Compile with Inductor, what ``partitioner`` makes in the order and the kernels of its plan."""

    def compiler(module: fx.GraphModule, *args: Any, **settings: Any) -> Any:
        planned = any(STEP in n.meta for n in module.graph.nodes)  # what has no backward pass is not
        if planned and compat.donates() and compat.is_retained():
            log.warning(RETAINED, compat.DONATED)
        with as_planned(module) if planned else nullcontext():
            run = compat.compile_graph(module, *args, **settings)
        return _as_traced(run) if settings.get("is_backward") else run

    return compat.inductor(gm, inputs, partitioner=partitioner, compiler=compiler)


def _as_traced(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with autocast off: backward may be called inside of one, and the code counts on its dtypes."""

    def backward(args: list[Any]) -> Any:
        with compat.autocast_off():
            results = run(args)
        over()
        return results

    backward._boxed_call = True  # type: ignore[attr-defined]
    return backward


def as_planned(module: fx.GraphModule) -> AbstractContextManager[None]:
    """Inductor keeps to the places that are written at the nodes of ``module`` (`STEP`).

    What is in different kernels there is not fused: that would keep alive what the plan lets go of.
    """
    from rematc import __version__

    said = repr(
        (__version__, LOWERING, [(n.meta.get(STEP), compat.is_written_out(n)) for n in module.graph.nodes])
    )
    return compat.scheduling(place_of, hashlib.sha256(said.encode()).hexdigest())


def place_of(nodes: list[fx.Node]) -> Place:
    """The place of the last step of the plan among ``nodes``."""
    return max(map(_place_of, nodes), default=NOWHERE)


def _place_of(node: fx.Node) -> Place:
    """The place of an FX node; one that Inductor put in for others waits for all that it reads."""
    if STEP not in node.meta:
        node.meta[STEP] = place_of(node.all_input_nodes)
    place: Place = node.meta[STEP]
    return place


@garbage_waits()
def in_kernels(
    joint: fx.GraphModule, num_fwd_outputs: int, captured: Capture, problem: Problem, prices: Prices
) -> tuple[Capture, Problem]:
    """The same step with what Inductor writes as its values, read off one split that is lowered."""
    plan = min_cut(problem.with_budget(None))
    inside = constants(problem.graph)
    plan = saving(problem.graph, plan, tuple(v for v in plan.saved if v not in inside))
    modules = split(joint, captured, plan, num_fwd_outputs)
    with compat.lowering_as_asked():
        forward, backward = (
            compat.lowered(module, inputs_of(module), (), _kernels, is_backward=is_backward)
            if computes(module)
            else ()
            for module, is_backward in zip(modules, (False, True), strict=True)
        )
    fused = fuse(captured, plan, *(tuple(Kernel(*k) for k in kernels) for kernels in (forward, backward)))
    costs = tuple(_cost(fused, i, prices) for i in range(len(fused.graph.ops)))
    return fused, replace(problem, graph=fused.graph, costs=costs)


def _kernels(lowering: Any) -> tuple[tuple[tuple[str, ...], bool], ...]:
    """For `lowered`: the FX nodes of each kernel, in order (if it is ready-made, its own), and is it that?"""

    def ready_made(part: Any) -> bool:
        return type(part).__name__ != "ComputedBuffer" and part.origin_node is not None

    parts = [[n.node for n in k.get_nodes() if n.node is not None] for k in compat.scheduled(lowering)]
    nodes = ([o.name for p in k for o in ([p.origin_node] if ready_made(p) else p.origins)] for k in parts)
    return tuple(
        (tuple(dict.fromkeys(n)), any(map(ready_made, k))) for n, k in zip(nodes, parts, strict=True)
    )


def computes(module: fx.GraphModule) -> bool:
    """Inductor writes no code for a graph that does not: the gradient of a sign is zero, and made forward."""
    return any(n.op == "call_function" for n in module.graph.nodes)


def _cost(fused: Capture, op: int, prices: Prices) -> OpCost:
    """Its time; what a ready-made kernel takes while it runs depends on strides that only the code knows."""
    moved = [fused.value_nodes[v] for v in (*fused.graph.ops[op].inputs, *fused.graph.ops[op].outputs)]
    return prices.kernel(fused.nodes[op], moved)


def inputs_of(module: fx.GraphModule) -> list[Any]:
    """A size that was fixed has no value where the graph is planned anew, and nothing reads it."""
    return [n.meta.get("val", 0) for n in module.graph.find_nodes(op="placeholder")]
