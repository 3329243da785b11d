"""The peak of a plan, counted by another method than the simulation's."""

from __future__ import annotations

from collections import Counter

from rematc.plan import Plan
from rematc.problem import Problem


def recount(problem: Problem, plan: Plan) -> int:
    """The peak, by an allocator that counts references: freed when the last reader has run."""
    g = problem.graph
    forward = g.forward_steps(plan.saved)
    bound: dict[int, object] = dict.fromkeys(g.inputs, "resident")
    size: dict[object, int] = {"resident": 0}
    timeline: list[tuple[int, list[object], list[object]]] = []
    held, tangents = [], {v: ("tangent", v) for v in g.tangents}
    size |= {t: g.storage_bytes[g.values[v].storage] for v, t in tangents.items()}
    for n, i in enumerate((*forward, *plan.backward)):
        if n == len(forward):
            held, saved = [bound[v] for v in g.outputs], {v: bound[v] for v in plan.saved}
            bound = dict.fromkeys(g.inputs, "resident") | saved | tangents  # type: ignore[assignment]
        reads, born = [bound[v] for v in g.ops[i].inputs], []
        of = {g.values[v].storage: bound[v] for v in g.ops[i].inputs}
        for v in g.ops[i].outputs:
            s = g.values[v].storage
            fresh = s not in of and s not in g.resident
            bound[v] = (n, s) if fresh else "resident" if s in g.resident else of[s]
            if fresh:
                of[s] = bound[v]
                size[bound[v]] = g.storage_bytes[s]
                born.append(bound[v])
        timeline.append((i, reads, born))
    held += [bound[v] for v in g.gradients] + [tangents[v] for v in g.held]
    boundary, there = len(forward), [*saved.values(), *tangents.values()]  # one step at the least
    refs = Counter([o for _, reads, _ in timeline for o in reads] + held + there)
    live, peaks = set(), []
    for n, (i, reads, born) in enumerate(timeline):
        if n == boundary:
            peaks.append(sum(size[o] for o in live) + problem.meanwhile_bytes)
        live |= {*born, *(tangents.values() if n == boundary else ())}
        peaks.append(sum(size[o] for o in live) + problem.costs[i].workspace_bytes)
        refs.subtract(reads)
        refs.subtract(there if n == boundary else ())
        live = {o for o in live if refs[o] > 0}
    return max(*peaks, sum(size[o] for o in live) + problem.epilogue_bytes) + problem.base_bytes
