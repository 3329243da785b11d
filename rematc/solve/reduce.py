"""Problem -> Core: what the MILP sees. Views are folded away, what can't matter is left out.

A *block* is one storage that a forward op makes: the unit in which memory is kept or dropped. A
view costs nothing and is taken again wherever it is read, so to read a view is to read its block.
The backward pass is a row of *stages*: recomputation, then one backward op.

A graph without a backward pass, whose ops nobody needs before the end, is a general one, as Checkmate's
and Moccasin's problems are: each op's first run is a stage, and from then on it may run again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from rematc.graph import Op
from rematc.problem import Problem


@dataclass(frozen=True, slots=True)
class Unit:
    """A forward op that makes memory: ``reads`` and ``makes`` are blocks, ``op`` its index in the graph.

    ``required``: the forward pass runs it whatever is saved. ``pinned``: it can't run twice.
    """

    op: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    cost_ns: int
    workspace_bytes: int
    required: bool
    pinned: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """Recomputation, then op ``op``, which reads the blocks ``reads``.

    Forward blocks aside, ``before_bytes`` are alive while recomputation runs and ``op_bytes`` while ``op``
    does. ``op`` None: recomputation alone, or what must be there in the end. ``unit``: the unit whose first
    run ``op`` is, in a graph without a backward pass. ``is_between``: no recomputation, and what is taken
    between the passes in place of an op. ``holds``: blocks there since an earlier stage, made again or not:
    a view that backward took holds them.
    """

    op: int | None
    reads: tuple[int, ...]
    before_bytes: int
    op_bytes: int
    unit: int | None = None
    is_between: bool = False
    holds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Core:
    """The reduced problem.

    Block b has ``block_bytes[b]`` bytes; ``values[b]`` are the values that its op puts on it. Blocks
    in ``held`` are results of the forward pass: from their birth to the end of the step they are there.
    """

    block_bytes: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]
    units: tuple[Unit, ...]
    stages: tuple[Stage, ...]
    held: frozenset[int]
    base_bytes: int

    @cached_property
    def maker(self) -> tuple[int, ...]:
        """Unit by the block that it makes."""
        owner = {b: u for u, unit in enumerate(self.units) for b in unit.makes}
        return tuple(owner[b] for b in range(len(self.block_bytes)))

    @cached_property
    def born(self) -> tuple[int, ...]:
        """The stage in which a unit runs first; -1 where that is in the forward pass."""
        found = {stage.unit: t for t, stage in enumerate(self.stages)}
        return tuple(found.get(u, -1) for u in range(len(self.units)))

    @cached_property
    def extra(self) -> tuple[int, ...]:
        """Units that the forward pass needs for nothing but what is saved."""
        return tuple(u for u, unit in enumerate(self.units) if not unit.required)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Units by the block that they read."""
        found: list[list[int]] = [[] for _ in self.block_bytes]
        for u, unit in enumerate(self.units):
            for b in unit.reads:
                found[b].append(u)
        return tuple(map(tuple, found))

    @property
    def has_forward(self) -> bool:
        """Does a forward pass make what stages read? Else units first run as the ops of stages."""
        return max(self.born, default=0) < 0

    def upstream(self, blocks: Iterable[int], kept: frozenset[int] = frozenset()) -> frozenset[int]:
        """Units that make ``blocks`` from what is held, resident or ``kept`` alone, pinned ones included."""
        found: set[int] = set()
        stack, ends = [b for b in blocks if b not in kept], self.held | kept
        while stack:
            u = self.maker[stack.pop()]
            if u not in found:
                found.add(u)
                stack.extend(b for b in self.units[u].reads if b not in ends)
        return frozenset(found)


def reduce(problem: Problem, *, pauses: int = 0) -> Core:
    """Fold ``problem`` into a `Core`.

    With ``pauses`` stages without an op before each backward op every order of recomputation that pays can
    be told. For small graphs.
    """
    (core,) = reduce_each(problem, [problem.graph.backward_steps], pauses=pauses)
    return core


def reduce_each(problem: Problem, orders: Iterable[tuple[int, ...]], *, pauses: int = 0) -> tuple[Core, ...]:
    """``problem`` with its backward ops in each of ``orders``, as a `Core`; all but its stages is common."""
    folded = _Folded(problem)
    units = folded.units()
    held = folded.blocks(problem.graph.outputs)
    sizes = tuple(folded.size(values[0]) for values in folded.values)
    if problem.graph.is_general:
        units = [replace(u, required=True) for u in units]
        each = [_first_runs(folded, units)]
    else:
        held_bytes = sum(sizes[b] for b in held)
        each = [_stages(folded, order, held, held_bytes, pauses) for order in orders]
    fixed = sizes, tuple(folded.values), tuple(units)
    return tuple(Core(*fixed, tuple(stages), held, problem.base_bytes) for stages in each)


class _Folded:
    """The graph with views folded into the values that own their storage."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        self.known: dict[int, frozenset[int]] = {v: frozenset() for v in self.graph.inputs}
        self.known |= {v: frozenset((v,)) for v in self.graph.tangents}
        self.views: set[int] = set()
        self.block_of: dict[int, int] = {}
        self.values: list[tuple[int, ...]] = []
        for i, op in enumerate(self.graph.ops):
            view = i in self.graph.views
            if view:
                self.views.add(i)
            for v in op.outputs:
                self.known[v] = self.roots(op.inputs) if view else frozenset((v,)) | self.shared(op, v)

    def shared(self, op: Op, output: int) -> frozenset[int]:
        """The values that own the memory on which ``op``, which is more than a view, puts ``output``."""
        storage = self.graph.values[output].storage
        return self.roots(v for v in op.inputs if self.graph.values[v].storage == storage)

    def roots(self, values: Iterable[int]) -> frozenset[int]:
        """The values that own the memory which ``values`` are read from; none for what is resident."""
        return frozenset().union(*(self.known[v] for v in values))

    def blocks(self, values: Iterable[int]) -> frozenset[int]:
        """The forward blocks that ``values`` are read from."""
        return frozenset(self.block_of[v] for v in self.roots(values) if v in self.block_of)

    def size(self, value: int) -> int:
        """Bytes that ``value`` adds: none on memory that was there, be it resident or what its op reads."""
        storage = self.graph.values[value].storage
        is_new = storage not in self.graph.resident and len(self.known[value]) == 1
        return self.graph.storage_bytes[storage] if is_new else 0

    def units(self) -> list[Unit]:
        g = self.graph
        required = set(g.forward_steps(()))
        read = [v for b in g.backward_steps for v in g.ops[b].inputs]
        matters = required | g.ancestors([*read, *g.gradients])
        units = []
        for i in g.forward:
            if i in self.views or i not in matters:
                continue
            op, cost = g.ops[i], self.problem.costs[i]
            reads = tuple(sorted(self.blocks(op.inputs)))
            makes = self._made(op.outputs)
            ns, workspace = cost.runtime_ns, cost.workspace_bytes
            units.append(Unit(i, reads, makes, ns, workspace, i in required, bool(op.pin)))
        return units

    def _made(self, outputs: tuple[int, ...]) -> tuple[int, ...]:
        """New blocks for the outputs of an op: one for each storage among them."""
        by_storage: dict[int, list[int]] = {}
        for v in outputs:
            by_storage.setdefault(self.graph.values[v].storage, []).append(v)
        first = len(self.values)
        for values in by_storage.values():
            self.block_of.update(dict.fromkeys(values, len(self.values)))
            self.values.append(tuple(values))
        return tuple(range(first, len(self.values)))


def _first_runs(folded: _Folded, units: list[Unit]) -> list[Stage]:
    """A stage for each unit, and at the end one for what must be there then."""
    resident = folded.problem.base_bytes
    stages = []
    for u, unit in enumerate(units):
        made = sum(folded.size(folded.values[b][0]) for b in unit.makes)
        op_bytes = resident + made + unit.workspace_bytes
        stages.append(Stage(unit.op, unit.reads, resident, op_bytes, u))
    ends = tuple(sorted(folded.blocks(folded.graph.gradients)))
    return [*stages, Stage(None, ends, resident, resident + folded.problem.epilogue_bytes)]


def _stages(
    folded: _Folded, order: tuple[int, ...], held: frozenset[int], held_bytes: int, pauses: int
) -> list[Stage]:
    problem = folded.problem
    steps = [i for i in order if i not in folded.views]
    before, during = _backward_bytes(folded, steps)
    reads, holds = (
        [tuple(sorted(blocks - held)) for blocks in each] for each in _forward_reads(folded, order, steps)
    )
    base = held_bytes + problem.base_bytes
    stages: list[Stage] = []
    if problem.meanwhile_bytes:
        there = held_bytes + problem.resident_bytes
        stages.append(Stage(None, (), there, there + problem.meanwhile_bytes, is_between=True))
    for k, i in enumerate(steps):
        stages += [Stage(None, (), base + before[k], 0, holds=holds[k])] * pauses
        op_bytes = base + during[k] + problem.costs[i].workspace_bytes
        stages.append(Stage(i, reads[k], base + before[k], op_bytes, holds=holds[k]))
    end = base + before[-1]
    stages += [Stage(None, (), end, 0, holds=holds[-1])] * pauses
    return [*stages, Stage(None, reads[-1], end, end + problem.epilogue_bytes, holds=holds[-1])]


def _forward_reads(
    folded: _Folded, order: tuple[int, ...], steps: list[int]
) -> tuple[list[set[int]], list[set[int]]]:
    """The forward blocks that each backward step needs at hand, and at last those that are gradients.

    A view that the backward pass takes of a forward block holds it from there to its last reader. Also
    returned are, for each step, those held since one before it.
    """
    graph = folded.graph
    reads = [set(folded.blocks(graph.ops[i].inputs)) for i in steps]
    reads.append(set(folded.blocks(graph.gradients)))
    holds: list[set[int]] = [set() for _ in reads]
    taken = 0  # steps before the view
    for i in order:
        if i not in folded.views:
            taken += 1
        elif blocks := folded.blocks(graph.ops[i].inputs):
            for k in range(taken, _last_read(folded, order, steps, i) + 1):
                reads[k] |= blocks
                holds[k] |= blocks if k > taken else set()
    return reads, holds


def _last_read(folded: _Folded, order: tuple[int, ...], steps: list[int], view: int) -> int:
    """The last step that reads what backward op ``view`` makes, be it through other views."""
    graph = folded.graph
    made = set(graph.ops[view].outputs)
    for i in order:
        if i in folded.views and made & set(graph.ops[i].inputs):
            made |= set(graph.ops[i].outputs)
    if made & set(graph.gradients):
        return len(steps)
    return max((k for k, i in enumerate(steps) if made & set(graph.ops[i].inputs)), default=-1)


def _backward_bytes(folded: _Folded, steps: list[int]) -> tuple[list[int], list[int]]:
    """Bytes of backward values alive just before each step (and at the end), and while it runs."""
    graph, end = folded.graph, len(steps)
    storage = [v.storage for v in graph.values]
    birth = {storage[v]: -1 for v in graph.tangents}
    for k, i in enumerate(steps):
        for v in graph.ops[i].outputs:
            birth.setdefault(storage[v], k)
    forward = {storage[v] for values in folded.values for v in values} | graph.resident
    birth = {s: k for s, k in birth.items() if s not in forward}
    death = dict(birth)
    for k, i in enumerate(steps):
        read = folded.roots(graph.ops[i].inputs)
        death.update((storage[v], k) for v in read if storage[v] in death)
    ends = [*folded.roots(graph.gradients), *graph.held]
    death.update((storage[v], end) for v in ends if storage[v] in death)
    before, during = [0] * (end + 2), [0] * (end + 2)
    for s, born in birth.items():
        for alive, since in ((before, born + 1), (during, max(born, 0))):
            if since <= death[s]:
                alive[since] += graph.storage_bytes[s]
                alive[death[s] + 1] -= graph.storage_bytes[s]
    return list(accumulate(before[:-1])), list(accumulate(during[:-1]))
