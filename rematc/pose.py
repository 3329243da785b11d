"""Joint graph -> the problem that it poses: what it is made of, what that costs, what there is beside it."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import fx

from rematc import compat
from rematc.cache import cache_folder
from rematc.capture import CHECKPOINTED, Capture, capture, check_layouts
from rematc.compiled import ALONE, Given
from rematc.costs import Prices
from rematc.errors import CaptureError, RematcError
from rematc.options import Options, parse_budget
from rematc.passes import canonicalize
from rematc.problem import Problem
from rematc.regather import without_price
from rematc.resident import NO_TRAINING, Training, epilogue_bytes, resident_bytes
from rematc.storages import tensors
from rematc.survey import Outside
from rematc.target import Target, device_of, target_of

log = logging.getLogger(__name__)

NUMBER = 8  # bytes, at the most
CHECKPOINTS = (
    "the model has regions under torch.utils.checkpoint (gradient_checkpointing, say): what is in them is "
    "planned with all else, but for what a policy must save or recompute; without them it compiles faster"
)
REGION = (
    "torch splits what is under torch.compiler.nested_compile_region by itself; plans are for whole models\n"
    "  what to try: no region; or torch 2.12 or newer, where rematc.backend takes it as a part of the graph, "
    f"and others do with {compat.IN_LINE} = True"
)


def pose(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    options: Options,
    beside: Training = NO_TRAINING,
    given: Given = ALONE,
    target: Target | None = None,
) -> tuple[Capture, Problem]:
    """Joint graph -> what it is made of, and the problem that it poses under ``options``.

    Raises `CaptureError` for the graph of a region that torch compiles by itself.
    """
    if compat.is_region(joint):
        raise CaptureError(REGION)
    target = target or target_of(joint, options, cache_folder(), given)
    _fix_sizes(joint)
    check_layouts(joint)
    runs_here = target.table is not None
    op_by_op = options.inner == "eager"
    canonicalize(
        joint,
        num_fwd_outputs,
        runs_here=runs_here,
        for_inductor=not op_by_op,
        regather=options.regather,
        taken=target.taken if runs_here and op_by_op else None,
    )
    captured = capture(joint, num_fwd_outputs, target.rounded)
    nodes = [nodes[0] for nodes in captured.nodes]
    prices = target.prices(nodes, _recomputable(captured), op_by_op=op_by_op)
    captured = _as_measured(captured, prices)
    costs = tuple(map(prices.of, nodes))
    resident = given.resident_bytes
    if resident is None:
        there = resident_bytes(captured.graph, device_of(joint), given.others_bytes)
        resident = there + options.reserve_bytes + beside.resident_bytes
    budget = given.budget_bytes or parse_budget(options.budget, target.memory_bytes)
    there, meanwhile = resident + given.outside.held_bytes, given.outside.meanwhile_bytes
    copies = epilogue_bytes(joint, captured, target.rounded)
    problem = Problem(captured.graph, costs, budget, there, copies, meanwhile_bytes=meanwhile)
    if op_by_op:
        return captured, without_price(problem)
    from rematc.inductor import in_kernels

    try:
        captured, problem = in_kernels(joint, num_fwd_outputs, captured, problem, prices)
    except RematcError as e:
        log.warning("what Inductor fuses can't be read (%s); the plan is for single ops, and coarser", e)
    return captured, without_price(problem)


def of_a_loss(joint: fx.GraphModule, target: Target) -> Outside:
    """A loss that is computed outside of the graph is a number at the least, and its gradient is one."""
    tangents = [n for n in joint.graph.find_nodes(op="placeholder") if compat.is_tangent(n)]
    is_outside = any(compat.hint(n.meta["val"].numel()) > 1 for n in tangents)
    return Outside(2 * target.rounded(NUMBER)) if is_outside else Outside()


def _as_measured(captured: Capture, prices: Prices) -> Capture:
    """With memory of the size that kernels return: some leave a small result in what they needed before."""
    graph, size = captured.graph, list(captured.graph.storage_bytes)
    for op, nodes in zip(graph.ops, captured.nodes, strict=True):
        read, made = ({graph.values[v].storage for v in values} for values in (op.inputs, op.outputs))
        more = prices.result_bytes(nodes[0]) - sum(graph.storage_bytes[s] for s in made - read)
        for s in made - read:  # which of several it is, is not known
            size[s] += max(0, more)
    return replace(captured, graph=replace(graph, storage_bytes=tuple(size)))


def _recomputable(captured: Capture) -> list[fx.Node]:
    ops = zip(captured.graph.ops, captured.nodes, strict=True)
    return [nodes[0] for op, nodes in ops if op.phase == "forward" and not op.pin]


def say_if_checkpointed(joint: fx.GraphModule) -> None:
    """Recomputation that the model asks for itself is not needed."""
    if any(CHECKPOINTED in node.meta for node in joint.graph.nodes):
        log.warning(CHECKPOINTS)


def _fix_sizes(joint: fx.GraphModule) -> None:
    """Make every size that Dynamo left open the one that the trace saw: of inputs, and of all values.

    A plan keeps its budget at these sizes and no others; others are compiled, and planned, anew.
    """
    found = [tensor for node in joint.graph.nodes for tensor in tensors(node.meta.get("val"))]
    dense = [tensor for tensor in found if tensor.layout == torch.strided]  # others are refused
    sizes = [size for t in dense for size in (*t.shape, t.untyped_storage().nbytes())]
    compat.unmark(sizes)
    for size in sizes:
        compat.hint(size)  # raises where the run alone knows
        int(size)  # a guard, where the size is symbolic
