"""The order of the backward ops, chosen before the search: another than autograd's where that needs less.

The same ops run on the same values, so gradients are the same to the bit. `list_scheduling` makes the
orders, `loads` judges them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rematc.graph import Graph
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.solve.cutting import chains_of
from rematc.solve.expand import expand, keep_all
from rematc.solve.list_scheduling import RULES, Ties, listed
from rematc.solve.merge import unmerged
from rematc.solve.reduce import reduce, reduce_each
from rematc.solve.spans import loads

Order = tuple[int, ...]
ENOUGH = 0.01  # of what is above resident: for less than that the order stays the graph's
ENOUGH_SEGMENTS = 1.1  # times what segments need in the graph's order


def orders(problem: Problem) -> list[Order]:
    """Orders of the ops in `Graph.backward_steps` that are worth a try, the graph's own first, each once."""
    ties = Ties(problem.graph)
    return list(dict.fromkeys([problem.graph.backward_steps, *(listed(ties, rule) for rule in RULES)]))


def best_order(problem: Problem) -> Order:
    """The order to solve for: the graph's own, or one that needs no more in any way and `ENOUGH` less in one.

    An order is judged by what backward needs at the least, whatever the plan, and with everything kept. Where
    everything can be kept the first does not matter; if not, forward has to fall into segments as well as in
    the graph's order: one that goes to and fro has much recomputed at once.
    """
    tried = needs(problem, orders(problem))
    own, *others = tried
    enough = [max(1, ENOUGH * (n - problem.base_bytes)) for n in tried[own]]
    lightest = min(tried, key=lambda order: tried[order][1])
    if tried[lightest][1] <= tried[own][1] - enough[1] and _keeps_all(problem, lightest):
        return lightest

    def saved(order: Order) -> list[float]:
        return [(a - b) / e for a, b, e in zip(tried[own], tried[order], enough, strict=True)]

    better = [order for order in others if min(saved(order)) >= 0 and max(saved(order)) >= 1]
    best_first = sorted(better, key=lambda order: -sum(saved(order)))
    limit = ENOUGH_SEGMENTS * _segment_bytes(problem, own) if better else 0.0
    return next((order for order in best_first if _segment_bytes(problem, order) <= limit), own)


def _segment_bytes(problem: Problem, order: Order) -> float:
    """What a chain of segments needs in this order; no bound where there is none."""
    chains = chains_of(reduce(reordered(problem, order)))
    return chains[0].needs_bytes if chains else math.inf


def _keeps_all(problem: Problem, order: Order) -> bool:
    """Does everything fit the budget in this order?"""
    budget, problem = problem.budget_bytes, reordered(problem, order)
    whole = unmerged(reduce(problem))
    return budget is None or expand(problem, whole, keep_all(whole.core)).plan.peak_bytes <= budget


def needs(problem: Problem, orders: list[Order]) -> dict[Order, tuple[int, int]]:
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
