"""Plain chains: the recursion against Revolve's closed form, and its bound against exhaustive search."""

from __future__ import annotations

import random
from math import comb

import pytest

from benchmarks import corpus
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve import solve
from rematc.solve.deadline import Deadline
from rematc.solve.merge import merge, unmerged
from rematc.solve.plain import PlainChain, plain_chain
from rematc.solve.reduce import reduce
from rematc.solve.reversal import Reversal, reversal
from tests.graphs import Builder, random_problem, with_optima


def random_chain(rng: random.Random, n: int, *, even: bool, falls: bool = True) -> Problem:
    """Each op reads what the one before it made, all of one size or each no larger than the last.

    Backward ops read it too, most of them, and leave gradients.
    """
    b, sizes = Builder(), [rng.randint(1, 9) for _ in range(n)]
    if falls:
        sizes.sort(reverse=True)
    made, grad = [b.input("x", 2)], b.tangent("dy", rng.randint(0, 3))
    for k in range(n):
        made += b.op(f"f{k}", [made[-1]], sizes[0 if even else k], ns=rng.randint(1, 9))
    loss = b.op("loss", [made[-1]], 1, ns=0)
    left = []
    for k in reversed(range(1, n + 1)):
        left_bytes = rng.choice((0, 0, 1, 3))
        reads = [grad, made[k]] if rng.random() < 0.8 else [grad]
        grad, weight = b.op(f"b{k}", reads, rng.randint(1, 4), left_bytes, phase="backward", ns=1)
        left.append(weight)
    return b.problem(loss, [grad, *left])


def even_chain(n: int) -> PlainChain:
    """One byte and one nanosecond a block."""
    ones, zeros = (0, *[1] * n), (0,) * (n + 1)
    stages = (-1, *reversed(range(n)))
    return PlainChain(tuple(range(n)), ones, ones, zeros, stages, stages, zeros, zeros)


@pytest.mark.parametrize("slots", range(1, 7))
def test_even_steps_cost_what_revolve_s_closed_form_says(slots: int) -> None:
    """Griewank and Walther 2000: r l - C(c + r, r - 1) steps for l steps and c states, the first run too."""
    for n in (1, 2, 3, 7, 20, 45):
        steps = n + 1
        r = next(r for r in range(n + 1) if comb(slots + r, slots) >= steps)
        expected = r * steps - (comb(slots + r, r - 1) if r else 0) - n
        for for_plan in (False, True):
            assert Reversal(even_chain(n), slots, for_plan=for_plan).least_ns == expected


def test_nothing_fits_where_what_is_read_does_not() -> None:
    assert Reversal(even_chain(3), 0, for_plan=False).least_ns is None


@pytest.mark.parametrize("even", [True, False])
def test_no_plan_for_a_chain_costs_less_than_the_bound_and_most_are_found(even: bool) -> None:
    """Exhaustive search knows every plan: in any order, with pauses anywhere."""
    rng = random.Random(1)
    bounded = optimal = asked = 0
    for limited, least_ns in with_optima(random_chain(rng, 4, even=even) for _ in range(60)):
        core = unmerged(reduce(limited))
        path = plain_chain(core.core)
        if path is None:
            continue
        written, bound = reversal(limited, core, 0.0, Deadline.after(60))
        assert bound <= least_ns
        if written is not None:
            validate(limited, written.plan)
            assert written.plan.cost_ns >= least_ns
        asked += least_ns > 0
        bounded += bound == least_ns > 0
        optimal += written is not None and written.plan.cost_ns == least_ns > 0
    assert asked > 100
    assert min(optimal, bounded) > 0.85 * asked


@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 300, 100)], ids=str)
def test_the_bound_of_a_chain_holds_for_all_of_the_graph(seeds: range) -> None:
    positive = 0
    for limited, least_ns in with_optima(map(random_problem, seeds)):
        path = plain_chain(merge(reduce(limited)).core, share=0.0)
        if path is not None:
            bound = Reversal(path, limited.budget_bytes, for_plan=False).least_ns
            assert bound is not None and bound <= least_ns
            positive += bound > 0
    assert positive > 2


def test_blocks_that_grow_count_as_the_least_before_them() -> None:
    """To give up a small one for a large one later may take memory that is not there."""
    rng, positive = random.Random(2), 0
    for limited, least_ns in with_optima(random_chain(rng, 4, even=False, falls=False) for _ in range(250)):
        path = plain_chain(reduce(limited), share=0.0)
        if path is not None:
            bound = Reversal(path, limited.budget_bytes, for_plan=False).least_ns
            assert bound is not None and bound <= least_ns
            positive += bound > 0
    assert positive > 100


@pytest.mark.parametrize("times", [1.1, 1.25, pytest.param(1.5, marks=pytest.mark.slow)])
def test_a_deep_plain_network_is_proven_optimal(times: float) -> None:
    problem = corpus.load("mlp")
    floor = 248_124_928  # above what is resident
    plan = solve(
        problem.with_budget(problem.resident_bytes + int(times * floor)), SolveOptions(time_limit_s=60)
    )
    assert plan.gap <= 0.01 and plan.cost_ns > 0
