"""A draft of the search -> Plan: ops in order, views taken again where they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rematc.graph import Graph
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import Profile, judged, simulate
from rematc.solve.clock import spend
from rematc.solve.merge import Merged
from rematc.solve.reduce import Core

STEP_S = 5e-6  # of work, for each step of a plan


@dataclass(frozen=True, slots=True)
class Draft:
    """What is decided about a core: the blocks saved, and the units that run in each stage, in order."""

    saved: frozenset[int]
    runs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A plan, its simulation, the draft that it says, for which core, and the stage of each backward step."""

    plan: Plan
    profile: Profile
    draft: Draft
    merged: Merged
    stages: tuple[int, ...]


def keep_all(core: Core) -> Draft:
    """Everything that is read later is kept, and nothing runs again."""
    read = (b for stage in core.stages for b in stage.reads)
    saved = frozenset(b for b in read if core.born[core.maker[b]] < 0)
    return Draft(saved, tuple(() for _ in core.stages))


def expand(problem: Problem, merged: Merged, draft: Draft) -> Written:
    """The plan that ``draft`` says for the merged core; blocks that forward holds are read from there."""
    full = merged.full
    saved = [merged.full_block[b] for b in draft.saved]
    writer = _Writer(problem.graph)
    writer.at_hand.update(v for b in {*saved, *full.held, *merged.small} for v in full.values[b])
    backward = iter(problem.graph.backward_steps)
    stages: list[int] = []
    for t, (stage, units) in enumerate(zip(merged.core.stages, draft.runs, strict=True)):
        for part in (part for u in units for part in merged.parts[u]):
            writer.run(full.units[part].op)
        if stage.unit is not None:
            writer.must.add(writer.run(full.units[merged.parts[stage.unit][0]].op))
        elif stage.op is not None:
            for op in backward:  # the views before it, and itself
                writer.run(op)
                if op == stage.op:
                    break
        stages += [t] * (len(writer.steps) - len(stages))
    for op in backward:
        writer.run(op)
    writer.take(problem.graph.gradients)
    stages += [len(draft.runs) - 1] * (len(writer.steps) - len(stages))
    saved_values, kept = writer.finish()
    plan = Plan(saved_values, tuple(writer.steps[n] for n in kept))
    profile = simulate(problem, plan)
    spend(STEP_S * len(profile.steps))
    return Written(judged(problem, plan, profile), profile, draft, merged, tuple(stages[n] for n in kept))


def restated(problem: Problem, merged: Merged, written: Written) -> Written:
    """The plan of ``written`` as one for another merged core: a unit runs where the last of its parts does.

    Parts of a unit that run apart become one run, so the peak may be another.
    """
    graph, full = problem.graph, merged.full
    last = {full.units[parts[-1]].op: u for u, parts in enumerate(merged.parts)}
    runs: list[dict[int, None]] = [{} for _ in merged.core.stages]
    for op, t in zip(written.plan.backward, written.stages, strict=True):
        if graph.ops[op].phase == "forward" and op in last and merged.core.stages[t].unit != last[op]:
            runs[t][last[op]] = None
    kept = {graph.values[v].storage for v in written.plan.saved}
    saved = {
        b
        for b, name in enumerate(merged.full_block)
        if any(graph.values[v].storage in kept for v in full.values[name])
    }
    return expand(problem, merged, Draft(frozenset(saved), tuple(map(tuple, runs))))


def written_again(problem: Problem, merged: Merged, plan: Plan) -> Written | None:
    """``plan`` as one for a merged core: see `restated`. None if its stages are in another order."""
    ends = [t for t, stage in enumerate(merged.core.stages) if stage.op is not None]
    stages: list[int] = []
    ended = 0  # stages of which the op has run
    for i in plan.backward:
        t = ends[ended] if ended < len(ends) else len(merged.core.stages) - 1
        stages.append(t)
        ended += merged.core.stages[t].op == i
    if ended < len(ends):
        return None
    profile = simulate(problem, plan)
    none = Draft(frozenset(), ())
    return restated(problem, merged, Written(plan, profile, none, merged, tuple(stages)))


def excesses(problem: Problem, written: Written) -> Iterator[tuple[int | None, int | None, int]]:
    """Each step that breaks the budget: its op, its stage (None: forward), and by how many bytes.

    What is taken between the passes is the first stage's; it has no op.
    """
    assert problem.budget_bytes is not None
    profile = written.profile  # the budget does not change it
    n_forward = len(profile.steps) - len(written.stages)
    stages = [*(None for _ in range(n_forward)), *written.stages]
    if problem.meanwhile_bytes and profile.between_bytes > problem.budget_bytes:
        yield None, 0, profile.between_bytes - problem.budget_bytes
    for step, t, live in zip(profile.steps, stages, profile.live_bytes, strict=True):
        if live > problem.budget_bytes:
            yield step.op, t, live - problem.budget_bytes


def excess_bytes(problem: Problem, written: Written) -> int:
    """By how much steps are over the budget, all together: what is over in few places is mended soon."""
    return sum(excess for *_, excess in excesses(problem, written))


class _Writer:
    """Writes backward steps, taking views again when the memory below them was made anew."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.at_hand = {*graph.inputs, *graph.tangents}
        self.must: set[int] = set()
        self.steps: list[int] = []
        self.views_on: dict[int, set[int]] = {}

    def run(self, i: int) -> int:
        """Write op ``i``, the views that it reads before it. Returns its place in ``steps``."""
        self.take(self.graph.ops[i].inputs)
        self._append(i)
        return len(self.steps) - 1

    def take(self, values: Iterable[int]) -> None:
        """Make sure that ``values`` are at hand: those that are not are views, taken now."""
        for v in values:
            if v not in self.at_hand:
                self.run(self.graph.producer[v])

    def finish(self) -> tuple[tuple[int, ...], list[int]]:
        """The values read before they are made, to be saved, and the places of the steps worth running.

        A draft may run what no later step reads, or reads only in a step that is itself left out.
        """
        graph, kept = self.graph, []
        wanted = set(graph.gradients)
        for n in reversed(range(len(self.steps))):
            op = graph.ops[self.steps[n]]
            if op.phase == "backward" or n in self.must or not wanted.isdisjoint(op.outputs):
                kept.append(n)
                wanted.difference_update(op.outputs)
                wanted.update(op.inputs)
        given = {*graph.inputs, *graph.tangents}
        return tuple(sorted(wanted - given)), kept[::-1]

    def _append(self, i: int) -> None:
        op = self.graph.ops[i]
        self.steps.append(i)
        view = i in self.graph.views
        for v in op.outputs:
            storage = self.graph.values[v].storage
            if not view:
                self.at_hand -= self.views_on.pop(storage, set())
            elif op.phase == "forward":
                self.views_on.setdefault(storage, set()).add(v)
        self.at_hand.update(op.outputs)
