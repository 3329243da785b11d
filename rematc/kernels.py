"""Where kernels are parted: what one makes is all there when it begins, and what it reads until it ends.

A plan counts step by step, so steps that are computed at once can need more than it says. Inductor's C++ code
computes everything between two ready-made kernels at once, other code what is fused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate


def parted(
    problem: Problem, plan: Plan, at_once: Sequence[Hashable | None], limit_bytes: float
) -> frozenset[int]:
    """The steps of ``plan`` before which its kernels are parted, so that none needs more than the limit.

    Those are positions in `Profile.steps`. Steps one after the other are computed at once where ``at_once``,
    by ops, is equal; one of None is computed alone. No step needs less than the plan says: a limit below its
    peak parts more, and lowers nothing.

    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 8, 8), tuple(Value(n, s) for s, n in enumerate("x a b c".split())),
    ...           tuple(Op(n, n, (s,), (s + 1,)) for s, n in enumerate("fgh")), inputs=(0,), outputs=(3,))
    >>> chain = Problem(g, (OpCost(5), OpCost(5), OpCost(5)))
    >>> [sorted(parted(chain, Plan((), ()), "kkk", limit)) for limit in (16, 23, 24)]
    [[2], [2], []]
    """
    profile = simulate(problem, plan)
    found, last, alive_bytes = set[int](), None, 0
    for position, (step, live_bytes) in enumerate(zip(profile.steps, profile.live_bytes, strict=True)):
        if step.op in problem.graph.views:
            continue
        together = None if at_once[step.op] is None else (step.phase, at_once[step.op])
        if together is not None and together == last:
            alive_bytes += problem.graph.made_bytes(step.op)
            if alive_bytes <= limit_bytes:
                continue
            found.add(position)
        alive_bytes, last = live_bytes, together
    return frozenset(found)
