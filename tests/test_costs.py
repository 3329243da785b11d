"""What an op is said to cost: FLOPs by formula, workspace as measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import rematc
from rematc import compat
from rematc.allocations import memory_profile
from rematc.costs import Prices, Rates, Table, find_taken
from rematc.costs.roofline import flops, is_free, kernel_ns, runtime_ns
from rematc.measure import measure, measure_each
from rematc.problem import OpCost
from tests.joints import read

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CPU = torch.device("cpu")
RATES = Rates(1e10, 5e9, 2e9, 6e9, 4e9, 1e9, 1e11, 8e10, 6e10, 5000, {"bfloat16": 2.0})
aten = torch.ops.aten


def ops_of(fn: Callable[..., Any], *args: Any) -> tuple[fx.Node, ...]:
    return tuple(nodes[0] for nodes in read(fn, *args).nodes)


def op(nodes: tuple[fx.Node, ...], name: str) -> fx.Node:
    return next(n for n in nodes if name in str(n.target))


def price(nodes: tuple[fx.Node, ...]) -> tuple[OpCost, ...]:
    """By roofline, the workspace as measured."""
    prices = Prices(RATES, {}, find_taken(nodes, Table(CPU, None)))
    return tuple(map(prices.of, nodes))


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


# Kernels


def test_a_kernel_moves_what_it_reads_and_writes_and_nothing_in_between() -> None:
    chain = ops_of(lambda x: (x + 1).relu() * 2, leaf(1000, 1000))[:3]
    first, last = chain[0].all_input_nodes[0], chain[-1]
    moved_ns = 2 * 4_000_000 / RATES.stream * 1e9
    assert kernel_ns(chain, [first, last], RATES) == pytest.approx(RATES.overhead_ns + moved_ns, rel=1e-3)
    assert kernel_ns(chain, [first, last], RATES) < sum(runtime_ns(n, RATES) for n in chain)


def test_slow_functions_take_their_time_in_a_kernel_too() -> None:
    node = op(ops_of(lambda x: (x + 1).tanh(), leaf(1000, 1000)), "tanh")
    nothing_moved = kernel_ns([node], [], RATES)
    assert nothing_moved == runtime_ns(node, RATES)


def test_a_function_that_is_nearly_as_fast_as_memory_takes_no_time_in_a_kernel() -> None:
    node = op(ops_of(lambda x: (x + 1).tanh(), leaf(1000, 1000)), "tanh")
    near, far = (replace(RATES, special=share * RATES.stream) for share in (0.6, 0.4))
    assert kernel_ns([node], [], near) == RATES.overhead_ns
    assert kernel_ns([node], [], far) == runtime_ns(node, far) > RATES.overhead_ns


def test_a_product_is_a_kernel_of_its_own_and_views_are_none() -> None:
    nodes = ops_of(lambda x: x @ x.t(), leaf(64, 64))
    product = op(nodes, "mm")
    views = [n for n in nodes if is_free(n)]
    assert kernel_ns([*views, product], [], RATES) == runtime_ns(product, RATES)
    assert kernel_ns(views, [], RATES) == 0


# FLOPs and time


def test_flops_of_a_matmul() -> None:
    nodes = ops_of(lambda a, b: (a @ b).sum(), leaf(3, 5), leaf(5, 7))
    assert flops(op(nodes, "aten.mm.")) == 2 * 3 * 5 * 7
    assert flops(op(nodes, "sum")) == 0


def test_flops_of_a_convolution() -> None:
    nodes = ops_of(lambda x, w: F.conv2d(x, w, padding=1).sum(), leaf(2, 3, 8, 8), leaf(4, 3, 3, 3))
    forward = 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)
    assert flops(op(nodes, "aten.convolution.default")) == forward
    assert flops(op(nodes, "convolution_backward")) == 2 * forward


def test_flops_of_attention() -> None:
    q, k = leaf(2, 4, 16, 8), leaf(2, 4, 32, 8)
    nodes = ops_of(lambda q, k: F.scaled_dot_product_attention(q, k, k).sum(), q, k)
    assert flops(op(nodes, "_scaled_dot_product")) == 2 * (2 * 4) * 16 * 32 * 8 * 2


def test_time_is_the_longer_of_arithmetic_and_memory_and_the_start() -> None:
    nodes = ops_of(lambda a, b: (a @ b).abs().sum(), leaf(64, 1024), leaf(1024, 64))
    seconds = 2 * 64 * 1024 * 64 / RATES.matmul
    assert runtime_ns(op(nodes, "aten.mm."), RATES) == int(5000 + seconds * 1e9)
    moved = 2 * 4 * 64 * 64
    assert runtime_ns(op(nodes, "aten.abs."), RATES) == int(5000 + moved / RATES.stream * 1e9)
    slow = replace(RATES, matmul=RATES.matmul / 10)
    assert runtime_ns(op(nodes, "aten.mm."), slow) == int(5000 + 10 * seconds * 1e9)


def test_views_and_sizes_are_free() -> None:
    nodes = ops_of(lambda x: x.exp().t().unsqueeze(0)[:, 1:].chunk(2, 1)[0].cos().sum(), leaf(4, 6))
    costs = price(nodes)
    viewing = {n.name for n in nodes if is_free(n)}
    assert {"t", "unsqueeze", "slice_1", "split"} <= viewing
    for node, cost in zip(nodes, costs, strict=True):
        assert (cost.runtime_ns == 0) is (node.name in viewing)
        assert cost.workspace_bytes == 0 or node.name not in viewing


def test_equal_ops_cost_the_same_and_others_do_not() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return x.exp().sum() + (x + 1).exp().sum() + y.exp().sum()

    nodes = ops_of(model, leaf(64, 64), leaf(64, 128))
    costs = price(nodes)
    exps = [c for n, c in zip(nodes, costs, strict=True) if "aten.exp." in str(n.target)]
    assert exps[0] == exps[1]
    assert exps[2].runtime_ns > exps[0].runtime_ns


# Workspace


def workspace(name: str, fn: Callable[..., Any], *args: Any) -> int:
    nodes = ops_of(fn, *args)
    costs = price(nodes)
    return dict(zip(nodes, costs, strict=True))[op(nodes, name)].workspace_bytes


def scratch(run: Callable[[], object]) -> int:
    """Bytes that ``run`` allocates on top of what it returns."""
    measured = measure(run, device="cpu", warmup=1)
    return measured.peak_bytes - measured.end_bytes


def test_workspace_is_what_a_run_takes() -> None:
    x, image, kernel = torch.ones(100, 100), torch.ones(2, 3, 16, 16), torch.ones(4, 3, 3, 3)
    assert workspace("aten.exp.", lambda x: x.exp().sum(), leaf(100, 100)) == 0
    assert workspace("logsumexp", lambda x: x.logsumexp(1).sum(), leaf(100, 100)) == scratch(
        lambda: aten.logsumexp(x, [1])
    )
    half = leaf(100, 100, dtype=torch.bfloat16)
    assert workspace("native_dropout", lambda x: F.dropout(x).sum(), half) == scratch(
        lambda: aten.native_dropout(half.detach(), 0.5, True)
    )
    assert workspace(
        "aten.convolution.", lambda x, w: F.conv2d(x, w).sum(), leaf(2, 3, 16, 16), leaf(4, 3, 3, 3)
    ) == scratch(lambda: aten.convolution(image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1))


def test_workspace_that_is_not_zero_is_seen() -> None:
    taken = workspace("logsumexp", lambda x: x.logsumexp(1).sum(), leaf(100, 100))
    assert taken >= 4 * 100 * 100  # the exponentials
    single, double = leaf(100, 100), leaf(100, 100, dtype=torch.float64)
    taken = workspace("aten.add.", lambda x, y: (x + y).sum(), single, double)
    with torch.no_grad():
        assert taken == scratch(lambda: aten.add(single, double)) == 8 * 100 * 100  # x as float64


def test_without_measuring_workspace_counts_zero() -> None:
    nodes = ops_of(lambda x: x.logsumexp(1).sum(), leaf(100, 100))
    assert {Prices(RATES).of(n).workspace_bytes for n in nodes} == {0}


def test_indices_that_do_not_fit_made_up_data_are_no_error() -> None:
    table, index = leaf(10, 4), torch.randint(0, 10, (5,))
    nodes = ops_of(lambda t, i: F.embedding(i, t).sum(), table, index)
    assert len(price(nodes)) == len(nodes)


# What the user has going on


def test_pricing_leaves_the_random_numbers_alone() -> None:
    nodes = ops_of(lambda x: F.dropout(x.exp()).sum(), leaf(64))
    torch.manual_seed(11)
    before = torch.get_rng_state()
    price(nodes)
    assert torch.equal(torch.get_rng_state(), before)


def test_compiling_under_a_profiler_leaves_the_profile_whole(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    run = torch.compile(model, backend=rematc.backend("1GB", inner="eager"))
    with (
        caplog.at_level(logging.WARNING, "rematc"),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as theirs,
    ):
        run(x).sum().backward()
        torch.ones(3).tan()
    assert "a loss, eager code" in caplog.text  # which is not watched then; nothing else is amiss
    assert len(caplog.records) == 1
    seen = {event.key for event in theirs.key_averages()}
    assert {"aten::addmm", "aten::tan"} <= seen
    assert model.weight.grad is not None


def test_a_step_measured_while_it_compiles_takes_no_more_than_its_plan() -> None:
    """A convolution with dilation takes more beside its result than that has."""
    model, x = nn.Conv1d(16, 16, 9, padding=8, dilation=2), torch.randn(2, 16, 2000)
    backend = rematc.backend("100MB", inner="eager")
    run = torch.compile(lambda x: model(x).mean(), backend=backend)
    resident = x.nbytes + sum(p.nbytes for p in model.parameters())
    measured = rematc.measure(lambda: run(x).backward())
    assert measured.peak_bytes == backend.plans[0].peak_bytes - resident


@pytest.mark.parametrize("profiled", [False, True])
def test_what_calls_take_is_what_the_profiler_says_in_a_profile_and_outside(profiled: bool) -> None:
    x, w = torch.randn(2, 8, 500), torch.randn(8, 8, 3)
    steps = [
        lambda: F.conv1d(x, w, padding=4, dilation=4),
        lambda: F.mse_loss(x, x + 1),
        lambda: x.bfloat16().sum(1),
        lambda: torch.sort(x),
    ]
    for step in steps:
        step()
    kineto = [(m.peak_bytes, m.end_bytes) for m in measure_each([lambda s=s: s for s in steps])]
    with memory_profile() if profiled else nullcontext(), ThreadPoolExecutor(1) as apart:
        told = [list(accumulate(changes, initial=0)) for changes in apart.map(compat.allocations, steps)]
    assert [(max(live), live[-1]) for live in told] == kineto
