"""A `Problem` folded into a `Sequence`: values into blocks, ops into units, the order into stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from benchmarks.oracles.sequence import Sequence, Span, Stage, Unit, is_dag
from rematc.errors import ProblemError
from rematc.problem import Problem


def sequence(problem: Problem, pauses: int = 0) -> Sequence:
    """Pose ``problem`` as a row of stages, with ``pauses`` stages without an op before each op.

    Raises `ProblemError` for `Problem.meanwhile_bytes`, which these formulations do not know.
    """
    if problem.meanwhile_bytes:
        raise ProblemError("meanwhile_bytes: neither formulation has what is taken between the passes")
    folded = _Folded(problem)
    stages = folded.stages(pauses)
    spans = tuple(folded.spans(stages))
    return Sequence(
        problem,
        tuple(folded.sizes),
        tuple(tuple(v for v in vs if v in folded.useful) for vs in folded.values),
        tuple(folded.units),
        tuple(_trimmed(stages, folded.units, spans)),
        spans,
        tuple(sorted(folded.useful & folded.resident_views)),
    )


class _Folded:
    """Values by block, ops by unit."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        g = self.graph
        self.sizes: list[int] = []
        self.values: list[list[int]] = []  # those that forward makes, by block
        self.block: dict[int, int | None] = dict.fromkeys(g.inputs)  # None: resident
        self.resident_views: set[int] = set()
        self.units: list[Unit] = []
        self.unit_of: dict[int, int] = {}  # by op; a backward view that is no unit goes with the one before
        self.early = frozenset(g.forward_steps(()))
        runs = {*self.early, *g.backward_steps, *g.ancestors(g.gradients)}
        runs |= g.ancestors(v for i in g.backward_steps for v in g.ops[i].inputs)
        again = [i for i in runs if g.ops[i].phase == "forward" and not g.ops[i].needed]
        self.useful = {v for i in (*g.backward_steps, *again) for v in g.ops[i].inputs} | {*g.gradients}
        for v in g.tangents:
            self.new_block(v)
        for i in sorted(runs):
            self.add(i)

    def new_block(self, value: int, size: int | None = None) -> None:
        self.block[value] = len(self.sizes)
        storage = self.graph.values[value].storage
        self.sizes.append(self.graph.storage_bytes[storage] if size is None else size)
        self.values.append([])

    def blocks(self, values: Iterable[int]) -> tuple[int, ...]:
        found = (self.block[v] for v in values)
        return tuple(dict.fromkeys(b for b in found if b is not None))

    def is_forward(self, u: int) -> bool:
        return self.graph.ops[self.units[u].op].phase == "forward"

    @property
    def forward_blocks(self) -> set[int]:
        return {b for u, unit in enumerate(self.units) if self.is_forward(u) for b in unit.makes}

    def add(self, i: int) -> None:
        """Op ``i`` as a unit, or as a view: see the module's docstring."""
        g, op, cost = self.graph, self.graph.ops[i], self.problem.costs[i]
        joined = {g.values[v].storage: self.block[v] for v in op.inputs} | dict.fromkeys(g.resident)
        storages = [g.values[v].storage for v in op.outputs]
        onto = {joined[s] for s in storages if s in joined}
        priced = cost.runtime_ns or cost.workspace_bytes or op.pin or op.needed
        if (
            len(onto) == 1
            and joined.keys() >= {*storages}
            and {*self.blocks(op.inputs)} <= onto
            and not priced
        ):
            self.add_view(i, *onto)
            return
        if onto - {None}:
            raise ProblemError(f"op {op.name!r} makes a view at a price: not in this oracle's class")
        made: dict[int, int] = {}
        for v, storage in zip(op.outputs, storages, strict=True):
            if storage not in made:
                self.new_block(v, 0 if storage in joined else None)
                made[storage] = len(self.sizes) - 1
            self.name(v, made[storage])
        self.add_unit(i, tuple(made.values()))

    def name(self, value: int, block: int) -> None:
        self.block[value] = block
        if self.graph.ops[self.graph.producer[value]].phase == "forward":
            self.values[block].append(value)

    def add_unit(self, i: int, makes: tuple[int, ...]) -> None:
        op, cost = self.graph.ops[i], self.problem.costs[i]
        reads = self.blocks(op.inputs)
        self.unit_of[i] = len(self.units)
        once = op.pin is not None
        self.units.append(Unit(i, reads, makes, cost.runtime_ns, cost.workspace_bytes, once, ()))

    def add_view(self, i: int, b: int | None) -> None:
        """A view in forward follows the maker of its block; in backward, what runs before it."""
        op = self.graph.ops[i]
        if op.phase == "backward":
            self.block.update(dict.fromkeys(op.outputs, b))
            if b in self.forward_blocks or not self.units or self.is_forward(len(self.units) - 1):
                self.add_unit(i, ())
            else:
                self.follow(len(self.units) - 1, i)
        elif b is None:
            self.block.update(dict.fromkeys(op.outputs, b))
            self.resident_views.update(op.outputs)
        else:
            for v in op.outputs:
                self.name(v, b)
            if not self.useful.isdisjoint(op.outputs):
                self.follow(next(u for u, unit in enumerate(self.units) if b in unit.makes), i)

    def follow(self, u: int, i: int) -> None:
        self.units[u] = replace(self.units[u], views=(*self.units[u].views, i))
        self.unit_of[i] = u

    def stages(self, pauses: int) -> tuple[Stage, ...]:
        posed = self.dag_stages(pauses) if is_dag(self.graph) else self.training_stages(pauses)
        return tuple(posed)

    def training_stages(self, pauses: int) -> Iterator[Stage]:
        g, held = self.graph, {*self.blocks(self.graph.outputs)}
        forward = [u for u in range(len(self.units)) if self.is_forward(u)]
        must = frozenset(u for u in forward if self.units[u].op in self.early)
        yield Stage(tuple(forward), must)
        again = [u for u in forward if self.may_repeat(u, u in must, held)]
        for u in range(len(self.units)):
            if not self.is_forward(u):
                yield from [Stage(tuple(again), frozenset())] * pauses
                yield Stage((*again, u), frozenset((u,)))
        if (self.forward_blocks - held) & {*self.blocks(g.gradients)}:
            yield from [Stage(tuple(again), frozenset())] * (pauses + 1)

    def may_repeat(self, u: int, must: bool, held: set[int]) -> bool:
        unit = self.units[u]
        if self.graph.ops[unit.op].needed or (must and unit.once):
            return False
        return not held & {*unit.makes}

    def dag_stages(self, pauses: int) -> Iterator[Stage]:
        for u in range(len(self.units)):
            before = tuple(w for w in range(u) if not self.units[w].once)
            yield from [Stage(before, frozenset())] * (pauses if u else 0)
            yield Stage((*before, u), frozenset((u,)))

    def spans(self, stages: tuple[Stage, ...]) -> Iterator[Span]:
        """What is returned or held, tangents as they arrive, forward memory that a backward view is on."""
        g, end = self.graph, len(stages)
        for b in self.blocks(g.outputs):
            yield Span(b, 1, end)
        for v in g.tangents:
            yield Span(self.blocks([v])[0], 1, end if v in g.held else 1)
        for b in self.blocks(g.gradients):
            yield Span(b, end, end)
        stage_of = {u: t for t, stage in enumerate(stages) if t for u in stage.must}
        last = dict.fromkeys(g.gradients, end)
        for i in reversed(g.backward_steps):
            for v in g.ops[i].inputs:
                last.setdefault(v, stage_of[self.unit_of[i]])
        for i in g.backward_steps:
            t = stage_of[self.unit_of[i]]
            for v in g.ops[i].outputs:
                on = self.forward_blocks.intersection(self.blocks([v]))
                if last.get(v, t) > t:
                    yield from (Span(b, t + 1, last[v]) for b in on)  # one at most


def _trimmed(stages: tuple[Stage, ...], units: list[Unit], spans: Iterable[Span]) -> Iterator[Stage]:
    """The stages without units of which nothing can be read there or later."""
    maker = {b: u for u, unit in enumerate(units) for b in unit.makes}
    wanted_at: dict[int, list[int]] = {}
    for s in spans:
        wanted_at.setdefault(min(s.last, len(stages) - 1), []).append(s.block)
    useful: set[int] = set()
    found: list[Stage] = []
    for t in reversed(range(len(stages))):
        stack = [*wanted_at.get(t, ()), *(b for u in stages[t].must for b in units[u].reads)]
        while stack:
            u = maker.get(stack.pop())
            if u is not None and u not in useful:
                useful.add(u)
                stack.extend(units[u].reads)
        found.append(Stage(tuple(u for u in stages[t].may if u in useful | stages[t].must), stages[t].must))
    return reversed(found)
