"""`python -m benchmarks.solver`: cost, bound, time and memory of the solver over the corpus of problems."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.machine import write_results
from benchmarks.plot import plot
from benchmarks.sweep import (
    BUDGETS,
    GAP,
    ORACLES,
    Facts,
    Row,
    Settings,
    best_baseline,
    facts_of,
    family_of,
    rows_of,
)

QUICK_BUDGETS, QUICK_NAMES, QUICK_ORACLE_S = ("1.25x", "0.9p"), 2, 10.0
GROWTH = (8, 80)
LAYER_GOALS_S = ((12, 2.0), (32, 10.0), (80, 30.0))
RANDOM_GOALS_S = ((100, 5.0), (250, 10.0), (500, 60.0), (1000, 60.0))
GIB = 2**30
Claim = dict[str, Any]


def claims(rows: Sequence[Row], facts: Sequence[Facts]) -> list[Claim]:
    """What the README claims of which something was measured; a plan that is missing is infinitely bad."""
    ours = [r for r in rows if r["solver"] == "rematc"]
    models = [r for r in ours if r["kind"] == "model"]
    found = [
        *_worst(
            "gap at 1.25 times the smallest budget and above", 0.01, models, "gap", _from(1.25, math.inf)
        ),
        *_worst("gap between 1.1 and 1.25 times the smallest", 0.03, models, "gap", _from(1.1, 1.25)),
    ]
    ample = [r for r in models if _from(1.1, math.inf)(r)]  # below that the time limit is what ends it
    for layers, goal in LAYER_GOALS_S:
        found += _worst(
            f"slowest solve of {layers} layers, seconds", goal, ample, "solve_s", _has("layers", layers)
        )
    found += _growth(ample)
    random = [r for r in ours if r["kind"] == "random"]
    for ops, goal in RANDOM_GOALS_S:
        found += _worst(
            f"slowest random graph of {ops} ops, seconds", goal, random, "solve_s", _has("ops", ops)
        )
    found += [*_beside_moccasin(rows), *_beside_checkmate(rows), *_rising(ours)]
    if ours:  # a process that was ended can't say how much it had
        most = max(r.get("memory_bytes", math.inf) for r in ours)
        found.append(_claim("most memory of a solve, GiB", most / GIB, 4.0))
    floors = [
        f.accepted_bytes / f.bound_bytes if f.bound_bytes > 0 else math.inf
        for f in facts
        if f.accepted_bytes and f.bound_bytes
    ]
    if floors:
        found.append(_claim("smallest budget to the proven bound on it", max(floors), 1.05))
    return found


def _claim(words: str, measured: float, goal: float) -> Claim:
    return {"claim": words, "measured": measured, "goal": goal, "holds": measured <= goal}


def _from(low: float, high: float) -> Callable[[Row], bool]:
    return lambda r: low - 1e-6 <= r.get("of_floor", 0.0) < high - 1e-6


def _has(key: str, value: int) -> Callable[[Row], bool]:
    return lambda r: bool(r[key] == value)


def _worst(
    words: str, goal: float, rows: Iterable[Row], key: str, counts: Callable[[Row], bool]
) -> list[Claim]:
    """The largest of ``key`` over the rows that count; infinite where one of them has an error."""
    measured = [math.inf if "error" in r else float(r[key]) for r in rows if counts(r)]
    return [_claim(words, max(measured), goal)] if measured else []


def _growth(models: Sequence[Row]) -> list[Claim]:
    """The largest ratio of times between the two sizes of one family, at one budget."""
    seconds = {
        (family_of(r["problem"]), r["budget"], r["layers"]): math.inf if "error" in r else r["solve_s"]
        for r in models
        if r["layers"] in GROWTH
    }
    few, many = GROWTH
    ratios = [
        s / seconds[family, label, few]
        for (family, label, n), s in seconds.items()
        if n == many and (family, label, few) in seconds
    ]
    return [_claim(f"growth of time from {few} to {many} layers", max(ratios), 15.0)] if ratios else []


def _beside_moccasin(rows: Sequence[Row]) -> list[Claim]:
    """The largest cost to that of Moccasin's formulation on random graphs, where it found a plan at all."""
    costs = {(r["problem"], r["budget"], r["solver"]): r.get("cost_ns", math.inf) for r in rows}
    ratios = []
    for r in rows:
        if r["solver"] == "moccasin" and r["kind"] == "random" and "cost_ns" in r:
            ours = costs.get((r["problem"], r["budget"], "rematc"), math.inf)
            ratios.append(_ratio(ours, r["cost_ns"]))
    return [_claim("cost to Moccasin's formulation, random graphs", max(ratios), 1.0)] if ratios else []


def _beside_checkmate(rows: Sequence[Row]) -> list[Claim]:
    """The largest cost to the optimum of Checkmate's formulation (within `GAP`), and bound to its plans."""
    ours = {(r["problem"], r["budget"]): r for r in rows if r["solver"] == "rematc"}
    theirs = [r for r in rows if r["solver"] == "checkmate" and "cost_ns" in r]
    pairs = [(ours.get((r["problem"], r["budget"]), {}), r) for r in theirs]
    costs = [_ratio(a.get("cost_ns", math.inf), b["cost_ns"]) for a, b in pairs if b["status"] == "optimal"]
    bounds = [_ratio(a.get("bound_ns", math.inf), b["cost_ns"]) for a, b in pairs]
    found = [_claim("cost to the optimum of Checkmate's formulation", max(costs), 1 + GAP)] if costs else []
    return found + (
        [_claim("bound to a plan of Checkmate's formulation", max(bounds), 1.0)] if bounds else []
    )


def _rising(ours: Sequence[Row]) -> list[Claim]:
    """The largest cost to the lowest at a smaller budget of the same problem; each is found within `GAP`."""
    costs: dict[str, dict[int, float]] = {}
    for r in ours:
        costs.setdefault(r["problem"], {})[r["budget_bytes"]] = r.get("cost_ns", math.inf)
    ratios = [
        _ratio(cost, min(smaller))
        for by_budget in costs.values()
        for budget, cost in by_budget.items()
        if (smaller := [c for b, c in by_budget.items() if b < budget and math.isfinite(c)])
    ]
    return [_claim("cost to that at a smaller budget", max(ratios), 1 + GAP)] if ratios else []


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else 1.0 + ours


def table(rows: Sequence[Row]) -> str:
    """The solver's and the oracles' rows for people; MB are 10^6 bytes above what is resident."""
    shown = []
    for r in rows:
        if r["solver"] not in ("rematc", *ORACLES):
            continue
        best = best_baseline(rows, r) if r["solver"] == "rematc" else None
        name = r["problem"].rpartition("/")[2].removesuffix(".json")
        budget = "-" if r["budget_bytes"] is None else f"{r['budget_bytes'] / 1e6:.2f} MB"
        line = [name, r["budget"], budget, r["solver"]]
        if "cost_ns" in r:
            line += [f"{r['cost_of_forward']:.2%}", f"{r['gap']:.2%}", r["status"], f"{r['solve_s']:.2f} s"]
            line += [f"{r['memory_bytes'] / 1e6:.0f} MB"]
        else:
            line += ["-", "-", (r.get("error") or r["status"])[:48], f"{r.get('solve_s', 0):.2f} s", "-"]
        line += [f"{best['cost_of_forward']:.2%} {best['solver']}" if best else ""]
        shown.append(line)
    head = ("problem", "at", "budget", "solver", "cost", "gap", "status", "solve", "memory", "best baseline")
    return tabulate(shown, headers=head, disable_numparse=True)


def names_of(args: argparse.Namespace) -> list[str]:
    """The names asked for, or the corpus; with ``--quick`` its first models and random graphs."""
    if args.names:
        return list(args.names)
    from benchmarks import corpus

    models, random = (list(corpus.names(kind)) for kind in ("model", "random"))
    return models[:QUICK_NAMES] + random[:QUICK_NAMES] if args.quick else models + random


def sweep(names: Sequence[str], settings: Settings, file: Path | None) -> tuple[list[Row], list[Facts]]:
    """All rows; after each the results so far are written, so that a run that is cut keeps them."""
    rows: list[Row] = []
    facts: list[Facts] = []
    for name in names:
        facts.append(facts_of(name))
        print(
            f"{name}: {facts[-1].error or 'smallest budget'} {facts[-1].accepted_bytes / 1e6:.2f} MB",
            flush=True,
        )
        for row in rows_of(facts[-1], settings):
            rows.append(row)
            if row["solver"] in ("rematc", *ORACLES):
                print(table([row]).splitlines()[-1], flush=True)
            save(rows, facts, file)
    return rows, facts


def save(rows: Sequence[Row], facts: Sequence[Facts], file: Path | None) -> None:
    """Write what there is, claims too."""
    if file is not None:
        found = {"rows": rows, "problems": [asdict(f) for f in facts], "claims": claims(rows, facts)}
        write_results(file, "solver", found)


def _settings(args: argparse.Namespace) -> Settings:
    oracles = () if args.oracles is None else tuple(args.oracles) or ORACLES
    asked = Settings(tuple(args.budgets), 5, oracles, args.oracle_seconds, args.oracle_ops, not args.alone)
    if not args.quick:
        return asked
    shortest = min(QUICK_ORACLE_S, asked.oracle_s)
    return replace(asked, budgets=asked.budgets or QUICK_BUDGETS, runs=1, oracle_s=shortest)


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep, show, plot; 1 if a plan could not be had anywhere."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver", description=__doc__)
    parser.add_argument("--names", nargs="+", default=[], help="problems of the corpus, or problem files")
    parser.add_argument("--budgets", nargs="+", default=[], help=BUDGETS)
    parser.add_argument("--quick", action="store_true", help="few problems, few budgets, one run of each")
    parser.add_argument(
        "--alone", action="store_true", help="no baselines, which take minutes where graphs are large"
    )
    parser.add_argument(
        "--oracles", nargs="*", choices=ORACLES, help="ask Checkmate's and Moccasin's models too, or one"
    )
    parser.add_argument("--oracle-ops", type=int, default=260, help="of no larger graph (default 260 ops)")
    parser.add_argument("--oracle-seconds", type=float, default=180.0, help="their time limit (default 180)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE, row by row")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="SVG or PNG; by default beside the JSON")
    args = parser.parse_args(argv)
    settings = _settings(args)
    rows, facts = sweep(names_of(args), settings, args.json)
    print(f"\n{table(rows)}\n")
    shown = [
        (c["claim"], f"{c['measured']:.3g}", f"{c['goal']:g}", "holds" if c["holds"] else "MISSED")
        for c in claims(rows, facts)
    ]
    print(tabulate(shown, headers=("claim", "measured", "at most", ""), disable_numparse=True))
    picture = args.plot or (args.json and args.json.with_suffix(".svg"))
    if picture:
        plot(rows, picture)
    failed = [r for r in rows if r["solver"] == "rematc" and "error" in r]
    print(
        "\n".join(f"FAILED: {r['problem']} at {r['budget']}: {r['error']}" for r in failed)
        or "Every budget was met."
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
