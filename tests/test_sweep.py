"""The solver's benchmark: its lower bound on budgets, its claims, and that what fails becomes a row."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import fresh, solver, sweep
from benchmarks.floor import floor_bytes
from benchmarks.plot import plot
from benchmarks.sweep import Facts, Row, Settings
from rematc.options import SolveOptions
from tests import oracle
from tests.graphs import chain, random_problem


def row(**fields: object) -> Row:
    made: Row = {
        "problem": "llama_8",
        "kind": "model",
        "ops": 9,
        "layers": 8,
        "budget": "1.25x",
        "solver": "rematc",
    }
    made |= {
        "budget_bytes": 50,
        "of_floor": 1.25,
        "cost_ns": 3,
        "cost_of_forward": 0.3,
        "gap": 0.001,
        "solve_s": 1.0,
    }
    return made | {"status": "optimal", "peak_bytes": 49, "memory_bytes": 10**9} | fields


def holds(rows: list[Row]) -> dict[str, bool]:
    return {
        c["claim"]: c["holds"] for c in solver.claims(rows, [Facts("m", accepted_bytes=104, bound_bytes=100)])
    }


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_peaks_below_the_lower_bound(seed: int) -> None:
    problem = random_problem(seed)
    accepted, bound = floor_bytes(problem, SolveOptions())
    assert bound <= accepted <= oracle.minimum_peak(problem) - problem.resident_bytes


def test_claims_hold_for_good_rows_and_each_notices_its_fault() -> None:
    many = row(problem="llama_80", layers=80, solve_s=14.0)
    assert all(holds([row(), many]).values())
    assert not holds([row(gap=0.011)])["gap at 1.25 times the smallest budget and above"]
    assert holds([row(gap=0.03, of_floor=1.1)])["gap between 1.1 and 1.25 times the smallest"]
    assert not holds([row(), many | {"solve_s": 15.1}])["growth of time from 8 to 80 layers"]
    assert not holds([many | {"error": "refused: no"}])["slowest solve of 80 layers, seconds"]
    assert not holds([row(memory_bytes=5 * 2**30)])["most memory of a solve, GiB"]
    assert not holds([row(), row(budget_bytes=60, cost_ns=4)])["cost to that at a smaller budget"]
    random = row(kind="random", ops=100, layers=None)
    theirs = random | {"solver": "moccasin", "cost_ns": 2}
    assert not holds([random, theirs])["cost to Moccasin's formulation, random graphs"]


def test_checkmate_s_plans_are_compared_with() -> None:
    cost, bound = (
        "cost to the optimum of Checkmate's formulation",
        "bound to a plan of Checkmate's formulation",
    )
    theirs = row(solver="checkmate", status="optimal", cost_ns=100)
    agreeing = holds([row(cost_ns=101, bound_ns=100), theirs])
    assert agreeing[cost] and agreeing[bound]
    assert not holds([row(cost_ns=102, bound_ns=100), theirs])[cost]
    assert not holds([row(cost_ns=101, bound_ns=101), theirs])[bound]
    failed = {key: value for key, value in row(error="ended").items() if key != "cost_ns"}
    assert not holds([failed, theirs])[cost]
    feasible = holds([row(cost_ns=200, bound_ns=101), theirs | {"status": "feasible"}])
    assert cost not in feasible and not feasible[bound]
    assert bound not in holds([row(), failed | {"solver": "checkmate", "status": "unknown"}])


def test_a_plan_that_is_missing_at_a_larger_budget_is_dear() -> None:
    failed = {key: value for key, value in row(budget_bytes=60).items() if key != "cost_ns"}
    claim = "cost to that at a smaller budget"
    assert not holds([row(), failed, row(budget_bytes=70)])[claim]
    assert not holds([row(cost_ns=3), row(budget_bytes=60, cost_ns=2), row(budget_bytes=70, cost_ns=3)])[
        claim
    ]


def test_budgets_lie_between_the_smallest_and_saving_all() -> None:
    facts = Facts("m", kind="model", peak_bytes=100, accepted_bytes=80)
    assert sweep.budgets_of(facts, Settings()) == {"1.0x": 80, "1.1x": 88, "half": 90, "0.9p": 90}
    assert sweep.budgets_of(Facts("r", kind="random", peak_bytes=100), Settings()) == {"0.8p": 80, "0.9p": 90}


def test_a_baseline_counts_only_where_it_fits() -> None:
    best = row(solver="every_2", peak_bytes=60, cost_ns=1)
    assert sweep.best_baseline([row(), best], row()) is None
    assert sweep.best_baseline([row(), best], row(budget_bytes=60)) == best


def test_what_can_t_be_answered_is_a_row(tmp_path: Path) -> None:
    (known,) = sweep.ask(str(tmp_path / "absent.json"), "facts", 1.0)
    assert known["error"].startswith("ended: 1 FileNotFoundError")
    asked = fresh.Asked(who="rematc", seconds=1.0, gap=0.01, runs=1)
    (refused,) = fresh.answers(chain(5).with_budget(1), asked)
    assert refused["error"].startswith("refused: a budget of 1 B can't be met")


def test_a_sweep_of_one_small_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "chain.json", tmp_path / "out.json"
    file.write_text(chain(12, ns=100).to_json())
    args = [
        "--names",
        str(file),
        "--budgets",
        "0.7p",
        "--oracles",
        "--oracle-seconds",
        "5",
        "--json",
        str(out),
    ]
    assert solver.main(args) == 0
    rows = json.loads(out.read_text())["rows"]
    ours, *others = (r for r in rows if r["solver"] in ("rematc", "checkmate", "moccasin"))
    assert {r["cost_ns"] for r in others} == {ours["cost_ns"]}
    assert 0 < ours["memory_bytes"] < 2**30
    assert math.isclose(ours["cost_of_forward"] * 1200, ours["cost_ns"])
    assert "best baseline" in capsys.readouterr().out
    assert out.with_suffix(".svg").stat().st_size > 1000


def test_a_picture_is_drawn_of_what_there_is(tmp_path: Path) -> None:
    shown = [row(), row(problem="llama_80", layers=80), row(problem="llama8", layers=None)]
    for rows in ([], shown):
        plot(rows, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
