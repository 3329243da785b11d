"""`python -m benchmarks.rival`: under Inductor, is rematc as fast as torch's own budget at the same peak?

Models of the test zoo, each with torch's `activation_memory_budget` from 1.0 (Inductor alone) to 0.0, then
with rematc at each peak that those reached, and at the smallest budget that it accepts. Steps of one model
are timed in turn, so that what else the machine does disturbs all alike.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tabulate import tabulate

import rematc
from benchmarks.arguments import zoo_arguments
from benchmarks.inductor import Cell
from benchmarks.llama import torchs_budget
from benchmarks.machine import leave_compilers_garbage, nothing_kept, seconds_of_each, write_results
from benchmarks.models import largest_difference
from tests.zoo import ZOO

SHARES = (1.0, 0.8, 0.5, 0.2, 0.1, 0.05, 0.0)
ALONE = "Inductor alone"
SMALLEST = "rematc, the smallest"
ROUNDS = 31
SAME = 1.01  # peaks that are nearer than that are one
WRONG = 0.01  # of a model's largest gradient
GOAL_STEP, GOAL_PEAK = 1.0, 0.75


@dataclass
class Row:
    """One way to run the step; bytes above what is resident, times to those of Inductor alone.

    ``difference`` of the gradients to those of Inductor alone, of the largest of them: random ops draw the
    same there. ``seconds`` are of each round.
    """

    model: str
    name: str
    budget_bytes: int | None
    measured_bytes: int
    difference: float
    seconds: list[float] = field(default_factory=list)
    ratio: float = 0.0

    @property
    def is_rematc(self) -> bool:
        """Or is it torch's?"""
        return self.name.startswith("rematc")

    @property
    def is_wrong(self) -> bool:
        """Are its gradients others than rounding explains?"""
        return self.difference > WRONG


class Runs:
    """The cells of one model, and a row of each."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.cells: dict[str, Cell] = {}
        self.rows: list[Row] = []
        self.expected: list[torch.Tensor] = []

    def add(self, name: str, backend: Any, budget_bytes: int | None = None) -> Row:
        """Compile and measure; raises `BudgetError` where it is refused."""
        cell = Cell(ZOO[self.model](), backend)
        for _ in range(2):  # what the second compiles anew is not measured either
            torch.manual_seed(0)
            cell.clear()
            cell.step()
        gradients = [p.grad.clone() for p in cell.case.model.parameters() if p.grad is not None]
        cell.clear()
        peak = rematc.measure(cell.step_and_clear, warmup=1).peak_bytes
        self.expected = self.expected or gradients
        row = Row(self.model, name, budget_bytes, peak, relative_difference(gradients, self.expected))
        self.cells[name] = cell
        self.rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)
        return row

    def time(self, rounds: int) -> None:
        """All cells in turn."""
        leave_compilers_garbage()
        for name, seconds in seconds_of_each(self.cells, rounds).items():
            next(row for row in self.rows if row.name == name).seconds = seconds
        alone = self.rows[0].seconds
        for row in self.rows:
            row.ratio = statistics.median(s / a for s, a in zip(row.seconds, alone, strict=True))


def rows_of(model: str, rounds: int) -> list[Row]:
    """All rows of one model."""
    torch._dynamo.reset()
    runs = Runs(model)
    for share in SHARES:
        runs.add(ALONE if share == 1 else f"torch's budget {share}", torchs_budget(share, "inductor"))
    resident, floor = limits(model)
    for peak in distinct([row.measured_bytes for row in runs.rows]):
        with suppress(rematc.BudgetError):
            runs.add(f"rematc, {peak / 1e6:.2f} MB", rematc.backend(resident + peak), peak)
    runs.add(SMALLEST, rematc.backend(floor), floor - resident)
    runs.time(rounds)
    return runs.rows


def limits(model: str) -> tuple[int, int]:
    """Resident bytes, and the smallest budget; nothing is run."""
    try:
        Cell(ZOO[model](), rematc.backend(1)).step()
    except rematc.BudgetError as e:
        return e.resident_bytes, e.minimum_bytes
    raise AssertionError("a budget of one byte was accepted")


def distinct(peaks: Sequence[int]) -> list[int]:
    """Largest first; of those that are nearly the same the largest.

    >>> distinct([1000, 995, 500, 1000])
    [1000, 500]
    """
    found: list[int] = []
    for peak in sorted(peaks, reverse=True):
        if not found or peak * SAME < found[-1]:
            found.append(peak)
    return found


def relative_difference(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference, of the largest value that is expected."""
    return largest_difference(got, expected) / max(float(e.abs().max()) for e in expected)


def duels(rows: Sequence[Row]) -> list[tuple[int, Row, Row, float]]:
    """Each peak that torch's budget reaches: its fastest there, rematc's, and the time of that to its.

    One may take less memory than the peak allows. Where torch's gradients are wrong it does not count;
    rematc's would be a fault, and are seen as such.
    """
    found = []
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        theirs = [row for row in mine if not row.is_rematc and not row.is_wrong]
        for peak in distinct([row.measured_bytes for row in theirs]):
            fast = [
                min((r for r in side if r.measured_bytes <= peak), key=lambda r: r.ratio, default=None)
                for side in ([r for r in mine if r.is_rematc], theirs)
            ]
            if fast[0] and fast[1]:
                pairs = zip(fast[0].seconds, fast[1].seconds, strict=True)
                found.append((peak, fast[1], fast[0], statistics.median(a / b for a, b in pairs)))
    return found


def lowest(rows: Sequence[Row]) -> dict[str, float]:
    """By model: the lowest peak of rematc, of the lowest that torch's budget reaches."""
    found = {}
    for model in dict.fromkeys(row.model for row in rows):
        sides = [
            [r.measured_bytes for r in rows if r.model == model and r.is_rematc == ours]
            for ours in (True, False)
        ]
        found[model] = min(sides[0]) / min(sides[1])
    return found


def claims(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What is claimed: in words, measured, the goal, and whether it holds."""
    found = [
        (
            "step at the peak of torch's budget, of its own",
            max((ratio for *_, ratio in duels(rows)), default=0.0),
            GOAL_STEP,
        ),
        ("lowest peak, of that of torch's budget", max(lowest(rows).values(), default=0.0), GOAL_PEAK),
        (
            "rematc's gradients off by, of the largest",
            max((r.difference for r in rows if r.is_rematc), default=0.0),
            WRONG,
        ),
    ]
    return [{"claim": c, "measured": m, "goal": goal, "holds": m <= goal} for c, m, goal in found]


def table(rows: Sequence[Row]) -> str:
    """For people; MB are 10^6 bytes, above what is resident."""
    lines = [
        (r.model, r.name, f"{r.measured_bytes / 1e6:.2f} MB", f"{r.ratio:.2f}" if r.ratio else "",
         "WRONG" if r.is_wrong else f"{r.difference:.0e}")
        for r in rows
    ]  # fmt: skip
    head = ("", "", "measured", "step", "gradients")
    return tabulate(lines, headers=head, colalign=("left", "left", *("right",) * 3), disable_numparse=True)


def summary(rows: Sequence[Row]) -> str:
    """Who is faster at which peak, and how low each can go."""
    lines = [
        (theirs.model, f"{peak / 1e6:.2f} MB", theirs.name, ours.name, f"{ratio:.2f}")
        for peak, theirs, ours, ratio in duels(rows)
    ]
    head = ("", "peak", "torch's fastest", "rematc's fastest", "step, of torch's")
    low = ", ".join(f"{model} {share:.2f}" for model, share in lowest(rows).items())
    return f"{tabulate(lines, headers=head, disable_numparse=True)}\n\nlowest peak, of torch's lowest: {low}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and time; 1 if rematc's gradients are wrong."""
    args = zoo_arguments("rival", __doc__, argv, rounds=ROUNDS)
    rows: list[Row] = []
    with nothing_kept():
        for model in args.names:
            rows += rows_of(model, args.rounds)
            print(f"\n{table([r for r in rows if r.model == model])}\n", flush=True)
            if args.json is not None:  # what is there so far: a model takes minutes
                found = {"rounds": args.rounds, "rows": [asdict(r) for r in rows], "claims": claims(rows)}
                write_results(args.json, "rival", found)
    print(f"{summary(rows)}\n")
    for claim in claims(rows):
        print(f"{claim['claim']}: {claim['measured']:.3g} (goal: at most {claim['goal']:g})")
    return 1 if any(r.is_wrong for r in rows if r.is_rematc) else 0


if __name__ == "__main__":
    sys.exit(main())
