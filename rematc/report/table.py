"""`report`: a plan in a terminal, the numbers of the step first, then one row for each kind of layer."""

from __future__ import annotations

import textwrap

from tabulate import tabulate

from rematc.errors import format_bytes
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.report.head import head
from rematc.report.kinds import shortened
from rematc.report.rows import Reading, Row, duration, rows, why

COLUMNS = ("layer kind", "saved", "dropped", "again", "why")
LEGEND = (
    "saved: bytes kept for the backward pass; dropped: bytes that it reads and are computed again; "
    "again: time of the layers' own ops for that; MB/ms: bytes for each millisecond of it"
)
SMALL = 0.002  # of all bytes and of all recomputation: kinds below both are summed up in one row
KIND_WIDTH = 34


def report(problem: Problem, plan: Plan, width: int = 100) -> str:
    """``plan`` in words and numbers, for a terminal of ``width`` columns (at least 80).

    A row counts the bytes that its kind of layer saves, those that the backward pass reads but are
    dropped and computed again, and the time that its ops run again. Raises `PlanError` if the plan is not
    one for ``problem``.

    >>> from rematc.baselines import recompute_all
    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 8, 4, 8), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,), module="h.0"), Op("g", "exp", (1,), (2,)),
    ...            Op("h", "mul", (1, 3), (4,), phase="backward")), (0,), (3,), (2,), (4,))
    >>> p = Problem(g, (OpCost(5),) * 3)
    >>> print(next(line for line in report(p, recompute_all(p)).splitlines() if line.startswith("h.0")))
    h.0               0 B        8 B     5 ns  recomputed (sin x1): not alive at the peak either way
    """
    reading = Reading(problem, plan)
    width = max(width, 80)
    legend = textwrap.fill(LEGEND, width)
    return f"{head(reading, width)}\n\n{_table(reading, width)}\n\n{legend}"


def _table(reading: Reading, width: int) -> str:
    shown, small = _split(reading, rows(reading))
    lines = [(_title(row), *_numbers(reading, [row]), why(reading, row)) for row in shown]
    if small:
        lines.append((f"{len(small)} kinds more", *_numbers(reading, small), "small"))
    if not lines:
        return "The backward pass reads nothing that the forward pass makes."
    # tabulate leaves two columns beside a heading.
    taken = [max(len(COLUMNS[i]) + 2, *(len(line[i]) for line in lines)) for i in range(4)]
    left = max(24, width - sum(taken) - 2 * 4)
    wrapped = [(*line[:4], "\n".join(textwrap.wrap(line[4], left))) for line in lines]
    return tabulate(
        wrapped, headers=COLUMNS, disable_numparse=True, colalign=("left", "right", "right", "right", "left")
    )


def _split(reading: Reading, found: list[Row]) -> tuple[list[Row], list[Row]]:
    total, time_ns = sum(_bytes(reading, r) for r in found), sum(r.recompute_ns for r in found)
    small = [r for r in found if _bytes(reading, r) < SMALL * total and r.recompute_ns <= SMALL * time_ns]
    return ([r for r in found if r not in small], small) if len(small) > 1 else (found, [])


def _bytes(reading: Reading, row: Row) -> int:
    return row.pinned.total() + reading.bytes_of([*row.chosen, *row.dropped])


def _numbers(reading: Reading, some: list[Row]) -> tuple[str, str, str]:
    saved = sum(r.pinned.total() + reading.bytes_of(r.chosen) for r in some)
    dropped = sum(reading.bytes_of(r.dropped) for r in some)
    return format_bytes(saved), format_bytes(dropped), duration(sum(r.recompute_ns for r in some))


def _title(row: Row) -> str:
    """The kind and how many modules are of it; of a long one, its end."""
    count = f" x{len(row.modules)}" if len(row.modules) > 1 else ""
    return shortened(row.kind, KIND_WIDTH - len(count)) + count
