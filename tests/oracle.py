"""Exhaustive search: the cheapest plan of all for a small problem, and the smallest peak of all.

Shares no code with the solver or the simulation. Dijkstra's algorithm over states of the backward
pass: (backward ops done, forward ops that ran, what is at hand on which piece of memory). A move runs
one op; just before it, pieces are dropped so that the op fits. Every saved set is a source.

What makes it fast enough, and why nothing is lost by it:
- pieces are dropped only when the next op needs the room, as few as will do: a state with more at
  hand can do whatever one with less can, for it may drop the rest later;
- a name on a piece that is alive anyway (held, empty, shared) costs nothing, so it is always saved;
- a value that no remaining op can use is forgotten, and one that must stay is never dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, count

from rematc.plan import Plan
from rematc.problem import Problem

# The values at hand on one piece of memory. A negative mark in it: held to the end, and counted in `held`.
Piece = frozenset[int]
RESIDENT = -1


@dataclass(frozen=True)
class Found:
    """The least cost of recomputation, and a plan that has it."""

    cost_ns: int
    plan: Plan


@dataclass(frozen=True)
class State:
    """``done`` backward ops have run; ``started``: any op of the backward pass has."""

    done: int
    ran: frozenset[int]
    pieces: frozenset[Piece]
    started: bool


def search(problem: Problem) -> Found | None:
    """The cheapest plan of ``problem`` under its budget, or None where no plan fits."""
    return _Search(problem).run()


def minimum_peak(problem: Problem) -> int:
    """The smallest budget under which `search` finds a plan, by bisection."""
    workspace = max((c.workspace_bytes for c in problem.costs), default=0)
    low = problem.base_bytes
    high = low + sum(problem.graph.storage_bytes) + workspace + problem.epilogue_bytes
    high += problem.meanwhile_bytes
    high += sum(problem.graph.storage_bytes[problem.graph.values[v].storage] for v in problem.graph.tangents)
    while search(problem.with_budget(high)) is None:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if search(problem.with_budget(middle)) is None:
            low = middle + 1
        else:
            high = middle
    return low


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        self.budget = float("inf") if problem.budget_bytes is None else problem.budget_bytes
        self.order = self.graph.backward_steps
        self.useful = [self._useful(k) for k in range(len(self.order) + 1)]
        bound = self.bind(self.graph.forward_steps(()))
        outputs = {bound[v]: self.size(v) for v in self.graph.outputs if bound[v] != RESIDENT}
        tangents = [self.size(v) for v in self.graph.held]
        self.held = problem.base_bytes + sum(tangents) + sum(outputs.values())

    def size(self, value: int) -> int:
        return self.graph.storage_bytes[self.graph.values[value].storage]

    def weight(self, piece: Piece) -> int:
        return 0 if min(piece) < 0 else self.size(min(piece))

    def _useful(self, done: int) -> frozenset[int]:
        """Values that are read, or may have to be recomputed from, once ``done`` backward ops have run."""
        found: set[int] = set()
        stack = [*self.graph.gradients, *(v for b in self.order[done:] for v in self.graph.ops[b].inputs)]
        while stack:
            v = stack.pop()
            if v not in found:
                found.add(v)
                op = self.graph.producer.get(v)
                if op is not None and self.graph.ops[op].phase == "forward":
                    stack.extend(self.graph.ops[op].inputs)
        return frozenset(found)

    @cached_property
    def sources(self) -> dict[State, frozenset[int]]:
        """The states in which a backward pass can start, each with its saved set."""
        g, found = self.graph, {}
        made = {v for i in g.forward for v in g.ops[i].outputs}
        candidates = sorted(self.useful[0] & made)
        seen = set()
        for some in chain.from_iterable(combinations(candidates, r) for r in range(len(candidates) + 1)):
            steps = g.forward_steps(some)
            bound = self.bind(steps)
            alive = {bound[v] for v in (*some, *g.outputs)} | {RESIDENT}
            free = {v for v in candidates if v in bound and (bound[v] in alive or not self.size(v))}
            saved = frozenset(some) | free
            if saved in seen:
                continue
            seen.add(saved)
            if self.forward_peak(steps, bound, saved) <= self.budget:
                found[State(0, frozenset(steps), self.start(bound, saved), started=False)] = saved
        return found

    def bind(self, steps: Iterable[int]) -> dict[int, int]:
        """Which piece each forward value stands on, by number; `RESIDENT` for what the inputs are on."""
        g = self.graph
        bound = dict.fromkeys(g.inputs, RESIDENT)
        fresh = count()
        for op in (g.ops[i] for i in steps):
            joined = {g.values[v].storage: bound[v] for v in op.inputs} | dict.fromkeys(g.resident, RESIDENT)
            for v in op.outputs:
                storage = g.values[v].storage
                if storage not in joined:
                    joined[storage] = next(fresh)
                bound[v] = joined[storage]
        return bound

    def forward_peak(self, steps: tuple[int, ...], bound: dict[int, int], saved: frozenset[int]) -> int:
        peak, made = 0, set(self.graph.inputs)
        for at, i in enumerate(steps):
            made |= set(self.graph.ops[i].outputs)
            later = {v for j in steps[at:] for v in self.graph.ops[j].inputs}
            alive = (later | saved | set(self.graph.outputs) | set(self.graph.ops[i].outputs)) & made
            pieces = {bound[v]: self.size(v) for v in alive if bound[v] != RESIDENT}
            peak = max(peak, sum(pieces.values()) + self.problem.costs[i].workspace_bytes)
        kept = {bound[v]: self.size(v) for v in (*saved, *self.graph.outputs) if bound[v] != RESIDENT}
        peak = max(peak, sum(kept.values()) + self.problem.meanwhile_bytes)
        return peak + self.problem.base_bytes

    def start(self, bound: dict[int, int], saved: frozenset[int]) -> frozenset[Piece]:
        g = self.graph
        pieces: dict[int, set[int]] = {RESIDENT: {RESIDENT, *g.inputs}}
        for v in saved:
            pieces.setdefault(bound[v], set()).add(v)
        for v in g.outputs:
            if bound[v] in pieces and bound[v] != RESIDENT:
                pieces[bound[v]].add(-2 - bound[v])
        mark = -2 - len(g.values)
        tangents = ({v, mark - v} if v in g.held else {v} for v in g.tangents)
        return frozenset(map(frozenset, (*pieces.values(), *tangents)))

    def run(self) -> Found | None:
        tie = count()
        best = dict.fromkeys(self.sources, 0)
        came: dict[State, tuple[State, int]] = {}
        heap = [(0, 0, -len(saved), next(tie), s) for s, saved in self.sources.items()]
        heapq.heapify(heap)
        while heap:
            cost, _, _, _, state = heapq.heappop(heap)
            if cost > best[state]:
                continue
            if self.ends(state):
                return self.found(cost, state, came)
            for i, following in self.moves(state):
                total = cost + (self.problem.costs[i].runtime_ns if i in state.ran else 0)
                if total < best.get(following, total + 1):
                    best[following], came[following] = total, (state, i)
                    heapq.heappush(heap, (total, -following.done, 0, next(tie), following))
        return None

    def found(self, cost: int, state: State, came: dict[State, tuple[State, int]]) -> Found:
        steps = []
        while state in came:
            state, op = came[state]
            steps.append(op)
        plan = Plan(saved=tuple(sorted(self.sources[state])), backward=tuple(reversed(steps)))
        return Found(cost, plan)

    def ends(self, state: State) -> bool:
        wanted = set(self.graph.gradients)
        if state.done < len(self.order) or not wanted <= set().union(*state.pieces):
            return False
        kept = [p for p in state.pieces if p & wanted or not state.started]
        return self.held + sum(map(self.weight, kept)) + self.problem.epilogue_bytes <= self.budget

    def moves(self, state: State) -> Iterator[tuple[int, State]]:
        for i in self.graph.forward:
            op = self.graph.ops[i]
            if not op.needed and not (op.pin and i in state.ran) and self.useful[state.done] & {*op.outputs}:
                for pieces in self.after(state, i, state.done):
                    yield i, State(state.done, state.ran | {i}, pieces, started=True)
        if state.done < len(self.order):
            i = self.order[state.done]
            for pieces in self.after(state, i, state.done + 1):
                yield i, State(state.done + 1, state.ran, pieces, started=True)

    def after(self, state: State, i: int, done: int) -> Iterator[frozenset[Piece]]:
        """What can be at hand once op ``i`` has run: one set for each fewest pieces dropped before it."""
        g, op = self.graph, self.graph.ops[i]
        at = {v: p for p in state.pieces for v in p}
        if any(v not in at for v in op.inputs):
            return
        joined = {g.values[v].storage: at[v] for v in op.inputs} | dict.fromkeys(g.resident, at[RESIDENT])
        grown = {p: p - {*op.outputs} for p in state.pieces}
        fresh: dict[int, Piece] = {}
        for v in op.outputs:
            storage = g.values[v].storage
            if storage in joined:
                grown[joined[storage]] |= {v}
            else:
                fresh[storage] = fresh.get(storage, frozenset()) | {v}
        there = [p for p in state.pieces if grown[p] or not state.started]
        live = self.held + sum(map(self.weight, there)) + sum(g.storage_bytes[s] for s in fresh)
        excess = live + self.problem.costs[i].workspace_bytes - self.budget
        stays = {*op.inputs} | {v for v in self.useful[done] if self.runs_once(v)}
        loose = [p for p in there if state.started and self.weight(p) and not p & stays]
        for dropped in self.fewest(loose, excess):
            kept = [grown[p] for p in there if p not in dropped] + [*fresh.values()]
            pieces = (frozenset(v for v in p if v < 0 or v in self.useful[done]) for p in kept)
            yield frozenset(p for p in pieces if p)

    def runs_once(self, value: int) -> bool:
        op = self.graph.producer.get(value)
        return op is None or self.graph.ops[op].phase == "backward"

    def fewest(self, loose: list[Piece], excess: float) -> Iterator[frozenset[Piece]]:
        tried: list[frozenset[Piece]] = []
        for r in range(len(loose) + 1):
            for some in map(frozenset, combinations(loose, r)):
                enough = sum(map(self.weight, some)) >= excess
                if enough and not any(t <= some for t in tried):
                    tried.append(some)
                    yield some
