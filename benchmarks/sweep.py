"""Which problem is solved under which budgets by whom, each in a fresh process; the answers as rows."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL_BUDGETS = ("1.0x", "1.1x", "1.25x", "1.5x", "half", "0.9p")
RANDOM_BUDGETS = ("0.9p", "0.8p")
BUDGETS = "Nx: N times the smallest; half: halfway to the peak of saving all; Np: N of that peak"
# The time limit of the solver by the number of ops: for random graphs it is what is claimed, near enough.
RANDOM_LIMITS_S = ((100, 2.6), (250, 8.0), (10**9, 28.0))
MODEL_LIMIT_S = 20.0
GAP = 0.01
ORACLES = ("checkmate", "moccasin")
BASELINES_S = 120.0
GRACE_S = 180.0  # what a process may take beyond its limit before it is ended: the solver has no hard limit

_LAYERS = re.compile(r"_(\d+)(?:\.json)?$")

Row = dict[str, Any]


@dataclass
class Settings:
    """What the command line asks for."""

    budgets: tuple[str, ...] = ()
    runs: int = 5
    oracles: tuple[str, ...] = ()
    oracle_s: float = 180.0
    oracle_ops: int = 260
    baselines: bool = True


@dataclass
class Facts:
    """One problem, sizes above what is resident; ``accepted_bytes`` is 0 where no floor could be had."""

    name: str
    kind: str = ""
    ops: int = 0
    resident_bytes: int = 0
    forward_ns: int = 0
    peak_bytes: int = 0
    accepted_bytes: int = 0
    bound_bytes: int = 0
    floor_s: float = 0.0
    error: str = ""
    layers: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.layers = layers_of(self.name)


def layers_of(name: str) -> int | None:
    """The number of layers that a model's name ends in, as in "llama_80".

    >>> layers_of("llama_80"), layers_of("some/llama_8.json"), layers_of("resnet50")
    (80, 8, None)
    """
    found = _LAYERS.search(name)
    return int(found[1]) if found else None


def family_of(name: str) -> str:
    """The name without the number of layers, as in "llama"."""
    return _LAYERS.sub("", name).rpartition("/")[2]


def budget_of(label: str, facts: Facts) -> int | None:
    """Bytes above what is resident; None for a multiple of a floor that is not known.

    >>> f = Facts("m", peak_bytes=100, accepted_bytes=40)
    >>> [budget_of(label, f) for label in ("1.0x", "1.25x", "half", "0.9p")]
    [40, 50, 70, 90]
    """
    if label.endswith("p"):
        return math.floor(float(label[:-1]) * facts.peak_bytes)
    if not facts.accepted_bytes:
        return None
    if label == "half":
        return (facts.accepted_bytes + facts.peak_bytes) // 2
    return math.ceil(float(label.removesuffix("x")) * facts.accepted_bytes)


def budgets_of(facts: Facts, settings: Settings) -> dict[str, int]:
    """Bytes by label, from small to large: those below the peak of saving all, and not below the floor."""
    labels = settings.budgets or (MODEL_BUDGETS if facts.kind == "model" else RANDOM_BUDGETS)
    found = {label: b for label in labels if (b := budget_of(label, facts)) is not None}
    kept = {label: b for label, b in found.items() if facts.accepted_bytes <= b < facts.peak_bytes}
    return dict(sorted(kept.items(), key=lambda item: item[1]))


def limit_s(facts: Facts) -> float:
    """The solver's time limit for this problem."""
    if facts.kind == "model":
        return MODEL_LIMIT_S
    return next(limit for ops, limit in RANDOM_LIMITS_S if facts.ops <= ops)


def ask(name: str, who: str, seconds: float, budget: int | None = None, runs: int = 1) -> list[Row]:
    """What a fresh process answers; a row with its error where it ends without one."""
    command = [sys.executable, "-m", "benchmarks.fresh", name, who, "--seconds", str(seconds)]
    command += ["--gap", str(GAP), "--runs", str(runs)]
    command += [] if budget is None else ["--budget", str(budget)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            limit = seconds * (1 + runs) + GRACE_S
            status: int | str = subprocess.run(command, stdout=out, stderr=err, timeout=limit).returncode
        except subprocess.TimeoutExpired as e:
            status = f"no answer in {e.timeout:.0f} s"
        out.seek(0)
        err.seek(0)
        rows: list[Row] = [json.loads(line) for line in out if line.startswith("{")]
        if status != 0:
            why = (err.read().splitlines() or [""])[-1] if isinstance(status, int) else ""
            rows.append({"solver": who, "error": f"ended: {status} {why}".strip()})
    return rows


def facts_of(name: str) -> Facts:
    """The problem's numbers, and for a model the smallest budget that is accepted."""
    (known,) = ask(name, "facts", 1.0)
    if "error" in known:
        return Facts(name, error=known["error"])
    del known["memory_bytes"]
    facts = Facts(name, **known)
    if facts.kind == "model":
        floor = ask(name, "floor", limit_s(facts))[-1]
        facts.error = floor.get("error", "")
        facts.accepted_bytes, facts.bound_bytes = floor.get("accepted_bytes", 0), floor.get("bound_bytes", 0)
        facts.floor_s = floor.get("solve_s", 0.0)
    return facts


def rows_of(facts: Facts, settings: Settings) -> Iterator[Row]:
    """All rows of one problem, one by one as they come: the solver, the oracles, the baselines."""
    oracles = settings.oracles if facts.ops <= settings.oracle_ops else ()
    budgets = budgets_of(facts, settings)
    for label, budget in budgets.items():
        asked = [("rematc", limit_s(facts), settings.runs)]
        asked += [(who, settings.oracle_s, 1) for who in oracles]
        for who, seconds, runs in asked:
            for row in ask(facts.name, who, seconds, budget, runs):
                yield _placed(row, facts, label, budget)
    if settings.baselines and facts.kind == "model" and budgets:
        for row in ask(facts.name, "baselines", BASELINES_S):
            yield _placed(row, facts, "", None)
        for label, budget in budgets.items():
            for row in ask(facts.name, "baselines", BASELINES_S, budget):
                yield _placed(row, facts, label, budget)


def _placed(row: Row, facts: Facts, label: str, budget: int | None) -> Row:
    """The row with its problem and budget; a plan of a baseline that does not fit is marked."""
    placed = {"problem": facts.name, "kind": facts.kind, "ops": facts.ops, "layers": facts.layers}
    placed |= {"budget": label, "budget_bytes": budget}
    if budget is not None and facts.accepted_bytes:
        placed["of_floor"] = budget / facts.accepted_bytes
    if "cost_ns" in row and facts.forward_ns:
        placed["cost_of_forward"] = row["cost_ns"] / facts.forward_ns
        placed["fits"] = budget is None or row["peak_bytes"] <= budget
    return placed | row


def best_baseline(rows: Sequence[Row], row: Row) -> Row | None:
    """The cheapest plan of a baseline that fits the budget of ``row``."""
    fits = [
        r
        for r in rows
        if r["problem"] == row["problem"]
        and r["solver"] not in ("rematc", *ORACLES)
        and "cost_ns" in r
        and row["budget_bytes"] is not None
        and r["peak_bytes"] <= row["budget_bytes"]
    ]
    return min(fits, key=lambda r: r["cost_ns"], default=None)
