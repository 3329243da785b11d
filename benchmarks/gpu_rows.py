"""What `benchmarks.gpu` found: a row for each way to run a step, what they claim, and a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from rematc.errors import format_bytes

FREE = "no limit, Inductor alone"
GOAL_RATIO, GOAL_LOWER = 1.03, 0.75


@dataclass
class Row:
    """One way to run the step of a model. Bytes with all that is resident; ``note``: what failed.

    ``first_bytes`` is the peak of the first step, compiling included, where the device tells. ``waited_s`` of
    ``first_step_s`` were spent waiting for the GPU; the cell had it for ``had_s``.
    """

    model: str
    name: str
    resident_bytes: int
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    first_bytes: int | None = None
    reserved_bytes: int | None = None
    seconds: float | None = None
    solve_s: float | None = None
    first_step_s: float | None = None
    waited_s: float | None = None
    had_s: float | None = None
    note: str = ""

    @property
    def over(self) -> bool:
        """Did the step take more than its budget?"""
        taken = max(self.measured_bytes or 0, self.first_bytes or 0)
        return self.budget_bytes is not None and taken > self.budget_bytes


def claims(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the README claims: in words, measured, the goal, and whether it holds."""
    ran = [r for r in rows if r.measured_bytes is not None]
    ours = [
        (r.budget_bytes, r.predicted_bytes, r.measured_bytes)
        for r in ran
        if r.budget_bytes and r.predicted_bytes and r.measured_bytes
    ]
    found = [
        ("largest share of a budget used", [measured / budget for budget, _, measured in ours], 1.0),
        ("measured peak, of that predicted", [measured / peak for _, peak, measured in ours], 1.0),
        ("predicted peak, of that measured", [peak / measured for _, peak, measured in ours], GOAL_RATIO),
        ("lowest peak above resident, of torch's budget's", list(_lowest_shares(ran)), GOAL_LOWER),
        ("step at torch's budget's peak or below, of its", list(_times_as_low(ran)), 1.0),
    ]
    return [
        {"claim": c, "measured": max(m), "goal": goal, "holds": max(m) <= goal} for c, m, goal in found if m
    ]


def _lowest_shares(ran: Sequence[Row]) -> Iterator[float]:
    for model in dict.fromkeys(r.model for r in ran):
        here = [r for r in ran if r.model == model]
        above = {r.name: (r.measured_bytes or 0) - r.resident_bytes for r in here}
        torchs = [n for name, n in above.items() if name.startswith("torch's")]
        ours = [n for name, n in above.items() if name.startswith("rematc")]
        if torchs and ours:
            yield min(ours) / min(torchs)


def _times_as_low(ran: Sequence[Row]) -> Iterator[float]:
    """Our fastest step at each of its peaks, of its."""
    for torchs in (r for r in ran if r.name.startswith("torch's")):
        as_low = [
            r.seconds
            for r in ran
            if r.model == torchs.model
            and r.name.startswith("rematc")
            and r.seconds
            and (r.measured_bytes or 0) <= (torchs.measured_bytes or 0)
        ]
        if as_low and torchs.seconds:
            yield min(as_low) / torchs.seconds


def table(rows: Sequence[Row]) -> str:
    """For people; all that is resident counted in."""
    base = {r.model: r.seconds for r in rows if r.name == FREE}
    lines = [
        (r.model, r.name, size_of(r.budget_bytes), size_of(r.predicted_bytes),
         r.note or size_of(r.measured_bytes), size_of(r.reserved_bytes),
         f"{r.seconds / b:.2f}x" if r.seconds and (b := base.get(r.model)) else "",
         f"{r.solve_s:.1f} s" if r.solve_s is not None else "",
         f"{r.first_step_s - (r.waited_s or 0):.0f} s" if r.first_step_s is not None else "")
        for r in rows
    ]  # fmt: skip
    head = ("", "", "budget", "predicted", "measured", "reserved", "step", "solve", "first step")
    return tabulate(lines, headers=head, colalign=("left", "left", *("right",) * 7), disable_numparse=True)


def size_of(size: int | None) -> str:
    return "" if size is None else format_bytes(size)
