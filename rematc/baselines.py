"""What people use today, as plans: each strategy has the signature of `rematc.solve.solve`.

Apart from `greedy` they ignore the budget, so that one sees what each needs. Common to all: what may
not run twice is saved where backward needs it (torch's checkpointing replays the random numbers instead),
a value is recomputed once, right before its first use, and kept until its last.
"""

from __future__ import annotations

import heapq
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from rematc.errors import OptionError
from rematc.graph import Graph, Op
from rematc.layers import crossing, find_layers, in_segments, read_in_backward, recompute_whole
from rematc.mincut import base_name, cheapest_cut
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.schedule import just_in_time
from rematc.simulate import judged

Strategy = Callable[[Problem, SolveOptions], Plan]
Steps = Callable[[Graph, tuple[int, ...]], tuple[int, ...]]
DEFAULT = SolveOptions()

_ATTENTION = re.compile(r"attention|attn|softmax|scaled_dot_product|bmm")
_PROJECTION = re.compile(r"^(mm|addmm|linear|matmul)$")


def save_all(problem: Problem, options: SolveOptions = DEFAULT) -> Plan:
    """Save every forward value that backward reads and recompute nothing, as eager autograd does.

    >>> from rematc.graph import Op, Value
    >>> g = Graph((0, 8, 8, 4, 8), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...            Op("h", "mul", (1, 3), (4,), phase="backward")), (0,), (3,), (2,), (4,))
    >>> from rematc.problem import OpCost
    >>> p = Problem(g, (OpCost(5),) * 3)
    >>> save_all(p).saved, save_all(p).peak_bytes, recompute_all(p).cost_ns
    ((1,), 28, 5)
    """
    return _plan(problem, "save_all", time.perf_counter(), read_in_backward(problem.graph))


def recompute_all(problem: Problem, options: SolveOptions = DEFAULT) -> Plan:
    """Save only what may not run twice; everything else is recomputed, once and just in time."""
    return _plan(problem, "recompute_all", time.perf_counter(), ())


def every(k: int) -> Strategy:
    """Checkpointing of every ``k`` consecutive layers, as with `torch.utils.checkpoint`.

    Saved are the values that cross from one segment of layers to another; a segment is recomputed whole (all
    that backward reads of it) when backward first needs any of it. What is outside of all layers
    (embedding, head) is saved as autograd does. `rematc.layers.find_layers` says what a layer is.
    """
    if k < 1:
        raise OptionError(f"every({k}): give the number of layers in a segment, at least 1")
    return _strategy(f"every_{k}", lambda layers: k)


def greedy(problem: Problem, options: SolveOptions = DEFAULT) -> Plan:
    """From `save_all`, stop saving what frees most bytes for each ns, until the peak fits the budget.

    Where it never fits, the plan of the lowest peak that was met. What a value costs is the time of
    the ops that are recomputed for it and not yet for another; storages are given up whole.
    """
    started, budget = time.perf_counter(), problem.budget_bytes
    best = None
    for saved in _given_up(problem):
        plan = _plan(problem, "greedy", started, saved)
        if best is None or plan.peak_bytes < best.peak_bytes:
            best = plan
        if budget is None or plan.peak_bytes <= budget:
            return plan
    assert best is not None  # the first set given is that of save_all
    return replace(best, solve_s=time.perf_counter() - started)


def attention_only(problem: Problem, options: SolveOptions = DEFAULT) -> Plan:
    """Recompute the inside of attention alone: scores, softmax, dropout; save the rest as autograd does.

    Selective recomputation (Korthikanti et al. 2022, arXiv:2205.05198). An op is inside if its target or
    its module path speaks of attention or softmax, or it is a batched product; projections are not.
    """
    started, graph = time.perf_counter(), problem.graph
    inside = {i for i in graph.forward if _is_attention(graph.ops[i])}
    entering = {v for i in inside for v in graph.ops[i].inputs if v in graph.producer}
    wanted = {*read_in_backward(graph), *entering} - {v for i in inside for v in graph.ops[i].outputs}
    notes = () if inside else ("no attention was found: this is save_all",)
    return _plan(problem, "attention_only", started, wanted, notes=notes)


def min_cut(problem: Problem, options: SolveOptions = DEFAULT, wanted: Iterable[int] = ()) -> Plan:
    """Save the fewest bytes from which cheap ops alone (pointwise, views) give all that backward reads.

    The idea of torch's default partitioner; `rematc.mincut` says how this one differs from it. Forward's
    values that are ``wanted`` are saved if backward reads them.
    """
    started, graph = time.perf_counter(), problem.graph
    cut = cheapest_cut(graph, wanted)
    made = [v for i in graph.forward for v in graph.ops[i].outputs]
    return _plan(problem, "min_cut", started, [v for v in made if graph.values[v].storage in cut])


def _strategy(name: str, length: Callable[[int], int]) -> Strategy:
    """Checkpointing of segments of ``length(number of layers)`` layers."""

    def strategy(problem: Problem, options: SolveOptions = DEFAULT) -> Plan:
        started, graph = time.perf_counter(), problem.graph
        layers = find_layers(graph)
        segments = in_segments(layers, length(len(layers)))
        outside = [v for v in read_in_backward(graph) if graph.producer[v] not in segments]
        wanted = [*outside, *crossing(graph, segments)]
        return _plan(problem, name, started, wanted, lambda g, saved: recompute_whole(g, saved, segments))

    strategy.__name__ = name
    strategy.__doc__ = f"Checkpointing by segments of layers: see `every`; this is {name}."
    return strategy


every_layer = _strategy("every_layer", lambda layers: 1)
# Chen et al. 2016, arXiv:1604.06174: sqrt(L) segments of sqrt(L) layers need O(sqrt(L)) memory.
sqrt_l = _strategy("sqrt_l", lambda layers: max(1, round(math.sqrt(layers))))

STRATEGIES: dict[str, Strategy] = {
    "save_all": save_all,
    "min_cut": min_cut,
    "attention_only": attention_only,
    "every_layer": every_layer,
    "every_2": every(2),
    "sqrt_l": sqrt_l,
    "greedy": greedy,
    "recompute_all": recompute_all,
}


def _plan(
    problem: Problem,
    name: str,
    started: float,
    wanted: Iterable[int],
    steps: Steps = just_in_time,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The judged plan that saves those of ``wanted`` that are of use, and what may not run twice."""
    saved = _saved(problem.graph, wanted)
    plan = Plan(saved, steps(problem.graph, saved), status="baseline", strategy=name, notes=notes)
    return replace(judged(problem, plan), solve_s=time.perf_counter() - started)


def _saved(graph: Graph, wanted: Iterable[int]) -> tuple[int, ...]:
    saved, reads = set(wanted), set(read_in_backward(graph))
    while True:
        again = _recomputed(graph, reads, saved)
        read = reads | {v for i in again for v in graph.ops[i].inputs}
        once = {v for i in again if _runs_once(graph.ops[i]) for v in graph.ops[i].outputs if v in read}
        if not once:
            return tuple(sorted(saved & read))
        saved |= once


def _runs_once(op: Op) -> bool:
    return op.pin is not None or op.needed is not None


def _recomputed(graph: Graph, values: Iterable[int], saved: set[int]) -> frozenset[int]:
    return graph.ancestors(values, stop={*graph.inputs, *saved})


def _given_up(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Saved sets, each with one storage less than the one before: the best bytes for each ns first.

    A price changes with what was given up before; only that of the best in the heap is worked out again.
    """
    graph = problem.graph
    saved, again = set(read_in_backward(graph)), set[int]()
    yield tuple(sorted(saved))
    first = set(graph.forward_steps(()))
    groups: dict[int, list[int]] = {}
    for v in sorted(saved):
        groups.setdefault(graph.values[v].storage, []).append(v)

    def price(storage: int) -> tuple[float, frozenset[int]]:
        more = _recomputed(graph, groups[storage], saved.difference(groups[storage])) - again
        if any(_runs_once(graph.ops[i]) for i in more):
            return math.inf, more
        time_ns = sum(problem.costs[i].runtime_ns for i in more if i in first)
        return time_ns / graph.storage_bytes[storage], more

    held = {graph.values[v].storage for v in graph.outputs} | graph.resident
    heap = [(price(s)[0], s) for s in groups if s not in held and graph.storage_bytes[s]]
    heapq.heapify(heap)
    while heap:
        _, storage = heapq.heappop(heap)
        now, more = price(storage)
        if now == math.inf:
            continue
        if heap and now > heap[0][0]:
            heapq.heappush(heap, (now, storage))
            continue
        saved.difference_update(groups[storage])
        again |= more
        yield tuple(sorted(saved))


def _is_attention(op: Op) -> bool:
    names = f"{op.target} {op.module}".lower()
    return bool(_ATTENTION.search(names)) and not _PROJECTION.match(base_name(op.target))
