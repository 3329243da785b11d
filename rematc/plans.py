"""Plans that were found before, kept on disk: a second process, or a second start, searches no more.

A plan is kept by the digest of its problem and by what was asked: budget, time limit, gap, version. What is
read is judged against the problem as if a stranger had sent it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rematc import cache
from rematc.errors import PlanError
from rematc.options import SolveOptions
from rematc.plan import FORMAT, Plan
from rematc.problem import OpCost, Problem
from rematc.simulate import judged

log = logging.getLogger(__name__)
NOTE = "found before, and kept in the cache"
MOST = 1000  # plans kept: with more, the oldest go


def load(problem: Problem, options: SolveOptions, folder: Path) -> Plan | None:
    """The plan that was kept for ``problem`` under ``options``, if there is one; None if it is damaged."""
    return _load(problem, _path(problem, options, folder))


def load_floor(problem: Problem, folder: Path) -> Plan | None:
    """The plan of the lowest peak that a refusal named for this graph, whatever budget and costs were.

    A search that the clock ends may not find again what it found when the machine had more time.
    """
    return _load(problem, _floor_path(problem, folder))


def keep_floor(problem: Problem, plan: Plan, folder: Path) -> None:
    """Keep ``plan`` as that of the lowest peak, if none is kept that needs less."""
    known = load_floor(problem, folder)
    if known is None or judged(problem, replace(plan, digest="")).peak_bytes < known.peak_bytes:
        cache.keep(_floor_path(problem, folder), json.loads(plan.to_json()))


def _load(problem: Problem, path: Path) -> Plan | None:
    data = cache.load(path, FORMAT)
    if data is None:
        return None
    try:
        plan = judged(problem, replace(Plan.from_json(json.dumps(data)), digest=""))
    except PlanError as e:
        cache.damaged(path, e)
        return None
    with suppress(OSError):
        os.utime(path)  # the oldest go: those not used for longest
    return replace(plan, solve_s=0.0, notes=(*plan.notes, NOTE))


def keep(problem: Problem, options: SolveOptions, plan: Plan, folder: Path) -> None:
    """Keep ``plan`` for the next time."""
    path = _path(problem, options, folder)
    cache.keep(path, json.loads(plan.to_json()))
    try:
        kept = sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for old in kept[:-MOST]:
            old.unlink(missing_ok=True)
    except OSError as e:  # another process was faster
        log.debug("old plans stay (%s)", e)


def _floor_path(problem: Problem, folder: Path) -> Path:
    # By the graph alone: costs that are measured anew, on a machine that had less time, name another problem.
    graph = Problem(problem.graph, (OpCost(0),) * len(problem.graph.ops))
    return folder / "plans" / f"{graph.digest}-floor.json"


def _path(problem: Problem, options: SolveOptions, folder: Path) -> Path:
    from rematc import __version__

    asked = (problem.digest, problem.budget_bytes, options.time_limit_s, options.gap, __version__)
    return folder / "plans" / f"{hashlib.sha256(repr(asked).encode()).hexdigest()[:24]}.json"
