"""The judge: walk a plan step by step, count live bytes, refuse what can't run.

Shares no code with the solver. Each run of an op makes new *instances* of the storages it
allocates; a view joins the instance it was taken of. An instance is alive from the step that
makes it to the last step that reads any value on it, or to the end if the caller holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rematc.errors import OUTSIDE, PlanError
from rematc.graph import Graph
from rematc.plan import Plan
from rematc.problem import Problem

BETWEEN = -1  # the step of a peak between forward and backward


@dataclass(frozen=True, slots=True)
class Step:
    """One run of an op: its index, the pass it runs in, and whether it ran before."""

    op: int
    phase: str
    recompute: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """Live bytes at each step of a plan, resident (and lowering, see `Problem`) included.

    ``live_bytes[i]`` counts what is alive while ``steps[i]`` runs, its workspace too;
    ``between_bytes`` what is needed when forward is over and backward has not begun, ``end_bytes`` once the
    last has run. ``at_peak`` lists (value name, bytes), largest first, ``peak_step`` is the index of the step
    (``len(steps)``: the end, `BETWEEN`: between the passes).
    """

    steps: tuple[Step, ...]
    live_bytes: tuple[int, ...]
    between_bytes: int
    end_bytes: int
    peak_bytes: int
    peak_step: int
    at_peak: tuple[tuple[str, int], ...]
    recompute_ns: int

    @property
    def forward_bytes(self) -> int:
        """The most that is alive while the forward pass runs."""
        passes = zip(self.steps, self.live_bytes, strict=True)
        return max((live for step, live in passes if step.phase == "forward"), default=0)

    def peak_name(self, graph: Graph) -> str:
        """Name of the op at the peak."""
        if self.peak_step == BETWEEN:
            return "what runs between forward and backward"
        if self.peak_step == len(self.steps):
            return "end of backward"
        return graph.ops[self.steps[self.peak_step].op].name


class _Instance:
    __slots__ = ("birth", "death", "name", "size")

    def __init__(self, name: str, size: int, birth: int) -> None:
        self.name, self.size, self.birth, self.death = name, size, birth, birth


class _Walk:
    """The state of one walk: which instance each value is bound to, and when each is alive."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        self.resident = _Instance("resident", 0, 0)
        self.instances: list[_Instance] = []
        self.bound: dict[int, _Instance] = dict.fromkeys(self.graph.inputs, self.resident)
        self.steps: list[Step] = []
        self.ran: set[int] = set()

    def new(self, value: int, birth: int) -> _Instance:
        v = self.graph.values[value]
        instance = _Instance(v.name, self.graph.storage_bytes[v.storage], birth)
        self.instances.append(instance)
        return instance

    def read(self, value: int, step: int, who: str) -> _Instance:
        instance = self.bound.get(value)
        if instance is None:
            name = self.graph.values[value].name
            raise PlanError(f"{who} reads {name!r}, which is neither saved nor recomputed there")
        instance.death = step
        return instance

    def run(self, op_index: int, phase: str) -> None:
        op, now = self.graph.ops[op_index], len(self.steps)
        again = op_index in self.ran
        if op.phase == "forward" and phase == "backward" and op.needed:
            raise PlanError(f"op {op.name!r} must run in forward alone: {op.needed}")
        if again and op.pin:
            raise PlanError(f"op {op.name!r} may not run twice: {op.pin}")
        if again and op.phase == "backward":
            raise PlanError(f"backward op {op.name!r} runs twice")
        values, who = self.graph.values, f"op {op.name!r}"
        joined = {values[v].storage: self.read(v, now, who) for v in op.inputs}
        for v in op.outputs:
            storage = values[v].storage
            if storage in self.graph.resident:
                joined[storage] = self.resident
            elif storage not in joined:
                joined[storage] = self.new(v, now)
            self.bound[v] = joined[storage]
        self.steps.append(Step(op_index, phase, again))
        self.ran.add(op_index)


def simulate(problem: Problem, plan: Plan) -> Profile:
    """Walk ``plan`` over ``problem`` and return its `Profile`.

    Raises `PlanError` where the plan reads a value that is not at hand, runs a pinned op a second
    time, leaves out a backward op or swaps two that `Graph.kept_in_order` names.
    Does not look at the budget: see `validate`.
    """
    graph = problem.graph
    _check_indices(graph, plan)
    walk = _Walk(problem)
    for i in graph.forward_steps(plan.saved):
        walk.run(i, "forward")
    boundary = len(walk.steps)
    held = [_at(walk, v, "the forward pass returns") for v in graph.outputs]
    saved = {v: _at(walk, v, "the plan saves") for v in plan.saved}
    for instance in saved.values():
        instance.death = max(instance.death, boundary)
    at_hand = dict.fromkeys(graph.inputs, walk.resident)
    tangents = {v: walk.new(v, boundary) for v in graph.tangents}
    walk.bound = {**at_hand, **saved, **tangents}
    _check_order(graph, plan)
    for i in plan.backward:
        walk.run(i, "backward")
    held += [_at(walk, v, "the backward pass returns") for v in graph.gradients]
    end = len(walk.steps)
    held += [tangents[v] for v in graph.held]
    for instance in held:
        instance.death = end
    return _profile(problem, walk, boundary, end)


def judged(problem: Problem, plan: Plan, profile: Profile | None = None) -> Plan:
    """``plan`` with its peak, cost, budget and digest filled in from the simulation: its ``profile``.

    A bound above the cost was proven of other costs: it is dropped, and with it what was proven.
    """
    profile = profile or simulate(problem, plan)
    if plan.bound_ns > profile.recompute_ns:
        status = "feasible" if plan.status == "optimal" else plan.status
        plan = replace(plan, bound_ns=0, status=status)
    return replace(
        plan,
        cost_ns=profile.recompute_ns,
        peak_bytes=profile.peak_bytes,
        budget_bytes=problem.budget_bytes,
        digest=problem.digest,
    )


def validate(problem: Problem, plan: Plan) -> Profile:
    """`simulate`, and raise `PlanError` unless the plan's peak, cost and problem are what it says."""
    if plan.digest and plan.digest != problem.digest:
        raise PlanError(f"the plan is for problem {plan.digest}, and this is {problem.digest}")
    profile = simulate(problem, plan)
    budget = problem.budget_bytes
    if budget is not None and profile.peak_bytes > budget:
        name = profile.peak_name(problem.graph)
        raise PlanError(
            f"the plan peaks at {profile.peak_bytes} bytes at {name!r}, over the budget of {budget}"
        )
    if (plan.peak_bytes, plan.cost_ns) != (profile.peak_bytes, profile.recompute_ns):
        raise PlanError(
            f"the plan claims a peak of {plan.peak_bytes} bytes and a cost of {plan.cost_ns} ns; "
            f"they are {profile.peak_bytes} and {profile.recompute_ns}"
        )
    if plan.bound_ns > plan.cost_ns:
        raise PlanError(f"the plan's lower bound {plan.bound_ns} is above its cost {plan.cost_ns}")
    return profile


def _at(walk: _Walk, value: int, who: str) -> _Instance:
    return walk.read(value, max(len(walk.steps) - 1, 0), who)


def _check_indices(graph: Graph, plan: Plan) -> None:
    for what, given, n in (("value", plan.saved, len(graph.values)), ("op", plan.backward, len(graph.ops))):
        if unknown := [i for i in given if not 0 <= i < n]:
            raise PlanError(f"the plan names {what} {unknown[0]}, and the graph has 0 to {n - 1}")


def _check_order(graph: Graph, plan: Plan) -> None:
    """Each backward op once, in any order that keeps effects: that reads come after makes, the walk sees."""
    given = [i for i in plan.backward if graph.ops[i].phase == "backward"]
    if sorted(given) != list(graph.backward_steps):
        raise PlanError("the plan's backward ops are not the graph's, each once")
    place = {i: k for k, i in enumerate(given)}
    for first, then in graph.kept_in_order:
        if place[first] > place[then]:
            names = f"{graph.ops[then].name!r} before {graph.ops[first].name!r}"
            raise PlanError(
                f"the plan runs backward op {names}: one of them has effects, so they stay in order"
            )


def _profile(problem: Problem, walk: _Walk, boundary: int, end: int) -> Profile:
    change = [0] * (end + 2)
    for it in walk.instances:
        change[it.birth] += it.size
        change[it.death + 1] -= it.size
    live, now = [], problem.base_bytes
    for i, step in enumerate(walk.steps):
        now += change[i]
        live.append(now + problem.costs[step.op].workspace_bytes)
    end_bytes = now + change[end] + problem.epilogue_bytes
    kept = [it for it in walk.instances if it.birth < boundary <= it.death]
    between_bytes = problem.resident_bytes + sum(it.size for it in kept) + problem.meanwhile_bytes
    peak_step = max(range(end + 1), key=[*live, end_bytes].__getitem__)
    alive = [(it.name, it.size) for it in walk.instances if it.birth <= peak_step <= it.death and it.size]
    peak_bytes = max([*live, end_bytes])
    if problem.meanwhile_bytes and between_bytes > peak_bytes:  # else there is more a step before
        peak_bytes = between_bytes
        peak_step = BETWEEN
        alive = [*((it.name, it.size) for it in kept if it.size), (OUTSIDE, problem.meanwhile_bytes)]
    return Profile(
        steps=tuple(walk.steps),
        live_bytes=tuple(live),
        between_bytes=between_bytes,
        end_bytes=end_bytes,
        peak_bytes=peak_bytes,
        peak_step=peak_step,
        at_peak=tuple(sorted(alive, key=lambda named: -named[1])),
        recompute_ns=sum(problem.costs[s.op].runtime_ns for s in walk.steps if s.recompute),
    )
