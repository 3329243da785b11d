"""Blocks that stay from stage to stage: what a stage is said to need is what it does, and peaks go down."""

from __future__ import annotations

from hypothesis import given, settings

from benchmarks import corpus
from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve.along import along
from rematc.solve.deadline import Deadline
from rematc.solve.expand import expand
from rematc.solve.hold import _Holding, held_longer
from rematc.solve.merge import Merged, merge, unmerged
from rematc.solve.reduce import reduce
from tests.graphs import Builder, problems

LONG = Deadline.after(10**6)


def anew(problem: Problem, merged: Merged) -> int:
    """The peak where each stage makes all that it reads."""
    return expand(problem, merged, along(merged.core)).plan.peak_bytes


def dear_to_make_again() -> Problem:
    """Two ops after each other read what takes much to make; beside the second there is a large gradient."""
    b = Builder()
    x = b.input("x")
    (large,) = b.op("large", [x], 10)
    (read,) = b.op("read", [large], 4)
    (end,) = b.op("end", [read], 1)
    out = b.op("out", [end], 1)
    (dy,) = b.op("b1", [b.tangent("dy", 1), read], 8, phase="backward")
    (dx,) = b.op("b2", [dy, read], 8, phase="backward")
    return b.problem(out, [dx])


def test_what_is_read_twice_stays() -> None:
    problem = dear_to_make_again()
    merged = unmerged(reduce(problem))
    found = held_longer(problem, merged, 0, LONG)
    assert found.plan.peak_bytes == 8 + 8 + 4 + 1 < anew(problem, merged)


@settings(max_examples=60)
@given(problems(ops=12))
def test_plans_are_plans_and_need_no_more_than_without(problem: Problem) -> None:
    for merged in (unmerged(reduce(problem)), merge(reduce(problem))):
        found = held_longer(problem, merged, 0, LONG)
        validate(problem, found.plan)
        assert found.plan.peak_bytes <= expand(problem, merged, _Holding(merged).draft()).plan.peak_bytes


def test_no_lower_peak_is_looked_for_than_asked() -> None:
    problem = dear_to_make_again()
    merged = unmerged(reduce(problem))
    first = anew(problem, merged)
    assert held_longer(problem, merged, first, LONG).plan.peak_bytes == first


def test_densenet_needs_five_percent_more_than_is_proven() -> None:
    """Where all is made anew for each op 879 MB: the stem's result has to stay over three."""
    problem = corpus.load("densenet")
    merged = merge(reduce(problem))
    found = held_longer(problem, merged, 0, LONG)
    assert found.plan.peak_bytes - problem.base_bytes < 853e6 < anew(problem, merged) - problem.base_bytes
