"""What several kernels compute alike: there once where that fits. And what is not computed at once."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._inductor.codegen.cpp import CppVecKernel
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V
from torch.nn import functional as F

from rematc import compat
from rematc.baselines import min_cut, recompute_all, save_all
from rematc.cache import cache_folder
from rematc.errors import BudgetError
from rematc.kernels import parted
from rematc.options import Options
from rematc.passes import split
from rematc.passes.replay import STEP
from rematc.peak import Code, Grouping, PeakOfCode
from rematc.plan import Plan
from rematc.pose import pose
from rematc.problem import Problem
from rematc.schedule import one_of_each_storage
from rematc.share import Footprint
from rematc.simulate import simulate
from rematc.solve import solve
from rematc.target import target_of
from tests.graphs import problems
from tests.test_fuse import SIZES, batch_normed, computed_by, gated, given_to, joint_of, normed, posed, run

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


TOKENS = torch.arange(96) % 64


def dropped(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        x = F.dropout(torch.softmax(x @ x.T, -1), 0.1) @ x @ w
    return x.square().mean()


def halved(x: Tensor, w: Tensor) -> Tensor:
    x, w = x.bfloat16(), w.bfloat16()
    for _ in range(2):
        x = F.gelu(x @ w).t().contiguous().t().softmax(0)
    return x.float().square().mean()


def tied(w: Tensor, v: Tensor) -> Tensor:
    h = F.embedding(TOKENS, w)
    for _ in range(3):
        h = torch.softmax(h @ h.T, -1) @ h @ v
    return F.cross_entropy(h @ w.T, TOKENS)


def lowest(fn: Callable[..., Any], *sizes: tuple[int, int]) -> tuple[PeakOfCode, Plan]:
    """The plan of the lowest peak, and what says what its code needs."""
    peak = peak_of(fn, *sizes)
    with pytest.raises(BudgetError) as refused:
        solve(peak.problem, budget_bytes=1)
    return peak, refused.value.plan


def peak_of(fn: Callable[..., Any], *sizes: tuple[int, int]) -> PeakOfCode:
    """What says what the code of plans needs, for a budget that it does not fit."""
    joint, outputs = joint_of(fn, *(torch.randn(size).requires_grad_() for size in sizes))
    options = Options(None, "inductor", costs="roofline")
    captured, problem = pose(joint, outputs, options)
    target = target_of(joint, options, cache_folder())
    return PeakOfCode(joint, captured, problem.with_budget(1), outputs, target, planned=True)


def above(problem: Problem, bytes_: int) -> int:
    return bytes_ - problem.resident_bytes


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

    def rehearsed(_: PeakOfCode, plan: Plan, grouping: Grouping) -> Footprint:
        tried.append((plans.index(plan), grouping.shared))
        return Footprint(needed[tried[-1]], 0, 0)

    def peaks(above: int | None) -> list[int]:
        budget = None if above is None else problem.resident_bytes + above
        target: Any = None
        peak = PeakOfCode(fx.GraphModule({}, fx.Graph()), *posed(gated, *SIZES)[:1],
                          problem.with_budget(budget), 1, target, planned=True)  # fmt: skip
        tried.clear()
        return [peak(plan) - problem.resident_bytes for plan in plans]

    monkeypatch.setattr(PeakOfCode, "_rehearsed", rehearsed)
    monkeypatch.setattr(PeakOfCode, "_where", lambda *_: frozenset())
    assert peaks(None) == peaks(130) == [120, 130]
    assert peaks(110) == [100, 90]
    assert tried == [(0, True), (0, False), (1, False), (1, True)]  # it might have fit: 90 and 20 more
    assert peaks(105) == [100, 90]
    assert tried == [(0, True), (0, False), (1, False)]
    plans = replace(plans[0], cost_ns=problem.forward_ns + 1), plans[1]
    assert peaks(None) == [100, 130]  # it is for the smallest budget
    plans = replace(plans[0], cost_ns=0), plans[1]
    needed[0, True] = 95
    assert peaks(94) == [100, 90]  # neither fits: what is said to be needed does not depend on the budget


def test_what_code_is_said_to_need_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of 100 was refused, 103 named, and refused in turn: with more room less is parted."""
    captured, problem = posed(gated, *SIZES)
    plan, target = save_all(problem), cast(Any, None)
    least = above(problem, simulate(problem, plan).peak_bytes)

    def needed(room: int) -> int:
        limited = problem.with_budget(problem.resident_bytes + room)
        nothing = fx.GraphModule({}, fx.Graph())
        peak = PeakOfCode(nothing, captured, limited, 1, target, planned=True)
        return above(problem, peak(plan))

    def rehearsed(_: PeakOfCode, plan: Plan, grouping: Grouping) -> Footprint:
        return Footprint(least + 5 if not grouping.parted else min(grouping.parted) + 3, 0, 0)

    monkeypatch.setattr(PeakOfCode, "_rehearsed", rehearsed)
    monkeypatch.setattr(PeakOfCode, "_where", lambda _, plan, room: frozenset({room} - {least}))
    for room in range(least - 2, least + 5):
        assert room < needed(room) == needed(needed(room)) == least + 5


def test_views_do_not_part_a_kernel() -> None:
    """Two sums of one kernel, and a view between them: each went over the whole of what they read."""
    joint, outputs = joint_of(batch_normed, *SIZES)
    captured, problem = pose(joint, outputs, Options(None, "inductor"))
    graph, plan = captured.graph, solve(problem, budget_bytes=10**9)
    steps = [i for i in plan.backward if i not in graph.views]
    assert len(steps) < len(plan.backward)
    _, backward = split(joint, captured, plan, outputs)
    places = {n.name: n.meta[STEP] for n in backward.graph.nodes if STEP in n.meta}
    kernels = len({place.kernel for place in places.values()})
    assert kernels == 1 + sum(captured.kernels[i] != captured.kernels[j] for i, j in pairwise(steps))


@given(problems(12), st.lists(st.sampled_from("ab "), min_size=30, max_size=30), st.floats(0.5, 2.0))
def test_kernels_are_parted_where_they_would_need_more(problem: Problem, of: list[str], share: float) -> None:
    """And nowhere else; what one makes is there when it begins, and what it reads until it ends."""
    plan = save_all(problem)
    profile, graph = simulate(problem, plan), problem.graph
    at_once = [None if label == " " else label for label in of[: len(graph.ops)]]
    limit = share * profile.peak_bytes
    found = parted(problem, plan, at_once, limit)
    assert not parted(problem, plan, at_once, math.inf)

    def made(position: int) -> int:
        op = graph.ops[profile.steps[position].op]
        known = {graph.values[v].storage for v in op.inputs} | graph.resident
        new = {graph.values[v].storage for v in op.outputs} - known
        return sum(graph.storage_bytes[s] for s in new)

    def needed(kernel: list[int]) -> int:
        return profile.live_bytes[kernel[0]] + sum(map(made, kernel[1:]))

    kernels: list[list[int]] = []
    for position, step in enumerate(profile.steps):
        if step.op in graph.views:
            continue
        last = profile.steps[kernels[-1][-1]] if kernels else step
        is_one = kernels and last.phase == step.phase and at_once[last.op] == at_once[step.op] is not None
        if is_one and position not in found:
            kernels[-1].append(position)
        else:
            assert position not in found or (is_one and needed([*kernels[-1], position]) > limit)
            kernels.append([position])
    assert all(len(kernel) == 1 or needed(kernel) <= limit for kernel in kernels)


def test_code_needs_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropout of attention was computed at once: scores, their softmax and the result of three kernels."""
    peak, plan = lowest(dropped, (96, 16), (16, 16))
    said = above(peak.problem, plan.peak_bytes)
    assert above(peak.problem, peak(plan)) <= 1.01 * said
    monkeypatch.setattr(PeakOfCode, "_where", lambda *_: frozenset())
    assert above(peak.problem, replace(peak, found={}, rehearsed={})(plan)) > 1.05 * said


def test_a_product_is_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of tied weights: that of the logits was computed where the other one was added to it."""
    peak, plan = lowest(tied, (64, 16), (16, 16))
    said = above(peak.problem, plan.peak_bytes)
    assert above(peak.problem, peak(plan)) <= 1.01 * said
    monkeypatch.setattr(compat, "NEAR_BY", math.inf)
    assert above(peak.problem, replace(peak, found={}, rehearsed={})(plan)) > 1.1 * said


SMALL = (96, 16), (16, 16)
TALL = (512, 16), (16, 16)
REHEARSED = {dropped: SMALL, tied: ((64, 16), (16, 16)), normed: SMALL, batch_normed: TALL, halved: SMALL}


QUICK = (dropped,)


@pytest.mark.parametrize(
    "fn",
    [pytest.param(fn, id=fn.__name__, marks=() if fn in QUICK else pytest.mark.slow) for fn in REHEARSED],
)
def test_what_is_rehearsed_calls_what_is_run(fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectorised bodies are left out: the same buffers are made, passed, and let go of."""
    peak, write, codes = peak_of(fn, *REHEARSED[fn]), PeakOfCode._code, list[str]()

    def written(*args: Any, **settings: Any) -> Code:
        code = write(*args, **settings)
        codes.append(code.source)
        return code

    monkeypatch.setattr(PeakOfCode, "_code", written)
    plans = [plan_of(peak.problem) for plan_of in (min_cut, recompute_all)]
    again = replace(peak, found={}, rehearsed={})
    for plan in plans:
        peak(plan)
    scalar = codes.copy()
    codes.clear()
    monkeypatch.setattr(compat, "without_vectors", nullcontext)
    for plan in plans:
        again(plan)
    assert len(scalar) == len(codes) > 2
    assert sum(map(is_vectorised, codes)) > sum(map(is_vectorised, scalar)) == 0
    assert list(map(calls, scalar)) == list(map(calls, codes))


def test_what_another_thread_writes_meanwhile_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs: without its vectorised bodies it would compute nothing."""
    written, kernel = list[str](), object.__new__(CppVecKernel)
    monkeypatch.setattr(SchedulerNode, "codegen", lambda node, name: written.append(name))

    def write(name: str) -> None:
        with V.set_kernel_handler(kernel):
            SchedulerNode.codegen(cast(Any, None), cast(Any, name))

    with compat.without_vectors(), ThreadPoolExecutor(1) as other:
        write("in a rehearsal")
        other.submit(write, "meanwhile").result()
    write("later")
    assert written == ["meanwhile", "later"]


def is_vectorised(code: str) -> bool:
    return "at::vec::Vectorized<" in code


def calls(code: str) -> str:
    """What ``call`` does; kernels that are the same have one name."""
    (call,) = (n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef) and n.name == "call")
    return re.sub(r"cpp_fused_\w+", "kernel", ast.unparse(call))


def test_kernels_are_parted_before_the_steps_that_are_said() -> None:
    """Those of forward count from the first step, those of backward go on from there."""
    joint, outputs = joint_of(batch_normed, *SIZES)
    captured, problem = pose(joint, outputs, Options(None, "inductor"))
    plan = one_of_each_storage(captured.graph, min_cut(problem))
    forward, views = captured.graph.forward_steps(plan.saved), captured.graph.views
    begin = [
        next(p for p, i in enumerate(steps) if p and i not in views) for steps in (forward, plan.backward)
    ]
    modules = split(joint, captured, plan, outputs, parted={begin[0], len(forward) + begin[1]})
    for module, first in zip(modules, begin, strict=True):
        places = [node.meta[STEP] for node in module.graph.nodes if STEP in node.meta]
        assert all(place.group == (place.step >= first) for place in places)
        before, after = ({p.kernel for p in places if p.group == group} for group in (0, 1))
        assert before and after and before.isdisjoint(after)
