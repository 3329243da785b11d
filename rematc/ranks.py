"""One decision for all ranks: the first that comes to a graph decides, and the others take it over.

Ranks that measure costs for themselves measure different ones, and a search that the clock ends may end in
different plans. So the first rank to pose a problem tells the others the times of its ops and its plans, in
the key-value store of the default process group. That is no collective: who has another graph, as the
stages of a pipeline do, or another budget, waits for nobody, and no order of collectives is disturbed.

What is taken over is judged as if a stranger had sent it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rematc import compat
from rematc.errors import PlanError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import TEXT, WHOLES, Problem, list_of, read_object
from rematc.simulate import judged

log = logging.getLogger(__name__)

FORMAT = "rematc.decision/1"
PATIENCE_S, PAUSE_S = 900.0, 0.02  # with other ranks: they may search, and compile, several plans
UNHEARD = (RuntimeError, ValueError, OSError)  # the store may be gone; TimeoutError is one of the system's
NOTHING_TOLD = ""
_DECISION = {"digest": TEXT, "runtime_ns": WHOLES, "plans": list_of("texts", TEXT.fits)}


@dataclass
class Decision:
    """``problem`` as the deciding rank sees it, and its ``plans``; () where it is for this rank to decide."""

    problem: Problem
    plans: tuple[Plan, ...] = ()


@contextmanager
def decision(problem: Problem, options: SolveOptions, what: str = "plan") -> Iterator[Decision]:
    """What was decided for ``problem``; who is to decide sets ``plans``, for the others.

    Asked for is ``what``, under ``options``. Ranks agree if they pose the same problem, the times of ops
    aside: the same graph, budget and bytes beside it. Without a process group nobody else is asked.

    >>> from rematc.graph import Graph
    >>> with decision(Problem(Graph((), (), ()), ()), SolveOptions()) as decided:
    ...     decided.plans
    ()
    """
    store, made = compat.rank_store(), Decision(problem)
    if store is None:
        yield made
        return
    key = _key(problem, options, what)
    place = _asked(lambda: store.add(f"{key}/ranks", 1), None)  # among those that asked
    if place != 1:
        told = NOTHING_TOLD if place is None else _asked(lambda: _heard(store, key), NOTHING_TOLD)
        yield _taken_over(problem, told) or made
        return
    try:
        yield made
    finally:  # whatever happened here, the others go on
        text = _told(made) if made.plans else NOTHING_TOLD
        _asked(lambda: store.set(key, text), None)


_MET: Counter[str] = Counter()  # problems by the process group
_AGREED: Counter[str] = Counter()  # plans, likewise


def tightest(groups: Iterable[str], problem: Problem) -> Problem:
    """``problem`` with the most that is resident on any rank of the process ``groups``, who wait for each
    other here.

    Ranks that gather together need one plan, though one of them has more beside the graph. Raises `PlanError`
    where others do not come: a rank that alone compiles anew has them wait in a collective.
    """
    store = compat.rank_store()
    for group in groups if store is not None else ():
        _MET[group] += 1
        place = f"rematc/met/{group}/{_MET[group]}"
        mine, ranks = compat.ranks_of(group)
        try:
            store.set(f"{place}/{mine}", str(problem.resident_bytes))
            found = [int(_heard(store, f"{place}/{rank}")) for rank in ranks]
        except UNHEARD as e:
            raise PlanError(
                f"{len(ranks)} ranks gather the same parameters and need one plan, and not all came to this "
                f"graph: {e}\n  what to try: inputs of the same shape on all ranks, or regather=False"
            ) from None
        problem = replace(problem, resident_bytes=max(found))
    return problem


def agree(groups: Iterable[str], plan: Plan) -> None:
    """Raise `PlanError` if another rank of the process ``groups`` came to the same graph with another plan.

    Where plans say what ranks gather, those with different ones would wait for each other forever. Which
    graph is the same, the ranks know by counting.
    """
    store = compat.rank_store()
    mine = hashlib.sha256(repr((plan.saved, plan.backward)).encode()).hexdigest()
    for group in groups if store is not None else ():
        _AGREED[group] += 1
        key = f"rematc/agreed/{group}/{_AGREED[group]}"
        if _asked(partial(store.compare_set, key, "", mine), mine.encode()).decode() != mine:
            raise PlanError(
                "ranks that gather the same parameters have different plans, and would wait for each other "
                "forever\n  what to try: the same budget, and inputs of the same shape, on all ranks, or "
                "regather=False"
            )


def _key(problem: Problem, options: SolveOptions, what: str) -> str:
    from rematc import __version__

    untimed = replace(problem, costs=tuple(replace(c, runtime_ns=0) for c in problem.costs))
    asked = (what, untimed.digest, problem.budget_bytes, options.time_limit_s, options.gap, __version__)
    return f"rematc/{hashlib.sha256(repr(asked).encode()).hexdigest()[:24]}"


def _heard(store: Any, key: str) -> str:
    """Asked for again and again: who waits in the store keeps other threads from it, NCCL's among them."""
    end = time.monotonic() + PATIENCE_S
    while not store.check([key]):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing was heard in {PATIENCE_S:g} s from another rank")
        time.sleep(PAUSE_S)
    text: str = store.get(key).decode()
    return text


def _asked(question: Any, otherwise: Any) -> Any:
    """The store's answer. It may be gone, or not answer in time: then each rank decides for itself."""
    try:
        return question()
    except UNHEARD as e:
        log.warning("ranks can't agree on a plan (%s): each plans by itself", e)
        return otherwise


def _told(made: Decision) -> str:
    found = {
        "format": FORMAT,
        "digest": made.problem.digest,
        "runtime_ns": [cost.runtime_ns for cost in made.problem.costs],
        "plans": [plan.to_json() for plan in made.plans],
    }
    return json.dumps(found)


def _taken_over(problem: Problem, text: str) -> Decision | None:
    if text == NOTHING_TOLD:  # an error, which this rank is going to meet too
        return None
    try:
        found = read_object(text, FORMAT, _DECISION, PlanError)
        problem = _timed(problem, found["runtime_ns"])
        if problem.digest != found["digest"]:
            raise PlanError(f"it is for problem {found['digest']}, and this is {problem.digest}")
        plans = (replace(Plan.from_json(plan), digest="") for plan in found["plans"])
        return Decision(problem, tuple(judged(problem, plan) for plan in plans))
    except PlanError as e:
        log.warning("what another rank decided is not taken over (%s): this rank plans by itself", e)
        return None


def _timed(problem: Problem, runtime_ns: tuple[int, ...]) -> Problem:
    if len(runtime_ns) != len(problem.costs):
        raise PlanError(f"{len(runtime_ns)} times for {len(problem.costs)} ops")
    costs = zip(problem.costs, runtime_ns, strict=True)
    return replace(problem, costs=tuple(replace(cost, runtime_ns=ns) for cost, ns in costs))
