"""The order of the backward ops, chosen before the search: another than autograd's where that needs less.

The same ops run on the same values, so gradients are the same to the bit. `list_scheduling` makes the
orders, `loads` judges them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rematc.graph import Graph
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.solve.chain import chained
from rematc.solve.clock import paused
from rematc.solve.cutting import chains_of
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.expand import expand, keep_all
from rematc.solve.list_scheduling import RULES, Ties, listed
from rematc.solve.merge import merge, unmerged
from rematc.solve.reduce import reduce, reduce_each
from rematc.solve.spans import loads

Order = tuple[int, ...]
Needs = tuple[int, ...]  # bytes that backward needs: at the least, whatever the plan, and with all kept
ENOUGH = 0.01  # of what is above resident, or of the cost: for less than that the order stays the graph's
ENOUGH_SEGMENTS = 1.1  # times what segments need in the graph's order
SHARE = 0.1  # of the time limit, to look at first plans
WORTH = 0.001  # of what is above resident: an order that needs so much less is looked at


def orders(problem: Problem) -> list[Order]:
    """Orders of the ops in `Graph.backward_steps` that are worth a try, the graph's own first, each once."""
    ties = Ties(problem.graph)
    return list(dict.fromkeys([problem.graph.backward_steps, *(listed(ties, rule) for rule in RULES)]))


def best_order(problem: Problem, limit_s: float = math.inf) -> Order:
    """The order to solve for: the graph's own, or one that is better by `ENOUGH`.

    Where everything fits in some order, that is the one. Else those that need less than the graph's own in
    one way, for what backward needs at the least, whatever the plan, or with everything kept, are judged by
    what recomputation costs in a first plan. Where there is none, it is one that needs no more in either, if
    forward falls into segments as well as in the graph's order: one that goes to and fro has much recomputed
    at once. To look at first plans takes a tenth of ``limit_s``, which does not count.
    """
    tried = needs(problem, orders(problem))
    own = next(iter(tried))
    lightest = min(tried, key=lambda order: tried[order][1])
    if _save(problem, tried[own][1:], tried[lightest][1:], ENOUGH) and _keeps_all(problem, lightest):
        return lightest
    less = {need: order for order, need in tried.items() if _save(problem, tried[own], need, WORTH)}
    if problem.budget_bytes is None or not less or _keeps_all(problem, own):
        return own
    fitting = [order for order in (own, *less.values()) if tried[order][0] <= problem.budget_bytes]
    with paused(SHARE * limit_s):
        if found := _cheapest(problem, fitting, Deadline(SHARE * limit_s)):
            return found
    return _lowest(problem, tried, list(less.values()))


def _lowest(problem: Problem, tried: dict[Order, Needs], others: Sequence[Order]) -> Order:
    """Of ``others`` that need no more than the graph's own, that which needs least; else the graph's own."""
    own, *_ = tried
    better = [
        order
        for order in others
        if all(map(int.__le__, tried[order], tried[own])) and _save(problem, tried[own], tried[order], ENOUGH)
    ]
    least_bytes = tried[own][0] - problem.base_bytes  # segments may be said to need less
    limit = ENOUGH_SEGMENTS * max(_segment_bytes(problem, own), least_bytes) if better else 0.0
    best_first = sorted(better, key=tried.__getitem__)
    return next((order for order in best_first if _segment_bytes(problem, order) <= limit), own)


def _cheapest(problem: Problem, tried: Sequence[Order], deadline: Deadline) -> Order | None:
    """That with the cheapest first plan; the first of all if it costs hardly more."""
    cost = {
        order: _cost_of_first(reordered(problem, order)) if deadline.left() > 0 else math.inf
        for order in tried
    }
    least = min(cost.values(), default=math.inf)
    if least == math.inf:
        return None
    return tried[0] if cost[tried[0]] <= (1 + ENOUGH) * least else min(cost, key=cost.__getitem__)


def _save(problem: Problem, own: Needs, other: Needs, share: float) -> bool:
    """Is a need less by so much of what is above resident?"""
    return any(b <= a - max(1, share * (a - problem.base_bytes)) for a, b in zip(own, other, strict=True))


def _cost_of_first(problem: Problem) -> float:
    """Nanoseconds of recomputation in a first plan, a chain's or by dropping; infinite if there is none."""
    assert problem.budget_bytes is not None
    whole = unmerged(reduce(problem))
    over = expand(problem, whole, keep_all(whole.core)).plan.peak_bytes - problem.budget_bytes
    if over <= 0:
        return 0.0
    merged = merge(whole.core, min(problem.budget_bytes - problem.base_bytes, over))
    found = filter(None, (chained(problem, merged), drop(problem, merged)))
    return min((written.plan.cost_ns for written in found), default=math.inf)


def _segment_bytes(problem: Problem, order: Order) -> float:
    """What a chain of segments needs in this order; no bound where there is none."""
    chains = chains_of(reduce(reordered(problem, order)))
    return chains[0].needs_bytes if chains else math.inf


def _keeps_all(problem: Problem, order: Order) -> bool:
    """Does everything fit the budget in this order?"""
    budget, problem = problem.budget_bytes, reordered(problem, order)
    whole = unmerged(reduce(problem))
    return budget is None or expand(problem, whole, keep_all(whole.core)).plan.peak_bytes <= budget


def needs(problem: Problem, orders: list[Order]) -> dict[Order, Needs]:
    """The most that is alive in backward or at its end, in bytes: at the least, and with all kept."""
    found = map(loads, reduce_each(problem, orders))
    return {order: (max(least), max(kept)) for order, (least, kept) in zip(orders, found, strict=True)}


def reordered(problem: Problem, order: Order) -> Problem:
    """``problem`` with its backward ops in ``order``; those that no plan runs come last."""
    if order == problem.graph.backward_steps:
        return problem
    ops = _permutation(problem.graph, order)
    graph = replace(problem.graph, ops=tuple(problem.graph.ops[i] for i in ops))
    return replace(problem, graph=graph, costs=tuple(problem.costs[i] for i in ops))


def order_of(plan: Plan, problem: Problem) -> Order:
    """The order of the backward ops in ``plan``."""
    return tuple(i for i in plan.backward if problem.graph.ops[i].phase == "backward")


def restored(plan: Plan, order: Order, problem: Problem) -> Plan:
    """``plan`` for `reordered`, said of ``problem`` itself."""
    if order == problem.graph.backward_steps:
        return plan
    ops = _permutation(problem.graph, order)
    return replace(plan, backward=tuple(ops[i] for i in plan.backward), digest=problem.digest)


def said_of_reordered(plan: Plan, order: Order, problem: Problem) -> Plan:
    """The opposite of `restored`."""
    if order == problem.graph.backward_steps:
        return replace(plan, digest="")
    place = {op: i for i, op in enumerate(_permutation(problem.graph, order))}
    return replace(plan, backward=tuple(place[op] for op in plan.backward), digest="")


def _permutation(graph: Graph, order: Order) -> Order:
    """The op of ``graph`` that stands at each place once the backward ops are in ``order``."""
    run = set(order)
    return (*graph.forward, *order, *(i for i in graph.backward if i not in run))
