"""The peak of the code that Inductor writes for a plan, and how its kernels are told to fit."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from rematc import compat
from rematc.capture import Capture, is_symbolic
from rematc.costs import Call, Taken, is_ready_made
from rematc.garbage import garbage_waits
from rematc.inductor import as_planned, computes, inputs_of, place_of
from rematc.kernels import parted
from rematc.learn import OpNeed
from rematc.passes import split
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.rehearse import Batch, Rehearsal
from rematc.schedule import one_of_each_storage
from rematc.share import Footprint
from rematc.simulate import simulate
from rematc.storages import fake_mode_of
from rematc.target import Target, device_of
from rematc.versions import holds_tangents

T = TypeVar("T")
Modules = tuple[fx.GraphModule, fx.GraphModule]
AtOnce = tuple[list[int], int]  # steps that run at once, and the bytes above resident meanwhile


class Code(NamedTuple):
    """What Inductor writes, and the step of the plan that each buffer in it is made in, by its number."""

    source: str
    steps: dict[str, int]


class Grouping(NamedTuple):
    """Do the kernels of a plan share what they compute, and before which steps are they parted?"""

    shared: bool
    parted: frozenset[int]


@dataclass
class PeakOfCode:
    """What Inductor's code for a plan needs, in bytes, resident included: ``PeakOfCode(...)(plan)``.

    ``planned``: it is compiled by `compile_as_planned`. What forward returns to the
    caller is held to the end, and so is the gradient of a scalar loss, by ``loss.backward()``. ``known`` has
    what each call of a ready-made kernel takes that was measured so far, ``rehearsed`` what the code of plans
    takes by grouping, in all and while each step runs, and ``found`` the grouping that was chosen;
    ``sharing_bytes`` is what sharing takes, once it was too much.
    """

    joint: fx.GraphModule
    captured: Capture
    problem: Problem
    num_fwd_outputs: int
    target: Target
    planned: bool
    known: dict[Hashable, Taken] = field(default_factory=dict)
    found: dict[Hashable, tuple[Footprint, Grouping]] = field(default_factory=dict)
    rehearsed: dict[Hashable, tuple[Footprint, list[AtOnce]]] = field(default_factory=dict)
    sharing_bytes: int | None = None

    def __call__(self, plan: Plan) -> int:
        """What its code needs, resident included."""
        return self.problem.resident_bytes + self.above_resident(plan).peak_bytes

    def above_resident(self, plan: Plan) -> Footprint:
        """The same, resident not included, and what is taken in forward and kept after it."""
        return self._found(plan)[0]

    @cached_property
    def read_ready_made(self) -> frozenset[int]:
        """What ready-made kernels of backward read of forward: none computes it on its way, as others do.

        So torch's partitioner saves it, and so does a plan without limit: it costs a kernel to have it again.
        """
        graph = self.captured.graph
        made = {v for i in graph.forward for v in graph.ops[i].outputs}
        theirs = [i for i in graph.backward_steps if any(map(is_ready_made, self.captured.nodes[i]))]
        return frozenset(v for i in theirs for v in graph.ops[i].inputs if v in made)

    def of_ops(self, plan: Plan) -> dict[int, OpNeed]:
        """What its code needs while each op runs, as far as that is known.

        What ops that are computed at once need beyond the plan is said of the one of which that says most.
        """
        grouping = self._found(plan)[1]
        plan = one_of_each_storage(self.problem.graph, plan)
        _, steps_at_once = self.rehearsed[_key(plan, grouping)]
        profile, found = simulate(self.problem, plan), dict[int, OpNeed]()
        views = self.problem.graph.views  # taken by whoever reads them
        for steps, above_bytes in steps_at_once:
            if not (steps := [step for step in steps if profile.steps[step].op not in views]):
                continue
            most = max(steps, key=profile.live_bytes.__getitem__)
            for step in steps:
                op, said_bytes = profile.steps[step].op, profile.live_bytes[step]
                alive_bytes = self.problem.resident_bytes + above_bytes
                alive_bytes = alive_bytes if step == most else min(alive_bytes, said_bytes)
                need = OpNeed(alive_bytes, alive_bytes - said_bytes)
                found[op] = max(need, found.get(op, need))
        return found

    def split(self, plan: Plan) -> Modules:
        """The forward and the backward module whose code that is."""
        return self._split(plan, self._found(plan)[1])

    def _split(self, plan: Plan, grouping: Grouping) -> Modules:
        return split(self.joint, self.captured, plan, self.num_fwd_outputs, **grouping._asdict())

    def _found(self, plan: Plan) -> tuple[Footprint, Grouping]:
        """What its code needs, and how it is grouped for that."""
        key = plan.saved, plan.backward
        if key not in self.found:
            self.found[key] = self._chosen(one_of_each_storage(self.problem.graph, plan))
        return self.found[key]

    def _chosen(self, plan: Plan) -> tuple[Footprint, Grouping]:
        """Parted as little as fits; where that does not, as the plan alone says.

        That is the same under each budget: one that a refusal names is kept.
        """
        peak_bytes = simulate(self.problem, plan).peak_bytes - self.problem.resident_bytes
        found = self._perhaps_sharing(plan, self._where(plan, max(self._room, peak_bytes)))
        if found[0].peak_bytes <= self._room:
            return found
        finest = Grouping(False, self._where(plan, peak_bytes))
        return self._rehearsed(plan, finest), finest

    def _where(self, plan: Plan, above_bytes: float) -> frozenset[int]:
        """Where kernels of ``plan`` are parted to need no more than that above what is resident."""
        of = self.captured.kernels
        if not (self.planned and of) or above_bytes == math.inf:
            return frozenset()
        is_called_at_once = device_of(self.joint).type == "cpu"
        at_once = [
            None if any(map(is_ready_made, nodes)) else is_called_at_once or of[i]
            for i, nodes in enumerate(self.captured.nodes)
        ]
        return parted(self.problem, plan, at_once, self.problem.resident_bytes + above_bytes)

    def _perhaps_sharing(self, plan: Plan, where: frozenset[int]) -> tuple[Footprint, Grouping]:
        """Shared where that fits: it is faster, and may take more. What it takes is tried at one plan.

        Not at one of so much recomputation that it is for the smallest budget: lowering that takes longest.
        """
        sharing, alone = Grouping(True, where), Grouping(False, where)
        if plan.cost_ns > self.problem.forward_ns:
            return self._rehearsed(plan, alone), alone
        if self.sharing_bytes is None:
            shared = self._rehearsed(plan, sharing)
            if shared.peak_bytes <= self._room:
                return shared, sharing
            found = self._rehearsed(plan, alone)
            self.sharing_bytes = shared.peak_bytes - found.peak_bytes
            return found, alone
        found = self._rehearsed(plan, alone)
        if found.peak_bytes + self.sharing_bytes <= self._room:
            shared = self._rehearsed(plan, sharing)
            if shared.peak_bytes <= self._room:
                return shared, sharing
        return found, alone

    @property
    def _room(self) -> float:
        """Bytes above what is resident."""
        budget = self.problem.budget_bytes
        return math.inf if budget is None else budget - self.problem.resident_bytes

    def _rehearsed(self, plan: Plan, grouping: Grouping) -> Footprint:
        """What its code needs, grouped like that; each is lowered once."""
        key = _key(plan, grouping)
        if key not in self.rehearsed:
            boundary = len(self.problem.graph.forward_steps(plan.saved)) if self.planned else None
            self.rehearsed[key] = self._rehearse(self._split(plan, grouping), boundary)
        return self.rehearsed[key][0]

    @garbage_waits()
    def _rehearse(self, modules: Modules, boundary: int | None) -> tuple[Footprint, list[AtOnce]]:
        """Lower both modules and rehearse their code: what it needs, in all and while each step runs.

        Steps are counted through both modules: backward begins at the ``boundary``, if steps are known.
        """
        forward, backward = modules
        inputs = inputs_of(forward)
        with fake_mode_of(inputs):
            rehearsal = Rehearsal(inputs, self.target.rounded, self._taken, self.target.cache_bytes)
            code = self._code(forward, inputs)
            results = self._play(rehearsal, code, inputs)
            at_once = list(_at_once(rehearsal.batches, code, 0))
            in_forward, kept_bytes = rehearsal.peak_bytes, rehearsal.live_bytes
            saved = _in_backward_s_order(results[self.num_fwd_outputs :])
            tangents = inputs_of(backward)[len(saved) :]
            rehearsal.hold([t for t in tangents if holds_tangents() or t.dim() == 0])
            donated = _donated((forward, backward), self.num_fwd_outputs)
            code = self._code(backward, [*saved, *tangents], donated, is_backward=True)
            self._play(rehearsal, code, [*saved, *tangents], saved)
            at_once += _at_once(rehearsal.batches, code, boundary or 0)
        end_bytes = rehearsal.live_bytes + self.problem.epilogue_bytes
        between_bytes = kept_bytes + self.problem.meanwhile_bytes
        peak_bytes = max(rehearsal.peak_bytes, between_bytes, end_bytes)
        return Footprint(peak_bytes, in_forward, kept_bytes), [] if boundary is None else at_once

    def _play(
        self, rehearsal: Rehearsal, code: Code, inputs: Sequence[Any], handed_over: Sequence[Any] = ()
    ) -> tuple[Any, ...]:
        """Play the code, with the tensors that a wrapper in C++ makes of sizes held meanwhile."""
        made: list[torch.Tensor] = []
        if compat.sizes_become_tensors() and device_of(self.joint).type == "cpu":
            made = [torch.empty((), dtype=torch.int64) for x in inputs if _is_size(x)]
        rehearsal.hold(made)
        results = rehearsal.play(code.source, inputs, handed_over)
        rehearsal.release(made)
        return results

    def _code(
        self, module: fx.GraphModule, inputs: Sequence[Any], donated: Any = (), **settings: Any
    ) -> Code:
        if not computes(module):
            return Code(_passing_on(module), {})
        with as_planned(module) if self.planned else nullcontext():
            return compat.lowered(module, inputs, donated, _code_of, **settings)

    def _taken(self, calls: Iterable[Call]) -> Mapping[Hashable, Taken]:
        self.known |= self.target.taken(call for call in calls if call.key not in self.known)
        return self.known


def _key(plan: Plan, grouping: Grouping) -> Hashable:
    return plan.saved, plan.backward, grouping


def _at_once(batches: Sequence[Batch], code: Code, first: int) -> Iterator[AtOnce]:
    """The steps of each batch in ``code``, counted from ``first``, and the bytes alive meanwhile."""
    for batch in batches:
        steps = [code.steps.get(buffer, -1) for buffer in batch.buffers]
        if steps := [first + step for step in steps if step >= 0]:
            yield steps, batch.alive_bytes


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


def _code_of(lowering: Any) -> Code:
    source = str(lowering.codegen()[0].value)
    origins = compat.origins_of_buffers(lowering)
    return Code(source, {buffer: place_of(nodes).step for buffer, nodes in origins.items()})


def _passing_on(module: fx.GraphModule) -> str:
    """What the code would be."""
    names = [n.name for n in module.graph.find_nodes(op="placeholder")]
    results = [str(x) for x in _output_nodes(module)]
    return f"def call(args):\n    [{', '.join(names)}] = args\n    return [{', '.join(results)}]\n"


def _output_nodes(module: fx.GraphModule) -> list[fx.Node | None]:
    (output,) = module.graph.find_nodes(op="output")
    return [n if isinstance(n, fx.Node) else None for n in output.args[0]]
