"""The numbers of the step: memory without the plan and with it, what that costs, and how sure that is."""

from __future__ import annotations

import textwrap
from collections import Counter

from tabulate import tabulate

from rematc.errors import format_bytes
from rematc.mincut import base_name
from rematc.report.kinds import TOP, shortened, without_wrapper
from rematc.report.rows import Reading, duration
from rematc.simulate import BETWEEN, Profile

LARGEST = 3
ROOM = 32  # columns for a module path in a sentence


def head(reading: Reading, width: int) -> str:
    """One line for each number: what it is, the number, what there is to say of it."""
    problem, plan = reading.problem, reading.plan
    budget = plan.budget_bytes
    lines = [
        (
            "resident",
            format_bytes(problem.resident_bytes),
            "there before the step: parameters, buffers, inputs, reserve",
        ),
        ("budget", "none" if budget is None else format_bytes(budget), _room(reading)),
        ("peak, all saved", format_bytes(reading.unplanned.peak_bytes), _at(reading, reading.unplanned)),
        ("peak, this plan", format_bytes(reading.profile.peak_bytes), _there(reading)),
        ("recomputation", duration(plan.cost_ns), _share(reading)),
        ("gap", *_gap(reading)),
        (
            "plan",
            plan.status,
            f"by {plan.strategy or 'hand'} in {plan.solve_s:.1f} s; of problem {problem.digest}",
        ),
        *(("note", "", note) for note in plan.notes),
    ]
    taken = sum(max(len(line[i]) for line in lines) for i in range(2)) + 4
    wrapped = [(*line[:2], "\n".join(textwrap.wrap(line[2], max(24, width - taken)))) for line in lines]
    return tabulate(wrapped, tablefmt="plain", disable_numparse=True, colalign=("left", "right", "left"))


def _room(reading: Reading) -> str:
    budget = reading.plan.budget_bytes
    if budget is None and reading.plan.cost_ns:
        return "no limit: a minimum cut, as torch.compile alone saves by; what is cheap is recomputed"
    if budget is None:
        return "no limit, so nothing has to be recomputed"
    if budget >= reading.unplanned.peak_bytes:
        return "enough to save everything"
    missing = reading.unplanned.peak_bytes - budget
    return f"{format_bytes(missing)} less than saving everything takes"


def _at(reading: Reading, profile: Profile) -> str:
    """Where the peak is, and the largest values that are alive there."""
    graph = reading.graph
    where = "at the end of the backward pass"
    if profile.peak_step == BETWEEN:
        where = "between the passes"
    elif profile.peak_step < len(profile.steps):
        step = profile.steps[profile.peak_step]
        op = graph.ops[step.op]
        where = f"in the {step.phase} pass, at {op.name}{_of(op.module)}"
    largest = [
        f"{format_bytes(size)} {words}" for words, size in _alive(reading, profile).most_common(LARGEST)
    ]
    return f"{where}; largest there: {', '.join(largest)}" if largest else where


def _there(reading: Reading) -> str:
    """Where the plan peaks, told once if that is where it would without recomputation too."""
    plain = reading.unplanned
    same = (plain.peak_bytes, plain.at_peak) == (reading.profile.peak_bytes, reading.profile.at_peak)
    return "as above" if same else _at(reading, reading.profile)


def _alive(reading: Reading, profile: Profile) -> Counter[str]:
    """Bytes alive at the peak by the op that makes them and its layer kind: a name in a trace says little."""
    graph, found, count = reading.graph, Counter[str](), Counter[str]()
    makers = {graph.values[v].name: op for op in graph.ops for v in op.outputs}
    for name, size in profile.at_peak:
        words = name
        if op := makers.get(name):
            kind = reading.kinds[op.module]
            words = base_name(op.target) + ("" if kind == TOP else f" of {shortened(kind, ROOM)}")
        found[words] += size
        count[words] += 1
    return Counter(
        {f"{words} x{count[words]}" if count[words] > 1 else words: n for words, n in found.items()}
    )


def _of(module: str) -> str:
    return f" of {shortened(without_wrapper(module), ROOM)}" if module else ""


def _share(reading: Reading) -> str:
    forward_ns = reading.problem.forward_ns
    if not forward_ns:
        return "of a forward pass that takes no time"
    share = f"{reading.plan.cost_ns / forward_ns:.1%}".replace("%", " %")
    return f"{share} of the forward pass, which takes {duration(forward_ns)}; an estimate"


def _gap(reading: Reading) -> tuple[str, str]:
    plan = reading.plan
    if not plan.cost_ns:
        return "0.00 %", "nothing is recomputed, and no plan does less than that"
    if plan.status == "baseline":
        return "unknown", "nothing is proven of a baseline"
    if plan.gap == float("inf"):
        return "unknown", "no lower bound above zero was proven"
    proven = f"no plan under this budget recomputes less than {duration(plan.bound_ns)}: proven"
    return f"{plan.gap:.2%}".replace("%", " %"), proven
