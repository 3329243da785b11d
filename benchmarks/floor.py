"""A lower bound on the peak of every plan, from the graph alone: no budget below it can be met.

While a step runs there must be what it reads, what it makes, its workspace, and what nobody can make again
and someone still reads. Steps are those that every plan runs: the backward ops, and the forward ops that
results and effects need.
"""

from __future__ import annotations

from collections.abc import Iterator

from rematc.errors import BudgetError
from rematc.graph import Graph
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.solve import solve


def accepted_bytes(problem: Problem, options: SolveOptions) -> int:
    """The smallest budget above what is resident that the solver accepts, as it says when it refuses."""
    try:
        solve(problem.with_budget(1), options)
    except BudgetError as e:
        return e.minimum_bytes - problem.resident_bytes
    return 0


def least_bytes(problem: Problem) -> int:
    """A bound on the peak of every plan, above what is resident.

    >>> from rematc.graph import Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 8, 4, 8), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...            Op("h", "mul", (1, 3), (4,), phase="backward")), (0,), (3,), (2,), (4,))
    >>> least_bytes(Problem(g, (OpCost(5),) * 3))
    28
    """
    g = problem.graph
    early = g.forward_steps(())
    steps = [*early, *g.backward_steps] if g.backward or early else sorted(g.ancestors(g.gradients))
    alive: list[set[int]] = [set() for _ in range(len(steps) + 1)]
    for storage, first, last in _stays(g, steps, len(early)):
        for n in range(first, last + 1):
            alive[n].add(storage)
    work = [problem.costs[i].workspace_bytes for i in steps] + [problem.epilogue_bytes]
    for n, i in enumerate(steps):
        alive[n] |= {g.values[v].storage for v in (*g.ops[i].inputs, *g.ops[i].outputs)}
    return max(
        sum(g.storage_bytes[s] for s in there - g.resident) + w for there, w in zip(alive, work, strict=True)
    )


def _stays(g: Graph, steps: list[int], boundary: int) -> Iterator[tuple[int, int, int]]:
    """(storage, first, last): alive in every plan from step ``first`` to step ``last``."""
    end, at = len(steps), {i: n for n, i in enumerate(steps)}
    if not boundary and not g.backward:  # a DAG: any op may run again, the result is there at the end
        yield from ((g.values[v].storage, end, end) for v in g.gradients)
        return
    last: dict[int, int] = dict.fromkeys((*g.gradients, *g.outputs, *g.held), end)
    for i in g.backward_steps:
        last.update({v: max(last.get(v, 0), at[i]) for v in g.ops[i].inputs})
    for v in g.tangents:
        if v in last:
            yield g.values[v].storage, boundary, last[v]
    for n, i in enumerate(steps):
        op = g.ops[i]
        once = op.phase == "backward" or op.pin or op.needed
        for v in op.outputs:
            if v in g.outputs or (once and v in last):
                yield g.values[v].storage, n, last[v]
    yield from ((g.values[v].storage, end, end) for v in g.gradients)
