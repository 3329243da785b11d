"""`python -m benchmarks.overhead`: is the time that a plan is said to add the time that it adds?

Models of the test zoo, op by op, without a limit and at two budgets, with costs as measured and by roofline.
Steps of one model are timed in turn, so that what else the machine does disturbs all alike.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch._dynamo import config as dynamo

import rematc
from benchmarks.arguments import zoo_arguments
from benchmarks.inductor import Cell
from benchmarks.machine import leave_compilers_garbage, seconds_of_each, write_results
from rematc.options import Options
from rematc.trace import plan_model
from tests.zoo import ZOO

SHARES = (0.15, 0.5)  # of the way from the floor to saving everything
WAYS = ("measured", "roofline")
ROUNDS = 21
LIMIT_S = 10.0
GOAL_POINTS = 5.0


@dataclass
class Row:
    """A plan; overheads are of the step without a limit."""

    model: str
    costs: str
    budget_bytes: int
    gap: float
    predicted: float
    measured: float

    @property
    def points(self) -> float:
        """How far the prediction is off, in percentage points."""
        return 100 * abs(self.predicted - self.measured)


def rows_of(model: str, rounds: int) -> Iterator[Row]:
    """Both ways to cost, at each budget."""
    cells = {"no limit": Cell(ZOO[model](), rematc.backend(None, inner="eager"))}
    backends: dict[tuple[str, int], rematc.Backend] = {}
    for budget in budgets(model):
        for costs in WAYS:
            made = rematc.backend(budget, inner="eager", costs=costs, time_limit_s=LIMIT_S)
            backends[costs, budget] = made
            cells[f"{costs} {budget}"] = Cell(ZOO[model](), made)
    torch._dynamo.reset()
    with dynamo.patch(recompile_limit=64):  # all cells run the same code
        for cell in cells.values():
            cell.step_and_clear()
        leave_compilers_garbage()
        seconds = seconds_of_each(cells, rounds + 1)
    base = statistics.median(seconds["no limit"][1:])
    for (costs, budget), made in backends.items():
        pairs = list(zip(seconds[f"{costs} {budget}"], seconds["no limit"], strict=True))[1:]
        measured = statistics.median(mine / other for mine, other in pairs) - 1  # the first round warms up
        (plan,) = made.plans
        yield Row(model, costs, budget, plan.gap, plan.cost_ns / 1e9 / base, measured)


def budgets(model: str) -> list[int]:
    """Between the floor and saving everything; nothing is run."""
    case = ZOO[model]()
    given: Any = (case.model, case.inputs, case.loss)
    top = plan_model(*given, Options(None, "eager"))[1].peak_bytes
    try:
        plan_model(*given, Options(1, "eager"))
    except rematc.BudgetError as e:
        floor = e.minimum_bytes
    return [int(floor + share * (top - floor)) for share in SHARES]


def table(rows: Sequence[Row]) -> str:
    """For people; MB are 10^6 bytes, resident included."""
    lines = [
        (r.model, r.costs, f"{r.budget_bytes / 1e6:.1f} MB", f"{r.gap:.1%}", f"{r.predicted:.1%}",
         f"{r.measured:.1%}", f"{r.points:.1f}")
        for r in rows
    ]  # fmt: skip
    head = ("", "costs", "budget", "gap", "predicted", "measured", "points off")
    return tabulate(lines, headers=head, colalign=("left", "left", *("right",) * 5), disable_numparse=True)


def claims(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How far predictions are off at most, for either way to cost; the goal is for costs as measured."""
    worst = {costs: max(r.points for r in rows if r.costs == costs) for costs in WAYS}
    return [
        {"claim": f"overhead predicted to measured, points, costs {costs}", "measured": points,
         "goal": GOAL_POINTS, "holds": points <= GOAL_POINTS}
        for costs, points in worst.items()
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print predicted and measured overheads side by side."""
    args = zoo_arguments("overhead", __doc__, argv, rounds=ROUNDS)
    rows: list[Row] = []
    for model in args.names:
        rows += rows_of(model, args.rounds)
        print(table(rows[-len(SHARES) * len(WAYS) :]), flush=True)
    found = claims(rows)
    for claim in found:
        print(f"{claim['claim']}: {claim['measured']:.1f} (goal: at most {claim['goal']:g})")
    if args.json is not None:
        results = {"rounds": args.rounds, "rows": [asdict(r) for r in rows], "claims": found}
        write_results(args.json, "overhead", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
