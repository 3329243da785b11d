"""What the MILP decided -> Plan: ops in order, views taken again where they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rematc.graph import Graph
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import judged
from rematc.solve.reduce import Core, Stage, is_view


def expand(
    problem: Problem, core: Core, stages: Sequence[Stage], saved: Iterable[int], runs: Sequence[Iterable[int]]
) -> Plan:
    """The plan that saves the blocks ``saved``, and runs the units ``runs[t]`` again in ``stages[t]``.

    Blocks that forward holds anyway are read from there. Units of a stage run in forward's order.
    """
    writer = _Writer(problem.graph)
    writer.at_hand.update(v for b in {*saved, *core.held} for v in core.values[b])
    backward = problem.graph.backward_steps
    done = 0
    for stage, units in zip(stages, runs, strict=True):
        for op in sorted(core.units[u].op for u in units):
            writer.run(op)
        if stage.last is not None:
            upto = backward.index(stage.last) + 1
            for op in backward[done:upto]:
                writer.run(op)
            done = upto
    for op in backward[done:]:
        writer.run(op)
    writer.take(problem.graph.gradients)
    return judged(problem, Plan(tuple(sorted(writer.read_saved)), tuple(writer.steps)))


class _Writer:
    """Writes backward steps, taking views again when the memory below them was made anew."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.at_hand = {*graph.inputs, *graph.tangents}
        self.made_here: set[int] = {*graph.inputs, *graph.tangents}
        self.read_saved: set[int] = set()
        self.steps: list[int] = []
        self.views_on: dict[int, set[int]] = {}

    def run(self, i: int) -> None:
        """Write op ``i``, the views that it reads before it."""
        self.take(self.graph.ops[i].inputs)
        self._append(i)

    def take(self, values: Iterable[int]) -> None:
        """Make sure that ``values`` are at hand: those that are not are views, taken now."""
        for v in values:
            if v not in self.at_hand:
                self.run(self.graph.producer[v])
            elif v not in self.made_here:
                self.read_saved.add(v)

    def _append(self, i: int) -> None:
        op = self.graph.ops[i]
        self.steps.append(i)
        view = is_view(self.graph, i)
        for v in op.outputs:
            storage = self.graph.values[v].storage
            if not view:
                self.at_hand -= self.views_on.pop(storage, set())
            elif op.phase == "forward":
                self.views_on.setdefault(storage, set()).add(v)
        self.at_hand.update(op.outputs)
        self.made_here.update(op.outputs)
