"""What a plan's report says: numbers that are the plan's own, and reasons in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from rematc.baselines import greedy, min_cut, recompute_all, save_all
from rematc.errors import PlanError, format_bytes
from rematc.graph import Graph, Op
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.report import report
from rematc.report.kinds import layer_kinds
from rematc.report.rows import Reading, rows
from tests.graphs import Builder, chain, problems, random_problem, skip


def small(**first: str) -> Problem:
    """Two layers: a of 4000 bytes and 2 ms, b of 1000 bytes and 1 ms; backward reads both."""
    b = Builder()
    x = b.input("x", 100)
    (a,) = b.op("a", [x], 4000, ns=2_000_000, module="net.0.big", **first)  # type: ignore[arg-type]
    (c,) = b.op("b", [a], 1000, ns=1_000_000, module="net.0.little")
    (y,) = b.op("y", [c], 8, ns=0)
    dy = b.tangent("dy", 8)
    (d,) = b.op("yb", [dy, c], 1000, phase="backward", module="net.0.little")
    (e,) = b.op("bb", [d, a], 100, phase="backward", module="net.0.big")
    return b.problem([y], [e], resident=100)


def line(text: str, starts: str) -> str:
    """The line of the report that starts so, joined with those that go on with it."""
    lines = text.splitlines()
    at = next(i for i, shown in enumerate(lines) if shown.startswith(starts))
    more = []
    for shown in lines[at + 1 :]:
        if not shown.startswith("    "):
            break
        more.append(shown.strip())
    return " ".join([" ".join(lines[at].split()), *more])


def plans(problem: Problem) -> list[Plan]:
    half = problem.with_budget((recompute_all(problem).peak_bytes + save_all(problem).peak_bytes) // 2)
    return [save_all(problem), recompute_all(problem), min_cut(problem), greedy(half, SolveOptions())]


def test_the_head_has_the_numbers_of_the_step() -> None:
    problem = small().with_budget(5_000)
    plan = replace(
        recompute_all(problem), status="optimal", strategy="rematc", bound_ns=2_000_000, notes=("mind it",)
    )
    text = report(problem, plan)
    assert line(text, "resident").startswith("resident 100 B")
    assert "budget 5.00 kB" in line(text, "budget")
    assert format_bytes(save_all(problem).peak_bytes) in line(text, "peak, all saved")
    assert format_bytes(plan.peak_bytes) in line(text, "peak, this plan")
    assert "4.00 kB sin of net.0.big" in line(text, "peak, all saved")
    assert "recomputation 3.00 ms 100.0 % of the forward pass" in line(text, "recomputation")
    assert "gap 50.00 % no plan under this budget recomputes less than 2.00 ms: proven" in line(text, "gap")
    assert "optimal by rematc" in line(text, "plan")
    assert "mind it" in line(text, "note")


def test_what_is_recomputed_says_what_it_frees_and_at_what_price() -> None:
    problem = small().with_budget(5_900)
    keeps_a = Plan((1,), (*recompute_all(problem).backward[1:],), peak_bytes=0)
    saved = [i for i, v in enumerate(problem.graph.values) if v.name == "a.0"]
    plan = replace(keeps_a, saved=tuple(saved), cost_ns=1_000_000, budget_bytes=5_900)
    text = report(problem, plan)
    assert "1.00 ms recomputed (sin x1)" in line(text, "net.0.little")
    assert "saved: 2.00 ms to recompute, 0.002 MB/ms" in line(text, "net.0.big")


@pytest.mark.parametrize(
    ("pin", "words"), [("random", "saved: random"), ("mutates: keeps it", "saved: keeps it")]
)
def test_what_may_not_run_twice_says_why(pin: str, words: str) -> None:
    problem = small(pin=pin)
    assert words in line(report(problem, recompute_all(problem)), "net.0.big")


def test_what_is_made_of_random_numbers_says_so() -> None:
    b = Builder()
    x = b.input("x", 100)
    (r,) = b.op("r", [x], 1000, pin="random", module="drop")
    (a,) = b.op("a", [r], 1000, module="act")
    (z,) = b.op("z", [a], 1000, module="last", ns=5)
    (y,) = b.op("y", [z], 8)
    dy = b.tangent("dy", 8)
    (e,) = b.op("e", [dy, a, z], 8, phase="backward")
    problem = b.problem([y], [e])
    again = tuple(i for i, op in enumerate(problem.graph.ops) if op.name in ("z", "e"))
    text = report(problem, Plan((a,), again, cost_ns=5))
    assert "saved: made of what may run only once (random)" in line(text, "act")


def test_results_are_kept_whatever_the_plan() -> None:
    b = Builder()
    x = b.input("x", 100)
    (a,) = b.op("a", [x], 1000, module="head")
    dy = b.tangent("dy", 1000)
    (e,) = b.op("e", [dy, a], 8, phase="backward")
    problem = b.problem([a], [e])
    assert "kept: result of the forward pass" in report(problem, save_all(problem))


def test_nothing_is_recomputed_because_it_fits() -> None:
    problem = small().with_budget(10**6)
    text = report(problem, save_all(problem))
    assert "saved: it fits the budget" in text and "enough to save everything" in text
    free = report(small(), save_all(small()))
    assert "saved: nothing is short" in free and "no limit" in free
    assert "0.00 %" in line(free, "gap")


def test_a_graph_of_which_backward_reads_nothing_has_no_rows() -> None:
    b = Builder()
    x = b.input("x", 8)
    (y,) = b.op("y", [x], 8)
    dy = b.tangent("dy", 8)
    (e,) = b.op("e", [dy, x], 8, phase="backward")
    problem = b.problem([y], [e])
    assert "reads nothing that the forward pass makes" in report(problem, save_all(problem))


def test_a_plan_of_another_problem_is_refused() -> None:
    with pytest.raises(PlanError):
        report(chain(3), save_all(chain(5)))


@pytest.mark.parametrize("width", [80, 100, 120])
def test_it_fits_the_terminal(width: int) -> None:
    for problem in (chain(6), skip(4), small(), random_problem(7)):
        for plan in plans(problem):
            assert max(map(len, report(problem, plan, width).splitlines())) <= width


@given(problems())
def test_rows_add_up_to_the_plan(problem: Problem) -> None:
    for plan in plans(problem):
        found = rows(Reading(problem, plan))
        assert sum(row.recompute_ns for row in found) == plan.cost_ns
        sizes, of = problem.graph.storage_bytes, {v: problem.graph.values[v].storage for v in plan.saved}
        kept = {s for s in of.values() if s not in problem.graph.resident}
        assert sum(r.pinned.total() + sum(sizes[s] for s in r.chosen) for r in found) == sum(
            sizes[s] for s in kept
        )
        assert report(problem, plan)


def kinds(*ran: tuple[str, str]) -> list[str]:
    graph = Graph((), (), tuple(Op(path, target, (), (), module=path) for path, target in ran))
    return list(layer_kinds(graph).values())


def test_layers_of_one_build_are_one_kind() -> None:
    assert set(kinds(*((f"h.{i}.mlp", "mm") for i in range(9)))) == {"h.*.mlp"}
    assert kinds(("layer4.conv", "conv"), ("", "sum")) == ["layer4.conv", "(top level)"]


def test_parts_of_a_sequential_keep_their_numbers() -> None:
    parts = [(f"h.{i}.{j}", t) for i in range(2) for j, t in enumerate(("conv", "relu", "conv", "relu"))]
    assert kinds(*parts)[:4] == ["h.*.0,2", "h.*.1,3", "h.*.0,2", "h.*.1,3"]
    odd = [("h.0", "embed"), *((f"h.{i}", "mm") for i in range(1, 5))]
    assert kinds(*odd)[:2] == ["h.0", "h.1-4"]
