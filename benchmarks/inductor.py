"""`python -m benchmarks.inductor`: under Inductor, is the budget a bound, and what does planning cost?

Models of the test zoo, each alone under Inductor and with rematc at four budgets. Caches are off: the first
step compiles all.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate

import rematc
from benchmarks.arguments import zoo_arguments
from benchmarks.machine import nothing_kept, seconds_of_each, write_results
from tests.zoo import ZOO, Case

SHARES = (0.05, 0.3, 0.6, None)  # of the way from the floor (x 1.05 at the least) to saving everything
ROUNDS = 7
GOAL_RATIO, GOAL_SHARE = 1.03, 0.2


@dataclass
class Row:
    """One way to run the step; bytes above what is resident."""

    model: str
    name: str
    budget_bytes: int | None
    predicted_bytes: int | None
    measured_bytes: int
    gap: float | None
    cost_ns: int | None
    solve_s: float | None
    first_step_s: float
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        """Did the step take more than its budget?"""
        return self.budget_bytes is not None and self.measured_bytes > self.budget_bytes


class Cell:
    """A model of its own, compiled with ``backend`` (None: eager)."""

    def __init__(self, case: Case, backend: Any) -> None:
        def loss(**inputs: Any) -> Any:
            return case.loss(case.model(**inputs))

        self.case = case
        loss.__code__ = loss.__code__.replace()  # its own: by that Dynamo looks for what it has compiled
        self.run = loss if backend is None else torch.compile(loss, backend=backend)

    def clear(self) -> None:
        """No gradients, as before a first step."""
        for p in self.case.model.parameters():
            p.grad = None

    def step(self) -> None:
        """Forward and backward."""
        self.run(**self.case.inputs).backward()

    def step_and_clear(self) -> None:
        """One step that leaves nothing behind."""
        self.step()
        self.clear()


def rows_of(model: str) -> list[Row]:
    """All rows of one model: eager, Inductor alone, and rematc from tight to no limit."""
    rows, cells = [], {}
    torch._dynamo.reset()  # not between cells: those before would be compiled again when they are timed
    for name, backend in backends(model):
        cell = Cell(ZOO[model](), backend)
        started = time.perf_counter()
        cell.step()
        first_s = time.perf_counter() - started
        cell.clear()
        peak = rematc.measure(cell.step_and_clear, warmup=1).peak_bytes
        rows.append(_row(model, name, backend, peak, first_s))
        cells[name] = cell
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    seconds = seconds_of_each(cells, ROUNDS)
    for row in rows:
        row.seconds = statistics.median(seconds[row.name])
    return rows


def backends(model: str) -> list[tuple[str, Any]]:
    """Each way to compile the model, by name."""
    resident, floor, top = limits(model)
    found: list[tuple[str, Any]] = [("eager", None), ("Inductor alone", "inductor")]
    for share in SHARES:
        if share is None:
            found.append(("rematc, no limit", rematc.backend(None)))
        else:
            budget = int(floor + share * max(top - floor, floor - resident))
            found.append((f"rematc, {share:.0%}", rematc.backend(budget)))
    return found


def limits(model: str) -> tuple[int, int, int]:
    """Resident bytes, the smallest budget, and the peak of the cheapest plan; nothing is run."""
    case = ZOO[model]()
    try:
        Cell(case, rematc.backend(1)).step()
    except rematc.BudgetError as e:
        refused = e
    free = rematc.backend(None)
    Cell(case, free).step()
    return refused.resident_bytes, refused.minimum_bytes, free.plans[-1].peak_bytes


def _row(model: str, name: str, backend: Any, peak: int, first_s: float) -> Row:
    if not isinstance(backend, rematc.Backend):
        return Row(model, name, None, None, peak, None, None, None, first_s)
    (plan,), (problem,) = backend.plans, backend.problems
    budget = None if plan.budget_bytes is None else plan.budget_bytes - problem.resident_bytes
    predicted = plan.peak_bytes - problem.resident_bytes
    gap = None if plan.status == "baseline" else plan.gap
    return Row(model, name, budget, predicted, peak, gap, plan.cost_ns, plan.solve_s, first_s)


def claims(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the README claims: in words, measured, the goal, and whether it holds."""
    planned = [(r, r.predicted_bytes) for r in rows if r.predicted_bytes]
    limited = [(r, r.budget_bytes) for r in rows if r.budget_bytes]
    free = [r for r, _ in planned if r.budget_bytes is None]
    eager = {r.model: r.measured_bytes for r in rows if r.name == "eager"}
    found = [
        ("largest share of a budget used", [r.measured_bytes / budget for r, budget in limited], 1.0),
        ("measured peak, of that predicted", [r.measured_bytes / peak for r, peak in planned], 1.0),
        ("predicted peak, of that measured", [peak / r.measured_bytes for r, peak in planned], GOAL_RATIO),
        ("solving, of the first step", [(r.solve_s or 0) / r.first_step_s for r, _ in planned], GOAL_SHARE),
        ("peak without a limit, of eager's", [r.measured_bytes / eager[r.model] for r in free], 1.0),
    ]
    return [
        {"claim": c, "measured": max(m, default=0.0), "goal": goal, "holds": max(m, default=0.0) <= goal}
        for c, m, goal in found
    ]


def table(rows: Sequence[Row]) -> str:
    """For people; MB are 10^6 bytes, above what is resident."""
    alone = {r.model: r.seconds for r in rows if r.name == "Inductor alone"}
    lines = [
        (r.model, r.name, _mb(r.budget_bytes), _mb(r.predicted_bytes), _mb(r.measured_bytes),
         "" if r.gap is None else f"{r.gap:.1%}", "" if r.solve_s is None else f"{r.solve_s:.1f} s",
         f"{r.first_step_s:.0f} s", f"{r.seconds / alone[r.model]:.2f}" if alone.get(r.model) else "")
        for r in rows
    ]  # fmt: skip
    head = ("", "", "budget", "predicted", "measured", "gap", "solve", "first step", "step")
    return tabulate(lines, headers=head, colalign=("left", "left", *("right",) * 7), disable_numparse=True)


def _mb(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.2f} MB"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and time; 1 if a budget was exceeded."""
    args = zoo_arguments("inductor", __doc__, argv)
    rows: list[Row] = []
    with nothing_kept():
        for model in args.names:
            rows += rows_of(model)
            if args.json is not None:  # what is there so far: a model takes minutes
                found = {"rounds": ROUNDS, "rows": [asdict(r) for r in rows], "claims": claims(rows)}
                write_results(args.json, "inductor", found)
    print(f"\n{table(rows)}\n\nstep: time of one, to that of Inductor alone; median of {ROUNDS} rounds.")
    for claim in claims(rows):
        print(f"{claim['claim']}: {claim['measured']:.3f} (goal: at most {claim['goal']:g})")
    over = [f"{r.model}, {r.name}" for r in rows if r.over]
    print("\n".join(f"FAILED: {name} took more than its budget" for name in over) or "No budget exceeded.")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
