"""`python -m benchmarks.llama`: an 8-layer Llama under budgets, beside checkpointing and torch's budget."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from tabulate import tabulate
from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo import lookup_backend

import rematc
from benchmarks.machine import seconds_of_each, write_results
from benchmarks.models import Variant, largest_difference, llama8
from rematc.options import Options, SolveOptions
from rematc.problem import Problem
from rematc.trace import pose_model

ROUNDS, CLOSER = 9, 10  # of all, and times as many of the three that the claim is about
BUDGETS_MB = (45.0, 50.7, 52.5, 80.0)  # above what is resident; 50.7 and 52.5 are checkpointing's own peaks
SOLVE_MB = (45.0, 52.5, 60.0, 80.0, 120.0, 160.0)
BASE, PEER = "compiled", "checkpoint each layer"
SAME_MEMORY = "rematc 52.5 MB"
GOAL_RATIO, GOAL_FLOOR_MB, GOAL_SOLVE_S = 0.60, 39.0, 30.0


@dataclass
class Row:
    """One way to run the step; bytes above what is resident."""

    name: str
    budget_bytes: int | None
    predicted_bytes: int | None
    measured_bytes: int
    difference: float
    seconds: float = 0.0
    ratio: float = 0.0  # to the step without recomputation
    recompute: float = 0.0  # time above that step's, to the same of checkpointing each layer


@dataclass
class Solved:
    """One budget, solved without a step."""

    budget_bytes: int | None
    peak_bytes: int
    cost_of_forward: float
    gap: float
    status: str
    seconds: float


def variants(resident: int) -> list[Variant]:
    """All ways to run the step, each with a model of its own."""
    made = [
        _variant("eager"),
        _variant(BASE, rematc.backend(None, inner="eager")),
        _variant("compiled, torch's min-cut", "aot_eager"),
        _variant(f"{PEER}, eager", checkpointed=True),
        _variant(PEER, "aot_eager", checkpointed=True),
    ]
    made += [_variant(f"activation_memory_budget {x}", torchs_budget(x)) for x in (0.5, 0.0)]
    for mb in BUDGETS_MB:
        made.append(_variant(f"rematc {mb} MB", rematc.backend(resident + int(mb * 1e6), inner="eager")))
    return made


def _variant(name: str, backend: Any = None, checkpointed: bool = False) -> Variant:
    model, inputs = llama8()
    if checkpointed:
        enable_checkpointing(model)

    def loss() -> torch.Tensor:  # alone: logits that a graph returns count as held
        out: torch.Tensor = model(**inputs).loss
        return out

    run = loss if backend is None else torch.compile(loss, backend=backend, fullgraph=True)
    return Variant(name, model, run, backend if isinstance(backend, rematc.Backend) else None)


def enable_checkpointing(model: Any) -> None:
    """`torch.utils.checkpoint` on every decoder layer; transformers 5.23 has a new name for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def torchs_budget(share: float, inner: str = "aot_eager") -> Callable[..., Any]:
    """torch's own budget, a share of the saved bytes; op by op unless ``inner`` is "inductor"."""

    def backend(gm: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return lookup_backend(inner)(gm, inputs)

    return backend


def measured(all_variants: Sequence[Variant], resident: int) -> tuple[list[Row], dict[str, Variant]]:
    """The rows with their peaks, and the variants that can be run; a refused budget is said and left out."""
    rows, runs = [], {}
    base: list[torch.Tensor | None] | None = None
    for v in all_variants:
        try:
            v.step()  # compiles
        except rematc.BudgetError as e:
            print(f"{v.name}: refused, the least is {_mb(e.minimum_bytes - resident)}", flush=True)
            continue
        base = v.gradients() if base is None else base  # of the first, eager
        difference = largest_difference(v.gradients(), base)
        predicted = None if v.predicted_bytes is None else v.predicted_bytes - resident
        budget = None if v.budget_bytes is None else v.budget_bytes - resident
        rows.append(Row(v.name, budget, predicted, v.measured_bytes(), difference))
        runs[v.name] = v
    return rows, runs


def fill_times(rows: Sequence[Row], seconds: dict[str, list[float]]) -> None:
    """Medians over rounds; differences and ratios are within a round, where all had the same machine."""

    def above(name: str) -> float:
        return statistics.median(s - b for s, b in zip(seconds[name], seconds[BASE], strict=True))

    for row in rows:
        row.seconds = statistics.median(seconds[row.name])
        pairs = zip(seconds[row.name], seconds[BASE], strict=True)
        row.ratio = statistics.median(s / b for s, b in pairs)
        row.recompute = above(row.name) / above(PEER)


def least_bytes(problem: Problem) -> int:
    """The smallest budget that is accepted, above what is resident."""
    try:
        rematc.solve(problem.with_budget(1), SolveOptions())
    except rematc.BudgetError as e:
        return e.minimum_bytes - problem.resident_bytes
    raise SystemExit("FAILED: a budget of one byte was accepted")


def solve_each(problem: Problem, least: int) -> list[Solved]:
    """Solve from just above the least to no limit; a budget below the least is left out."""
    budgets = [int(least * 1.02), *(int(mb * 1e6) for mb in SOLVE_MB)]
    asked = [b + problem.resident_bytes for b in sorted(budgets) if b >= least]
    return [solved(problem.with_budget(b)) for b in [*asked, None]]


def solved(problem: Problem) -> Solved:
    """Solve one problem with the default settings."""
    forward_ns = problem.forward_ns
    started = time.perf_counter()
    plan = rematc.solve(problem, SolveOptions())
    seconds = time.perf_counter() - started
    peak = plan.peak_bytes - problem.resident_bytes
    return Solved(problem.graph_budget_bytes, peak, plan.cost_ns / forward_ns, plan.gap, plan.status, seconds)


def claims(rows: Sequence[Row], solves: Sequence[Solved], least: int) -> list[dict[str, Any]]:
    """What the README claims: in words, measured, the goal, and whether it holds."""
    by_name = {row.name: row for row in rows}
    ratio = by_name[SAME_MEMORY].recompute if SAME_MEMORY in by_name else float("inf")
    limited = [row for row in rows if row.budget_bytes]
    share = max((row.measured_bytes / (row.budget_bytes or 1) for row in limited), default=0.0)
    slowest = max(s.seconds for s in solves)
    rows_ = [
        ("recomputation at 52.5 MB, of checkpointing each layer's", ratio, GOAL_RATIO),
        ("smallest budget, MB above resident", least / 1e6, GOAL_FLOOR_MB),
        ("slowest solve, seconds", slowest, GOAL_SOLVE_S),
        ("largest share of a budget used", share, 1.0),
    ]
    return [{"claim": c, "measured": m, "goal": goal, "holds": m <= goal} for c, m, goal in rows_]


def tables(rows: Sequence[Row], solves: Sequence[Solved]) -> str:
    """Both tables for people; MB are 10^6 bytes, above what is resident."""
    steps = [
        (r.name, _mb(r.budget_bytes), _mb(r.predicted_bytes), _mb(r.measured_bytes),
         f"{r.seconds * 1e3:.0f} ms", f"{r.ratio:.3f}", f"{r.recompute:.2f}", f"{r.difference:.1g}")
        for r in rows
    ]  # fmt: skip
    head = ("", "budget", "predicted", "measured", "step", "ratio", "recompute", "grad. off")
    plans = [
        (_mb(s.budget_bytes), _mb(s.peak_bytes), f"{s.cost_of_forward:.1%}", f"{s.gap:.1%}", s.status,
         f"{s.seconds:.1f} s")
        for s in solves
    ]  # fmt: skip
    left, right = ("left", *("right",) * 7), ("right",) * 6
    second = ("budget", "peak", "cost of forward", "gap", "status", "solve")
    return (
        tabulate(steps, headers=head, colalign=left, disable_numparse=True)
        + "\n\n"
        + tabulate(plans, headers=second, colalign=right, disable_numparse=True)
    )


def _mb(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.2f} MB"


def posed() -> Problem:
    """The problem of the step, op by op, without a limit."""
    model, inputs = llama8()
    assert isinstance(model, nn.Module)
    problem, _ = pose_model(model, inputs, lambda out: out.loss, Options(None, "eager"))
    return problem


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, time, solve; 1 if a budget was exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of timing (default {ROUNDS})")
    args = parser.parse_args(argv)
    problem = posed()
    least = least_bytes(problem)
    with dynamo.patch(recompile_limit=64):  # all variants run the same code of transformers
        rows, runs = measured(variants(problem.resident_bytes), problem.resident_bytes)
        fill_times(rows, seconds_of_each(runs, args.rounds))
        three = {name: runs[name] for name in (BASE, PEER, SAME_MEMORY) if name in runs}
        fill_times([r for r in rows if r.name in three], seconds_of_each(three, CLOSER * args.rounds))
    solves = solve_each(problem, least)
    shown = claims(rows, solves, least)
    resident = _mb(problem.resident_bytes)
    print(f"\n{tables(rows, solves)}\n\nLeast budget: {_mb(least)} above the {resident} resident.")
    print(
        f"ratio: to {BASE!r}; recompute: time above it, of that of {PEER!r}; {args.rounds} rounds, "
        f"and {CLOSER * args.rounds} of these two and {SAME_MEMORY!r}."
    )
    if args.json is not None:
        found = {"rounds": args.rounds, "resident_bytes": problem.resident_bytes, "least_bytes": least}
        found |= {"rows": [asdict(r) for r in rows], "solves": [asdict(s) for s in solves], "claims": shown}
        write_results(args.json, "llama8", found)
    over = [r.name for r in rows if r.budget_bytes is not None and r.measured_bytes > r.budget_bytes]
    print("\n".join(f"FAILED: {name} took more than its budget" for name in over) or "No budget exceeded.")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
