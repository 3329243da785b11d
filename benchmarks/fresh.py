"""`python -m benchmarks.fresh`: one solve in a process of its own, so that its memory can be told.

Prints one line of JSON for each answer: a plan's numbers, or why there is none.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.floor import floor_bytes
from benchmarks.oracles import checkmate, moccasin
from benchmarks.oracles.sequence import Outcome
from rematc import solve
from rematc.baselines import STRATEGIES
from rematc.errors import RematcError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate, validate
from rematc.solve.order import best_order, reordered

SHORT_S, MOST_RUNS = 2.0, 5
Asked = argparse.Namespace


def load(name: str) -> Problem:
    """A problem of the corpus by its name, or a problem file."""
    if name.endswith(".json"):
        return Problem.from_json(Path(name).read_text())
    from benchmarks import corpus

    return corpus.load(name)


def free_plan(problem: Problem) -> Plan:
    """The plan without recomputation: save all, or each op of a DAG once in the graph's order."""
    if problem.graph.backward:
        return STRATEGIES["save_all"](problem, SolveOptions())
    steps = tuple(sorted(problem.graph.ancestors(problem.graph.gradients)))
    return Plan((), steps, strategy="input order", peak_bytes=simulate(problem, Plan((), steps)).peak_bytes)


def facts(problem: Problem) -> dict[str, Any]:
    """What the sweep needs of a problem before it can choose budgets; the smallest is not known yet."""
    g = problem.graph
    forward = g.forward_steps(()) if g.backward else sorted(g.ancestors(g.gradients))
    return {
        "kind": "model" if g.backward else "random",
        "ops": len(g.ops),
        "resident_bytes": problem.resident_bytes,
        "forward_ns": sum(problem.costs[i].runtime_ns for i in forward),
        "peak_bytes": free_plan(problem).peak_bytes - problem.resident_bytes,
    }


def numbers(problem: Problem, plan: Plan, name: str) -> dict[str, Any]:
    """The row of a plan, its peak above what is resident."""
    peak = plan.peak_bytes - problem.resident_bytes
    return {"solver": name, "cost_ns": plan.cost_ns, "peak_bytes": peak, "status": plan.status}


def solved(problem: Problem, asked: Asked) -> dict[str, Any]:
    """One budget: the median time of several runs if they are short; memory is that of them all."""
    options = SolveOptions(asked.seconds, asked.gap)
    seconds: list[float] = []
    while not seconds or (max(seconds) < SHORT_S and len(seconds) < asked.runs):
        gc.collect()
        started = time.perf_counter()
        plan = solve(problem, options)
        seconds.append(time.perf_counter() - started)
    validate(problem, plan)
    row = numbers(problem, plan, "rematc") | {"bound_ns": plan.bound_ns, "gap": plan.gap}
    return row | {"solve_s": statistics.median(seconds), "runs": len(seconds)}


def asked_oracle(name: str, run: Callable[..., Outcome]) -> Callable[[Problem, Asked], dict[str, Any]]:
    """An oracle with the signature of `solved`; its backward ops are in the order that rematc solves for."""

    def answer(problem: Problem, asked: Asked) -> dict[str, Any]:
        found = run(reordered(problem, best_order(problem)), asked.seconds, asked.gap)
        row = {
            "solver": name,
            "status": found.status,
            "bound_ns": found.bound_ns,
            "solve_s": found.seconds,
            "runs": 1,
        }
        if found.plan is None:
            return row
        return row | numbers(problem, found.plan, name) | {"status": found.status, "gap": found.plan.gap}

    return answer


def floor(problem: Problem, asked: Asked) -> dict[str, Any]:
    """The smallest budget that is accepted, and how long it took to say so."""
    started = time.perf_counter()
    accepted, bound = floor_bytes(problem, SolveOptions(asked.seconds, asked.gap))
    took = time.perf_counter() - started
    return {"solver": "floor", "accepted_bytes": accepted, "bound_bytes": bound, "solve_s": took}


ONE = {
    "rematc": solved,
    "checkmate": asked_oracle("checkmate", checkmate.solve),
    "moccasin": asked_oracle("moccasin", moccasin.solve),
    "floor": floor,
    "facts": lambda problem, asked: facts(problem),
}


def baselines(problem: Problem) -> Iterator[dict[str, Any]]:
    """What each baseline costs and needs; those that look at the budget are given the problem's."""
    if not problem.graph.backward:
        return
    for name, strategy in STRATEGIES.items():
        if (name == "greedy") == (problem.budget_bytes is not None):
            plan = strategy(problem, SolveOptions())
            yield numbers(problem, plan, name) | {"solve_s": plan.solve_s, "runs": 1}


def answers(problem: Problem, asked: Asked) -> Iterator[dict[str, Any]]:
    """All that is asked; what can't be had says why."""
    try:
        if asked.who == "baselines":
            yield from baselines(problem)
        else:
            yield ONE[asked.who](problem, asked)
    except RematcError as e:
        yield {"solver": asked.who, "error": f"refused: {str(e).splitlines()[0]}"}
    except Exception as e:  # a benchmark shows what fails, and goes on
        yield {"solver": asked.who, "error": f"failed: {type(e).__name__}: {e}"[:300]}


def memory_bytes(field: str) -> int:
    """What this process holds now ("VmRSS"), or the most that it has held ("VmHWM").

    Not `resource.getrusage`, where it can be helped: its maximum begins with that of the process that
    started this one, which has torch loaded.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition(f"{field}:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> int:
    """Answer what the sweep asks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fresh", description=__doc__)
    parser.add_argument("name", help="a problem of the corpus, or a file")
    parser.add_argument("who", choices=[*ONE, "baselines"])
    parser.add_argument("--budget", type=int, metavar="BYTES", help="above what is resident")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--runs", type=int, default=MOST_RUNS)
    asked = parser.parse_args()
    problem = load(asked.name)
    if asked.budget is not None:
        problem = problem.with_budget(problem.resident_bytes + asked.budget)
    gc.collect()
    before = memory_bytes("VmRSS")
    for answer in answers(problem, asked):
        print(json.dumps(answer | {"memory_bytes": memory_bytes("VmHWM") - before}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
