"""What Inductor makes of a joint graph: the values that it writes, and the peak of its code for a plan."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import fx

from rematc import compat
from rematc.baselines import min_cut
from rematc.capture import Capture, is_symbolic
from rematc.costs import Call, Prices, Taken
from rematc.fuse import Kernel, fuse
from rematc.garbage import garbage_waits
from rematc.passes import split
from rematc.passes.replay import STEP
from rematc.plan import Plan
from rematc.problem import OpCost, Problem
from rematc.rehearse import Rehearsal
from rematc.share import Footprint
from rematc.storages import fake_mode_of
from rematc.target import Target
from rematc.versions import holds_tangents

log = logging.getLogger(__name__)
T = TypeVar("T")
NOWHERE = (-1, -1)
LOWERING = 3  # counts the ways in which Inductor was asked to lower: code of another way is not taken
RETAINED = (
    "the first backward pass keeps its graph (retain_graph=True), so that Inductor can't have what was saved "
    "written over: this and later steps may need more memory than planned\n"
    "  what to try: %s = False before the model is compiled: plans count on that"
)
Modules = tuple[fx.GraphModule, fx.GraphModule]


def compile_as_planned(gm: fx.GraphModule, inputs: Any, partitioner: Any) -> Any:
    """Compile with Inductor, what ``partitioner`` makes in the order and the kernels of its plan."""

    def compiler(module: fx.GraphModule, *args: Any, **settings: Any) -> Any:
        planned = any(STEP in n.meta for n in module.graph.nodes)  # what has no backward pass is not
        if planned and compat.donates() and compat.is_retained():
            log.warning(RETAINED, compat.DONATED)
        with _as_planned(module) if planned else nullcontext():
            run = compat.compile_graph(module, *args, **settings)
        return _as_traced(run) if settings.get("is_backward") else run

    return compat.inductor(gm, inputs, partitioner=partitioner, compiler=compiler)


def _as_traced(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with autocast off: backward may be called inside of one, and the code counts on its dtypes."""

    def backward(args: list[Any]) -> Any:
        with compat.autocast_off():
            return run(args)

    backward._boxed_call = True  # type: ignore[attr-defined]
    return backward


def _as_planned(module: fx.GraphModule) -> AbstractContextManager[None]:
    """Inductor keeps to the steps and kernels that are written at the nodes of ``module`` (`STEP`).

    What is in different kernels there is not fused: that would keep alive what the plan lets go of.
    """
    from rematc import __version__

    said = repr(
        (__version__, LOWERING, [(n.meta.get(STEP), compat.is_written_out(n)) for n in module.graph.nodes])
    )
    return compat.scheduling(_place, hashlib.sha256(said.encode()).hexdigest())


def _place(nodes: list[fx.Node]) -> tuple[int, int]:
    """The last step of the plan among ``nodes``, and its kernel."""
    return max(map(_place_of, nodes), default=NOWHERE)


def _place_of(node: fx.Node) -> tuple[int, int]:
    """The place of an FX node; one that Inductor put in for others waits for all that it reads."""
    if STEP not in node.meta:
        node.meta[STEP] = _place(node.all_input_nodes)
    place: tuple[int, int] = node.meta[STEP]
    return place


@garbage_waits()
def in_kernels(
    joint: fx.GraphModule, num_fwd_outputs: int, captured: Capture, problem: Problem, prices: Prices
) -> tuple[Capture, Problem]:
    """The same step with what Inductor writes as its values, read off one split that is lowered."""
    plan = min_cut(problem.with_budget(None))
    modules = split(joint, captured, plan, num_fwd_outputs)
    with compat.lowering_as_asked():
        forward, backward = (
            compat.lowered(module, _inputs(module), (), _kernels, is_backward=is_backward)
            if _computes(module)
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


def _code_of(lowering: Any) -> str:
    """The Python code that Inductor writes."""
    return str(lowering.codegen()[0].value)


def _computes(module: fx.GraphModule) -> bool:
    """Inductor writes no code for a graph that does not: the gradient of a sign is zero, and made forward."""
    return any(n.op == "call_function" for n in module.graph.nodes)


def _passing_on(module: fx.GraphModule) -> str:
    """What the code would be."""
    names = [n.name for n in module.graph.find_nodes(op="placeholder")]
    results = [str(x) for x in _output_nodes(module)]
    return f"def call(args):\n    [{', '.join(names)}] = args\n    return [{', '.join(results)}]\n"


def _cost(fused: Capture, op: int, prices: Prices) -> OpCost:
    """Its time; what a ready-made kernel takes while it runs depends on strides that only the code knows."""
    moved = [fused.value_nodes[v] for v in (*fused.graph.ops[op].inputs, *fused.graph.ops[op].outputs)]
    return prices.kernel(fused.nodes[op], moved)


@dataclass
class PeakOfCode:
    """What Inductor's code for a plan needs, in bytes, resident included: ``PeakOfCode(...)(plan)``.

    ``planned``: it is compiled by `compile_as_planned`. What forward returns to the
    caller is held to the end, and so is the gradient of a scalar loss, by ``loss.backward()``. ``known`` has
    what each call of a ready-made kernel takes that was measured so far, ``found`` what plans take, and
    whether kernels share what they compute there; ``sharing_bytes`` is what that takes, once it was too much.
    """

    joint: fx.GraphModule
    captured: Capture
    problem: Problem
    num_fwd_outputs: int
    target: Target
    planned: bool
    known: dict[Hashable, Taken] = field(default_factory=dict)
    found: dict[Hashable, tuple[Footprint, bool]] = field(default_factory=dict)
    sharing_bytes: int | None = None

    def __call__(self, plan: Plan) -> int:
        """What its code needs, resident included."""
        return self.problem.resident_bytes + self.above_resident(plan).peak_bytes

    def above_resident(self, plan: Plan) -> Footprint:
        """The same, resident not included, and what is taken in forward and kept after it."""
        return self._found(plan)[0]

    def split(self, plan: Plan) -> Modules:
        """The forward and the backward module whose code that is."""
        return split(self.joint, self.captured, plan, self.num_fwd_outputs, shared=self._found(plan)[1])

    def _found(self, plan: Plan) -> tuple[Footprint, bool]:
        """What its code needs; and do its kernels share what they compute?"""
        key = plan.saved, plan.backward
        if key not in self.found:
            self.found[key] = self._chosen(plan)
        return self.found[key]

    def _chosen(self, plan: Plan) -> tuple[Footprint, bool]:
        """Shared where that fits: it is faster, and may take more. What it takes is tried at one plan.

        Not at one of so much recomputation that it is for the smallest budget: lowering that takes longest.
        """
        if plan.cost_ns > self.problem.forward_ns:
            return self._rehearsed(plan, shared=False), False
        if self.sharing_bytes is None:
            shared = self._rehearsed(plan, shared=True)
            if shared.peak_bytes <= self._room:
                return shared, True
            alone = self._rehearsed(plan, shared=False)
            self.sharing_bytes = shared.peak_bytes - alone.peak_bytes
            return (alone, False) if self.sharing_bytes > 0 else (shared, True)
        alone = self._rehearsed(plan, shared=False)
        if alone.peak_bytes + self.sharing_bytes <= self._room:
            shared = self._rehearsed(plan, shared=True)
            if shared.peak_bytes <= self._room:
                return shared, True
        return alone, False

    @property
    def _room(self) -> float:
        """Bytes above what is resident."""
        budget = self.problem.budget_bytes
        return math.inf if budget is None else budget - self.problem.resident_bytes

    @garbage_waits()
    def _rehearsed(self, plan: Plan, *, shared: bool) -> Footprint:
        """Lower both graphs of ``plan`` and rehearse their code."""
        forward, backward = split(self.joint, self.captured, plan, self.num_fwd_outputs, shared=shared)
        inputs = _inputs(forward)
        with fake_mode_of(inputs):
            rehearsal = Rehearsal(inputs, self.target.allocation_bytes, self._taken)
            code = self._code(forward, inputs)
            results = rehearsal.play(code, inputs)
            in_forward, kept_bytes = rehearsal.peak_bytes, rehearsal.live_bytes
            saved = _in_backward_s_order(results[self.num_fwd_outputs :])
            tangents = _inputs(backward)[len(saved) :]
            rehearsal.hold([t for t in tangents if holds_tangents() or t.dim() == 0])
            donated = _donated((forward, backward), self.num_fwd_outputs)
            code = self._code(backward, [*saved, *tangents], donated, is_backward=True)
            rehearsal.play(code, [*saved, *tangents], handed_over=saved)
        end_bytes = rehearsal.live_bytes + self.problem.epilogue_bytes
        between_bytes = kept_bytes + self.problem.meanwhile_bytes
        return Footprint(max(rehearsal.peak_bytes, between_bytes, end_bytes), in_forward, kept_bytes)

    def _code(self, module: fx.GraphModule, inputs: Sequence[Any], donated: Any = (), **settings: Any) -> str:
        if not _computes(module):
            return _passing_on(module)
        with _as_planned(module) if self.planned else nullcontext():
            return compat.lowered(module, inputs, donated, _code_of, **settings)

    def _taken(self, calls: Iterable[Call]) -> Mapping[Hashable, Taken]:
        self.known |= self.target.taken(call for call in calls if call.key not in self.known)
        return self.known


def _in_backward_s_order(saved: Sequence[T]) -> list[T]:
    """What forward returns for backward, sizes last, as backward takes it: sizes first."""
    return [x for x in saved if _is_size(x)] + [x for x in saved if not _is_size(x)]


def _is_size(x: object) -> bool:
    """Neither a tensor nor an object that torch passes through, such as the mesh of a DTensor."""
    val = x.meta.get("val") if isinstance(x, fx.Node) else x
    return isinstance(val, int | float) or is_symbolic(val)


def _is_tensor(x: object) -> bool:
    return isinstance(x.meta.get("val") if isinstance(x, fx.Node) else x, torch.Tensor)


def _donated(modules: Modules, num_fwd_outputs: int) -> list[int]:
    """Positions of backward's inputs whose memory is its own: nobody else holds what was saved there."""
    if not compat.donates():
        return []
    forward, backward = modules
    results = _output_nodes(forward)
    held = [*forward.graph.find_nodes(op="placeholder"), *results[:num_fwd_outputs], *_output_nodes(backward)]
    taken = set(_keys(held))
    saved = _in_backward_s_order(results[num_fwd_outputs:])
    return [i for i, node in enumerate(saved) if _is_tensor(node) and taken.isdisjoint(_keys([node]))]


def _keys(nodes: Iterable[fx.Node | None]) -> list[int]:
    vals = [n.meta.get("val") for n in nodes if n is not None]
    return [compat.storage_key(v) for v in vals if isinstance(v, torch.Tensor)]


def _inputs(module: fx.GraphModule) -> list[Any]:
    """A size that was fixed has no value where the graph is planned anew, and nothing reads it."""
    return [n.meta.get("val", 0) for n in module.graph.find_nodes(op="placeholder")]


def _output_nodes(module: fx.GraphModule) -> list[fx.Node | None]:
    (output,) = module.graph.find_nodes(op="output")
    return [n if isinstance(n, fx.Node) else None for n in output.args[0]]
