"""Streams side by side: a few blocks cross each cut. Towers, states of a cell, branches of an Inception."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rematc
from benchmarks.corpus_trace import CPU, Case, pose
from rematc.measure import measure
from rematc.problem import Problem
from rematc.solve import cutting, solver
from rematc.solve.chain import chained
from rematc.solve.cutting import chain_of, single_chain_of
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.evict import evict
from rematc.solve.merge import merge
from rematc.solve.order import best_order, reordered
from rematc.solve.reduce import reduce
from rematc.solve.segments import Chain
from rematc.solve.solver import solve
from rematc.solve.starts import first_plans
from tests.graphs import Builder, save_all_peak, with_optima
from tests.test_evict import towers
from tests.test_sums import compare_with_dropping

NEVER = Deadline.after(float("inf"))


def chain_for(problem: Problem) -> Chain:
    found = chain_of(merge(reduce(problem)).core)
    assert found is not None
    return found


def exchanging(n: int) -> Problem:
    """Two streams of ``n`` layers; each layer reads its own stream, every other one both."""
    b = Builder()
    ends, made = [b.input("x"), b.input("y")], list[tuple[int, list[int]]]()
    for k in range(n):
        for i in range(2):
            reads = [ends[i]] if k % 2 == 0 else [ends[i], ends[1 - i]]
            (ends[i],) = b.op(f"f{k}.{i}", reads, 4, ns=10)
            made.append((i, [*reads, ends[i]]))
    loss = b.op("loss", ends, 1, ns=0)
    grads = b.op("b", [b.tangent("dy", 1), *ends], 4, 4, phase="backward")
    for i, reads in reversed(made):
        (grads[i],) = b.op(f"b{len(b.ops)}", [*grads, *reads], 4, phase="backward")
    return b.problem(loss, grads)


@pytest.mark.parametrize("problem", [towers(8, 2), towers(6, 4), exchanging(8)])
def test_a_few_blocks_cross_a_cut_and_none_crosses_two(problem: Problem) -> None:
    found = chain_for(problem)
    core = found.core
    assert len(found.segments) >= 4
    assert max(len(s.enters) for s in found.segments) in (2, 4)
    crossing = [b for s in found.segments for b in s.enters]
    assert len(crossing) == len({*crossing})
    assert not found.always
    for s, segment in enumerate(found.segments):
        leaves = {b for t in found.segments[s + 1 : s + 2] for b in t.enters}
        own = {b for u in segment.units for b in core.units[u].makes}
        allowed = own | core.held | segment.enters | leaves
        assert {b for u in segment.units for b in core.units[u].reads} <= allowed
        assert {b for t in segment.stages for b in core.stages[t].reads} <= allowed


def test_more_than_a_few_make_no_chain() -> None:
    assert chain_of(merge(reduce(towers(8, 6))).core) is None


def test_where_single_blocks_part_it_well_no_more_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "_order_by_last_read", lambda _: pytest.fail("others are looked for"))
    b = Builder()
    x, made = b.input("x"), list[tuple[int, int]]()
    for k in range(8):
        (y,) = b.op(f"f{k}", [x], 4, ns=10)
        (z,) = b.op(f"x{k}", [x, y], 4, ns=10)
        made.append((x, y))
        x = z
    loss = b.op("loss", [x], 1, ns=0)
    (grad,) = b.op("b", [b.tangent("dy", 1), x], 4, phase="backward")
    for reads in reversed(made):
        (grad,) = b.op(f"b{len(b.ops)}", [grad, *reads], 4, phase="backward")
    core = merge(reduce(b.problem(loss, [grad]))).core
    found = chain_of(core)
    assert found == single_chain_of(core) and len(found.segments) >= 7


@pytest.mark.parametrize("forward_to_and_fro", [False, True])
def test_cuts_follow_backward_where_forward_goes_another_way(forward_to_and_fro: bool) -> None:
    """One goes over one tower and then the other, one to and fro: by forward's order all would be kept."""
    together = [(k, i) for k in range(8) for i in range(2)]
    apart = [(k, i) for i in range(2) for k in range(8)]
    forward, backward = (together, apart) if forward_to_and_fro else (apart, together)
    b = Builder()
    ends, reads = [b.input("x"), b.input("y")], dict[tuple[int, int], list[int]]()
    for k, i in forward:
        (inner,) = b.op(f"c{k}.{i}", [ends[i]], 8, ns=40)
        reads[k, i] = [ends[i], inner]
        (ends[i],) = b.op(f"r{k}.{i}", [inner], 8, ns=4)
    loss = b.op("loss", ends, 1, ns=0)
    grads = b.op("b", [b.tangent("dy", 1)], 8, 8, phase="backward")
    for k, i in reversed(backward):
        (grads[i],) = b.op(f"b{k}.{i}", [grads[i], *reads[k, i]], 8, phase="backward")
    core = merge(reduce(b.problem(loss, grads))).core
    found, single = chain_of(core), single_chain_of(core)
    assert found is not None
    assert single is None or found.needs_bytes < 0.5 * single.needs_bytes
    assert found.needs_bytes <= 48


@pytest.mark.parametrize("problem", [towers(16, 2), exchanging(16)], ids=["towers", "exchanging"])
@pytest.mark.parametrize("share", [0.35, 0.4])
def test_a_deep_one_has_a_plan_from_its_chain(problem: Problem, share: float) -> None:
    """Each block of one stream was kept for the other, or dropped and made anew for each op."""
    by_chain, dropped = compare_with_dropping(problem, share)
    assert by_chain < 1 and dropped > 4


class Towers(nn.Module):
    """Two towers of layers, their results multiplied."""

    def __init__(self, n: int, width: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList(layer(width) for _ in range(n)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        u = v = x
        for a, b in zip(*self.towers, strict=True):
            u, v = u + a(u), v + b(v)
        return (u * v).mean()


def layer(width: int) -> nn.Module:
    inner = 2 * width
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


def test_backward_does_not_go_to_and_fro_for_little() -> None:
    """An order that frees more at once went over half a layer of one tower, then half of the other's."""
    problem = pose(lambda: Case(Towers(6, 64), {"x": torch.randn(512, 64)}, lambda loss: loss), CPU)
    limited = problem.with_budget(problem.base_bytes + save_all_peak(problem) // 4)
    chosen = reduce(reordered(limited, best_order(limited)))
    own = reduce(limited)
    needed, needed_by_own = chain_of(chosen), chain_of(own)
    assert needed and needed_by_own
    assert needed.needs_bytes <= 1.1 * needed_by_own.needs_bytes
    plan = solve(limited)
    assert plan.cost_ns < sum(limited.costs[i].runtime_ns for i in limited.graph.forward)


def test_where_a_chain_has_no_plan_the_start_may_be_evicted() -> None:
    """Steps whose outputs are put together: with all outputs kept for that, the chain has too little room."""
    problem = unrolled(24)
    asked = problem.with_budget(int(0.27 * save_all_peak(problem)))
    merged = merge(reduce(asked))
    assert chained(asked, merged) is None
    first = first_plans(asked, merged, 0, 0.01, NEVER)
    dropped = drop(asked, merged)
    best = min(w.plan.cost_ns for w in first.plans)
    assert dropped is None or best < 0.5 * dropped.plan.cost_ns
    roomier = problem.with_budget(int(0.3 * save_all_peak(problem)))
    written, evicted = chained(roomier, merged), evict(roomier, merged, NEVER)
    assert written and evicted and written.plan.cost_ns < 0.5 * evicted.plan.cost_ns  # outputs are lent


def unrolled(n: int) -> Problem:
    """``n`` steps of a cell with a state of two blocks; the outputs of all are put together and squared."""
    b = Builder()
    h, c, outputs, made = b.input("h"), b.input("c"), list[int](), list[tuple[int, ...]]()
    for k in range(n):
        gates = b.op(f"gates{k}", [h], 4, 4, 4, 4, ns=40)
        (new_c,) = b.op(f"c{k}", [c, *gates[:3]], 4, ns=3)
        (t,) = b.op(f"tanh{k}", [new_c], 4, ns=5)
        (new_h,) = b.op(f"h{k}", [t, gates[3]], 4, ns=3)
        made.append((h, c, *gates, t))
        outputs.append(new_h)
        h, c = new_h, new_c
    (every,) = b.op("stack", outputs, 4 * n, ns=10)
    (square,) = b.op("square", [every], 4 * n, ns=10)
    loss = b.op("loss", [square], 1, ns=0)
    (grad,) = b.op("b", [b.tangent("dy", 1), every], 4 * n, phase="backward")
    dh, dc = b.op("b0", [grad], 4, 4, phase="backward")
    for reads in reversed(made):
        dh, dc = b.op(f"b{len(b.ops)}", [grad, dh, dc, *reads], 4, 4, phase="backward")
    return b.problem(loss, [dh, dc])


@pytest.mark.parametrize("problem", [exchanging(2), towers(2, 2)], ids=["exchanging", "towers"])
def test_no_plan_costs_less_than_the_bound(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "EXACT_OPS", 0)
    dear = 0
    for limited, least_ns in with_optima([problem]):
        plan = solve(limited)
        assert plan.bound_ns <= least_ns <= plan.cost_ns
        dear += least_ns > 0
    assert dear


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_budget_and_the_gradients_bits_hold() -> None:
    def trained(run: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        run(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    model, x = Towers(4, 64), torch.randn(512, 64)
    resident = x.nbytes + sum(p.nbytes for p in model.parameters())
    expected = trained(model, model)
    with pytest.raises(rematc.BudgetError) as refused:
        torch.compile(model, backend=rematc.backend(1, inner="eager", costs="roofline"))(x)
    torch._dynamo.reset()
    budget = int(1.2 * refused.value.minimum_bytes)
    backend = rematc.backend(budget, inner="eager", costs="roofline")
    run = torch.compile(model, backend=backend)
    assert all(map(torch.equal, trained(run, model), expected))
    model.zero_grad()
    assert resident + measure(lambda: run(x).backward()).peak_bytes <= budget
    (plan,) = backend.plans
    assert 0 < plan.bound_ns <= plan.cost_ns
