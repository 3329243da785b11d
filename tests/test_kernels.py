"""What several kernels compute alike: there once where that fits, and nothing parts a kernel."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx

from rematc.baselines import min_cut, save_all
from rematc.inductor import PeakOfCode
from rematc.options import Options
from rematc.passes import split
from rematc.passes.replay import STEP
from rematc.plan import Plan
from rematc.pose import pose
from rematc.share import Footprint
from rematc.solve import solve
from tests.test_fuse import SIZES, batch_normed, computed_by, gated, given_to, joint_of, posed, run

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_what_several_kernels_compute_is_there_once_if_they_share() -> None:
    """A masked gradient was computed anew in three loops over each BatchNorm: a U-Net took 1.04 times."""
    twin, outputs = joint_of(batch_normed, *SIZES)
    results, computed = [], []
    for shared in (False, True):
        joint, _ = joint_of(batch_normed, *SIZES)
        captured, problem = pose(joint, outputs, Options(None, "inductor"))
        done = split(joint, captured, min_cut(problem), outputs, shared=shared)
        results.append(computed_by(*done, twin, outputs))
        masks = [n for n in done[1].graph.nodes if n.target is torch.ops.aten.where.self]
        computed.append(len(masks))
    assert computed[1] == 2 < computed[0]
    torch.testing.assert_close(results, [run(twin, given_to(twin))] * 2, rtol=0, atol=0)


def test_kernels_share_what_they_compute_where_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, problem = posed(gated, *SIZES)
    plans = min_cut(problem), save_all(problem)
    needed = {(0, True): 120, (0, False): 100, (1, True): 130, (1, False): 90}
    tried: list[tuple[int, bool]] = []

    def rehearsed(_: PeakOfCode, plan: Plan, *, shared: bool) -> Footprint:
        tried.append((plans.index(plan), shared))
        return Footprint(needed[tried[-1]], 0, 0)

    def peaks(above: int | None) -> list[int]:
        budget = None if above is None else problem.resident_bytes + above
        target: Any = None
        peak = PeakOfCode(fx.GraphModule({}, fx.Graph()), *posed(gated, *SIZES)[:1],
                          problem.with_budget(budget), 1, target, planned=True)  # fmt: skip
        tried.clear()
        return [peak(plan) - problem.resident_bytes for plan in plans]

    monkeypatch.setattr(PeakOfCode, "_rehearsed", rehearsed)
    assert peaks(None) == peaks(130) == [120, 130]
    assert peaks(110) == [100, 90]
    assert tried == [(0, True), (0, False), (1, False), (1, True)]  # it might have fit: 90 and 20 more
    assert peaks(105) == [100, 90]
    assert tried == [(0, True), (0, False), (1, False)]
    plans = replace(plans[0], cost_ns=problem.forward_ns + 1), plans[1]
    assert peaks(None) == [100, 130]  # it is for the smallest budget
    plans = replace(plans[0], cost_ns=0), plans[1]
    needed[0, True] = 95
    assert peaks(94) == [95, 90]  # neither fits: the smaller one is what is needed


def test_views_do_not_part_a_kernel() -> None:
    """Two sums of one kernel, and a view between them: each went over the whole of what they read."""
    joint, outputs = joint_of(batch_normed, *SIZES)
    captured, problem = pose(joint, outputs, Options(None, "inductor"))
    graph, plan = captured.graph, solve(problem, budget_bytes=10**9)
    steps = [i for i in plan.backward if i not in graph.views]
    assert len(steps) < len(plan.backward)
    _, backward = split(joint, captured, plan, outputs)
    places = {n.name: n.meta[STEP] for n in backward.graph.nodes if STEP in n.meta}
    parted = len({kernel for _, kernel in places.values()})
    assert parted == 1 + sum(captured.kernels[i] != captured.kernels[j] for i, j in pairwise(steps))
