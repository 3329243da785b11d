"""Plans that were found before, kept on disk: a second process, or a second start, searches no more.

A plan is kept by the digest of its problem and by what was asked: budget, time limit, gap, version. What is
read is judged against the problem as if a stranger had sent it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rematc import cache
from rematc.errors import PlanError
from rematc.options import SolveOptions
from rematc.plan import FORMAT, Plan
from rematc.problem import TEXT, OpCost, Problem, list_of, read_object
from rematc.simulate import judged
from rematc.solve.solver import CUT

log = logging.getLogger(__name__)
NOTE = "found before, and kept in the cache"
TWICE = "searched for twice; the cheaper plan is kept"
MOST = 1000  # files kept: with more, the oldest go
SEVERAL, FLOOR = "rematc.plans/1", "floor"
PROOFS = 3  # counts the ways in which bounds were proven: those of another way are not taken
_SEVERAL = {"digest": TEXT, "plans": list_of("texts", TEXT.fits)}


def load(problem: Problem, options: SolveOptions, folder: Path) -> Plan | None:
    """The plan that was kept for ``problem`` under ``options``, if there is one; None if it is damaged."""
    path = _path(problem, options, folder)
    data = cache.load(path, FORMAT)
    if data is None:
        return None
    try:
        plan = _judged(problem, json.dumps(data))
    except PlanError as e:
        cache.damaged(path, e)
        return None
    _used(path)
    return _found_before(plan)


def is_worth_a_search(plan: Plan) -> bool:
    """Did the clock end its search, the only one so far? With more time there may be a far cheaper one."""
    return CUT in plan.notes and TWICE not in plan.notes


def as_cut(plan: Plan) -> Plan:
    """``plan``, found because the clock ended a search for a better one."""
    return replace(plan, notes=tuple(dict.fromkeys((*plan.notes, CUT))))


def searched_for_twice(plan: Plan) -> Plan:
    """``plan``, which is not `is_worth_a_search` any more."""
    kept = (note for note in plan.notes if note != NOTE)
    return replace(plan, notes=tuple(dict.fromkeys((*kept, TWICE))))


def keep(problem: Problem, options: SolveOptions, plan: Plan, folder: Path) -> None:
    """Keep ``plan`` for the next time."""
    _keep(_path(problem, options, folder), FORMAT, json.loads(plan.to_json()))


def load_floor(problem: Problem, folder: Path) -> Plan | None:
    """The plan of the lowest peak that a refusal named for this graph, whatever budget and costs were.

    A search that the clock ends may not find again what it found when the machine had more time.
    """
    return next(map(_found_before, _load_of_graph(problem, FLOOR, folder)[1]), None)


def keep_floor(problem: Problem, plan: Plan, folder: Path) -> None:
    """Keep ``plan`` as that of the lowest peak."""
    _keep_of_graph(problem, FLOOR, (judged(problem, replace(plan, digest="")),), folder)


def load_choices(problem: Problem, options: SolveOptions, folder: Path) -> tuple[tuple[Plan, ...], bool]:
    """Plans to choose from that were kept for this graph, and whether they were found for these costs."""
    digest, known = _load_of_graph(problem, _choices(options), folder)
    return known, digest == problem.digest


def keep_choices(problem: Problem, options: SolveOptions, found: Sequence[Plan], folder: Path) -> None:
    """Keep ``found`` for the next time."""
    _keep_of_graph(problem, _choices(options), found, folder)


def _choices(options: SolveOptions) -> str:
    return f"choices-{hashlib.sha256(repr(_asked(options)).encode()).hexdigest()[:8]}"


def _load_of_graph(problem: Problem, what: str, folder: Path) -> tuple[str, tuple[Plan, ...]]:
    """The digest of the problem for which ``what`` was kept last, and the plans, as judged by this one."""
    path = _path_of_graph(problem, what, folder)
    data = cache.load(path, SEVERAL)
    if data is None:
        return "", ()
    try:
        kept = read_object(json.dumps(data), SEVERAL, _SEVERAL, PlanError)
        found = tuple(_judged(problem, text) for text in kept["plans"])
    except PlanError as e:
        cache.damaged(path, e)
        return "", ()
    _used(path)
    if kept["digest"] != problem.digest:  # what was proven was of other costs
        found = tuple(replace(plan, bound_ns=0, status="feasible") for plan in found)
    return kept["digest"], found


def _keep_of_graph(problem: Problem, what: str, found: Sequence[Plan], folder: Path) -> None:
    texts = [plan.to_json() for plan in found]
    _keep(_path_of_graph(problem, what, folder), SEVERAL, {"digest": problem.digest, "plans": texts})


def _path_of_graph(problem: Problem, what: str, folder: Path) -> Path:
    # By the graph alone: costs that are measured anew, on a machine that had less time, name another problem,
    # and so do the paths of modules, if the model is compiled in a function.
    ops = tuple(replace(op, module="") for op in problem.graph.ops)
    alone = Problem(replace(problem.graph, ops=ops), (OpCost(0),) * len(ops))
    return folder / "plans" / f"{alone.digest}-{what}.json"


def _judged(problem: Problem, text: str) -> Plan:
    return judged(problem, replace(Plan.from_json(text), digest=""))


def _found_before(plan: Plan) -> Plan:
    return replace(plan, solve_s=0.0, notes=(*plan.notes, NOTE))


def _used(path: Path) -> None:
    with suppress(OSError):
        os.utime(path)  # the oldest go: those not used for longest


def _keep(path: Path, form: str, data: dict[str, Any]) -> None:
    cache.keep(path, {**data, "format": form})
    try:
        kept = sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for old in kept[:-MOST]:
            old.unlink(missing_ok=True)
    except OSError as e:  # another process was faster
        log.debug("old plans stay (%s)", e)


def _path(problem: Problem, options: SolveOptions, folder: Path) -> Path:
    asked = (problem.digest, problem.budget_bytes, *_asked(options))
    return folder / "plans" / f"{hashlib.sha256(repr(asked).encode()).hexdigest()[:24]}.json"


def _asked(options: SolveOptions) -> tuple[object, ...]:
    from rematc import __version__

    return options.time_limit_s, options.gap, __version__, PROOFS
