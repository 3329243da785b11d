"""The decision, as data: what is saved, and what the backward pass runs. JSON in and out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rematc.errors import PlanError
from rematc.problem import TEXT, WHOLE, WHOLES, Kind, list_of, or_null, read_object

FORMAT = "rematc.plan/1"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is saved from forward to backward, and the backward steps in order.

    ``saved`` are value indices, ``backward`` op indices of the problem's graph. An op of the
    forward pass that stands in ``backward`` is recomputed there; at each later appearance it is
    recomputed again. The forward steps follow from ``saved`` (`Graph.forward_steps`).

    ``cost_ns`` is the time of all recomputation, ``bound_ns`` a proven lower bound on that of any
    plan under ``budget_bytes`` (None: no limit), ``peak_bytes`` the predicted peak of the step,
    resident included. ``strategy`` names who made it, ``status`` how: "optimal" (within the gap
    asked for), "feasible" (stopped by the time limit), "greedy" (the solver's fallback) or
    "baseline". ``digest`` is that of its problem, and ``notes`` are what a user should know.

    >>> p = Plan(saved=(3,), backward=(5, 2, 6), cost_ns=110, bound_ns=100)
    >>> p.gap
    0.1
    """

    saved: tuple[int, ...]
    backward: tuple[int, ...]
    cost_ns: int = 0
    bound_ns: int = 0
    peak_bytes: int = 0
    budget_bytes: int | None = None
    status: str = "baseline"
    strategy: str = ""
    solve_s: float = 0.0
    digest: str = ""
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How far from optimal the plan can be at most: (cost - bound) / bound; 0.0 is proven."""
        if self.cost_ns <= self.bound_ns:
            return 0.0
        return (self.cost_ns - self.bound_ns) / self.bound_ns if self.bound_ns else float("inf")

    @property
    def summary(self) -> str:
        """One line for the log."""
        limit = "none" if self.budget_bytes is None else f"{self.budget_bytes / 1e6:.1f} MB"
        gap = f"{self.gap:.2%}" if self.gap < float("inf") else "unknown"
        return (
            f"plan {self.digest}: peak {self.peak_bytes / 1e6:.1f} MB, budget {limit}, recomputation "
            f"{self.cost_ns / 1e6:.2f} ms, gap {gap}, "
            f"{self.status} by {self.strategy} in {self.solve_s:.1f} s"
        )

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote; `PlanError` says what is wrong with anything else."""
        return Plan(**read_object(text, FORMAT, _PLAN, PlanError))


_PLAN = {
    "saved": WHOLES,
    "backward": WHOLES,
    "cost_ns": WHOLE,
    "bound_ns": WHOLE,
    "peak_bytes": WHOLE,
    "budget_bytes": or_null(WHOLE),
    "status": TEXT,
    "strategy": TEXT,
    "solve_s": Kind("a number of seconds", lambda x: type(x) in (int, float) and x >= 0),
    "digest": TEXT,
    "notes": list_of("texts", TEXT.fits),
}
