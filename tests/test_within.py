"""The cheapest way back over a segment: as Dijkstra's algorithm finds it, from every set of blocks."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from rematc.solve.within import Point, Run, Ways


def problem(seed: int) -> tuple[list[int], list[Run], list[Point]]:
    """A chain with shortcuts: unit n makes block n from some before it, in one step or in two."""
    rng = random.Random(seed)
    size = [rng.choice((1, 2, 4)) for _ in range(rng.randint(2, 5))]
    runs = []
    for n, own in enumerate(size):
        reads = sum(1 << b for b in range(n) if rng.random() < 0.6)
        steps = ((reads, own + rng.choice((0, 2))), *(((0, own),) if rng.random() < 0.5 else ()))
        runs.append(Run(10 + n, reads, 1 << n, rng.randint(0, 9), steps))
    points = []
    for _ in range(rng.randint(1, 4)):
        before = rng.randint(0, 3)
        reads = 1 << rng.randrange(len(size)) | 1 << rng.randrange(len(size))
        points.append(Point(reads, before, before + rng.randint(0, 2)))
    return size, runs, points


def least_ns(size: list[int], runs: list[Run], points: list[Point], limit: int, kept: int) -> float:
    """The shortest path from ``kept`` through all stages; what nobody needs goes whenever it pays."""

    def taken(these: int) -> int:
        return sum(each for b, each in enumerate(size) if these >> b & 1)

    best, queue = {(0, kept): 0}, [(0, 0, kept)]
    while queue:
        ns, t, there = heapq.heappop(queue)
        if t == len(points):
            return ns
        if ns > best[t, there]:
            continue
        point, after = points[t], []
        if point.reads & there == point.reads and taken(there) + point.op_bytes <= limit:
            after.append((ns, t + 1, there))
        after += [(ns, t, there & ~(1 << b)) for b in range(len(size)) if there >> b & 1]
        for run in runs:
            if run.reads & ~there or not run.makes & ~there:
                continue
            stays = [taken(there) + own_bytes for _, own_bytes in run.steps]
            early = run.reads & ~run.steps[-1][0]
            goes = [taken(there & ~(early & ~inputs)) + own_bytes for inputs, own_bytes in run.steps]
            for live, result in ((stays, there | run.makes), (goes, (there | run.makes) & ~early)):
                if max(live) + point.before_bytes <= limit:
                    after.append((ns + run.cost_ns, t, result))
        for state in after:
            if state[0] < best.get(state[1:], math.inf):
                best[state[1], state[2]] = state[0]
                heapq.heappush(queue, state)
    return math.inf


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 200, 50)], ids=str)
def test_from_every_set_it_is_the_shortest_path(seeds: range) -> None:
    finite = 0
    for seed in seeds:
        size, runs, points = problem(seed)
        for limit in range(3, sum(size) + 6, 2):
            ways = Ways(size, runs, points, limit)
            for kept in range(1 << len(size)):
                found = ways.least_ns(kept)
                assert (math.inf if found is None else found) == least_ns(size, runs, points, limit, kept)
                finite += found is not None and found > 0
    assert finite > 500


def test_the_runs_cost_what_is_said_and_make_what_is_read() -> None:
    for seed in range(200):
        size, runs, points = problem(seed)
        by_unit = {run.unit: run for run in runs}
        ways = Ways(size, runs, points, sum(size) + 4)
        for kept in range(1 << len(size)):
            said = ways.least_ns(kept)
            if said is None:
                continue
            there, ns = kept, 0
            for point, units in zip(points, ways.runs(kept), strict=True):
                for run in (by_unit[u] for u in units):
                    assert not run.reads & ~there
                    there |= run.makes
                    ns += run.cost_ns
                assert not point.reads & ~there
            assert ns == said


def test_what_a_unit_makes_beside_what_is_read_goes() -> None:
    """Of two results the second is read by nobody, or was read before."""
    run = Run(7, 0, 0b11, 5, ((0, 16),))
    assert Ways((8, 8), [run], [Point(0b01, 0, 0)], 100).least_ns(0) == 5
    ways = Ways((8, 8), [run], [Point(0b10, 0, 0), Point(0b01, 0, 10)], 20)
    assert (ways.least_ns(0b10), ways.runs(0b10)) == (5, ((), (7,)))
