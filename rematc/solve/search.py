"""Solve the relaxation, write the plan it says, look where that breaks the budget, refine there, again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from rematc.problem import Problem
from rematc.solve.deadline import Deadline
from rematc.solve.decode import decode, encode
from rematc.solve.expand import Written, excess_bytes, expand
from rematc.solve.fitting import fitting
from rematc.solve.formulate import Formulation
from rematc.solve.improve import Improver
from rematc.solve.meanwhile import meanwhile
from rematc.solve.merge import Merged
from rematc.solve.model import NODES, Result
from rematc.solve.nearby import is_large, nearby
from rematc.solve.once import asked_once
from rematc.solve.plain import plain_chain
from rematc.solve.prefix import from_prefixes
from rematc.solve.refine import AT_ONCE, Refined, build, refine
from rematc.solve.tighten import tighten
from rematc.solve.worth import worthwhile_tail

log = logging.getLogger(__name__)

ROUNDS = 100
FIRST_GAP = 0.1  # as long as more is refined: halved from round to round
ROUGH = 0.03  # a solution so near the relaxation says well enough where to refine
ALMOST = 0.9  # of the gap: rounding takes the rest
ROOM = 2000  # stages told apart in a round, times units: with more the next one takes long
SHARE = 0.5  # of the time left, for one round
AGAIN = 0.9  # the same, for one that was too short before
FAR, TRY = 1.25, 0.2  # the first plan needs so many budgets: rounds are that short, and the tail may help
SIMPLE_ROUNDS = 1  # before anything else is tried than to refine: often that is not needed
EASY_ROUNDS, SOON_ROUNDS = 3, 1  # before the improver is begun
HEAD_START_S = 0.5  # most last MILPs are solved by then, and to find other plans takes longer
HOPELESS, CLOSE = 1.25, 1.1  # times the bound: far from it, and so near that the search may take all time
SOON, SLOW = 0.85, 0.7  # of the time is left: it takes long

Solve = Callable[[], Result]


@dataclass(frozen=True, slots=True)
class Found:
    """The cheapest plan found within the budget, if any, and a lower bound on every plan's cost.

    ``finished``: no limit cut the search short; without a plan there is then none in the given order.
    """

    best: Written | None
    bound_ns: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Program:
    """A MILP, the solution of its linear relaxation, and one near that if it was looked for."""

    f: Formulation
    relaxed: Result
    near: Result | None


def search(problem: Problem, merged: Merged, refined: Refined, gap: float, deadline: Deadline) -> Found:
    """The cheapest plan for ``merged`` within ``gap``, from what is ``refined`` on, until ``deadline``."""
    return Search(problem, merged, refined, gap).run(deadline)


class Search:
    """Where the search stands, from round to round; ``bound_ns`` is a bound that is known before."""

    def __init__(
        self,
        problem: Problem,
        merged: Merged,
        refined: Refined,
        gap: float,
        improver: Improver | None = None,
        bound_ns: int = 0,
    ) -> None:
        assert problem.budget_bytes is not None
        self.problem, self.merged, self.refined = problem, merged, refined
        self.budget_bytes = problem.budget_bytes
        self.gap, self.improver = gap, improver
        self.deadline = self.end = Deadline.after(0)
        self.rounds, self.is_over, self.is_again = 0, False, False
        self.best: Written | None = None
        self.nearest: Written | None = None  # of the plans that break the budget, that which does so least
        self.before: Written | None = None  # the best when the round began
        self.bound, self.finished = bound_ns, False
        self.final = ALMOST * gap
        self.asked = self.final if refined.is_complete else max(self.final, FIRST_GAP)
        self.is_far = self.is_hard = False  # the latter: the MILP of some round was cut short
        self.was_large = False  # the program of the last round
        self.program: Program | None = None  # as long as nothing is refined
        self.is_counted = self.is_asked = False  # by prefixes, and for plans from all sets
        self.limit_s = self.round_s = 0.0  # of all rounds, and of the last one before its MILP

    def run(self, deadline: Deadline, if_far: Deadline | None = None) -> Found:
        """Go on until ``deadline``, or a round that took all the time that it had was not enough.

        After that it may be called again, with more time: the round has all of it then. As long as no plan is
        known that is close to the bound, until ``if_far``.
        """
        self.deadline, self.end, is_enough = if_far or deadline, deadline, True
        self.limit_s = self.limit_s or self.deadline.left()
        self._offer(self.improver.best if self.improver else None)
        while is_enough and not self.is_over and self.deadline.left() > 0:
            is_enough = self._round(self.rounds)
            if self.best and self.best.plan.cost_ns <= CLOSE * self.bound:
                self.deadline = deadline
            self.rounds += 1
            self.is_over = self.is_over or self.rounds == ROUNDS
        self.is_again, self.program = True, None  # the cuts, too, have more time then
        return Found(self.best, self.bound, self.finished)

    def _round(self, n: int) -> bool:
        """Round ``n``; False if its time was not enough. ``is_over`` if there is nothing more to do."""
        if self._told_by_prefixes():
            self.is_over = True
            return True
        f = self.program.f if self.program else build(self.problem, self.merged, self.refined)
        is_simple, is_trial = n < SIMPLE_ROUNDS, n == SIMPLE_ROUNDS and self.is_far and not is_large(f)
        limit = Deadline.after(self._share(is_trial) * self.deadline.left())
        self.before = self.best
        begun = self.end.left()
        program = self.program = self.program or self._tight(f, limit)
        self.round_s = begun - self.end.left()
        self.bound = self._bound(f, program.relaxed)
        result = self._solved(program, n, limit)
        self.bound = self._bound(f, result)
        self.is_hard = self.is_hard or not result.finished
        if result.values is None and is_trial and not result.finished:
            self.is_far, self.program = False, None  # it was too short for that, and for the cuts
            return True
        self.finished = result.finished
        if result.values is None:
            self.is_over = result.finished
            return False
        written = expand(self.problem, self.merged, decode(f, result.values))
        log.debug("%d spans: at least %d ns, found %d ns", len(f.spans), self.bound, written.plan.cost_ns)
        fits = written.plan.peak_bytes <= self.budget_bytes
        is_hopeless = not result.finished and written.plan.cost_ns > HOPELESS * self.bound
        if fits:
            if self._is_cheap(written, self.bound):  # whatever the improver has found by now
                self.best = self.before
            self._offer(written)
        else:
            self.nearest = min(self.nearest or written, written, key=partial(excess_bytes, self.problem))
            if not (is_simple or is_hopeless):
                self._offer(
                    fitting(self.problem, self.merged, self.refined, written, self.asked, self.deadline)
                )
        if self._reached() or (fits and self.asked <= self.final):  # the relaxation has nothing more to say
            self.is_over = self._reached() or result.finished
            return self.is_over
        self.finished = False
        if is_trial and self._told_exactly():
            return True
        if is_hopeless and not is_trial:  # refined further it only takes longer
            return False
        self.is_far = self.is_far or (is_simple and self._budgets(written) > FAR)
        self.is_over = not self._refined(written, fits)
        return True

    def _told_by_prefixes(self) -> bool:
        """What the prefixes of a chain say, once each: a bound, and plans. True if those are cheap enough."""
        is_slow = self.is_hard or self._is_slow(SOON)
        if is_slow and not self._reached():
            self._offer(self.asked_once(self.end))
        if (self.is_far or is_slow) and not (self.is_counted or self._reached()):
            limit = Deadline.after(SHARE * self.end.left())
            found = from_prefixes(self.problem, self.merged, self.gap, limit, coarser=is_slow)
            self.is_counted = is_slow or found is not None
            self.bound = max(self.bound, found.bound_ns if found else 0)
            for written in found.plans if found else ():
                self._offer(written)
        return self._reached()

    def asked_once(self, deadline: Deadline) -> Written | None:
        """What `once` finds, the first time; then None."""
        is_first, self.is_asked = not self.is_asked, True
        return asked_once(self.problem, self.merged, deadline) if is_first else None

    def _tight(self, f: Formulation, limit: Deadline) -> Program:
        """``f`` with its cuts."""
        relaxed, self.was_large = tighten(f, self.refined.cuts, limit), is_large(f)
        is_near_tried = self.was_large or not self.is_again
        return Program(f, relaxed, nearby(f, relaxed, self.final, limit, NODES) if is_near_tried else None)

    def _known(self, f: Formulation) -> dict[int, float]:
        """The cheapest plan so far, as values of the variables: for the MILP to do better."""
        known = self.improver and self.improver.best
        is_late = self.is_again or self.asked <= self.final  # before, where it breaks the budget says more
        if not (is_late and known and known.merged is self.merged):
            return {}
        return {x: value for x, (_, value) in encode(f, known.draft).items()}

    def _share(self, is_trial: bool) -> float:
        """Of the time left, for a round."""
        if self.is_again:
            return AGAIN
        if self.asked <= self.final:
            return 1.0
        return TRY if is_trial else SHARE

    def _solved(self, program: Program, n: int, limit: Deadline) -> Result:
        """The MILP's solution, or one near that of the linear relaxation if that will do."""
        f, near, hint = program.f, program.near, self._known(program.f)
        if near and near.finished and (near.values is None or self._is_enough(f, near)):
            return near
        if near and near.values is not None:
            written = expand(self.problem, self.merged, decode(f, near.values))  # it may be all, in time
            self._offer(written if written.plan.peak_bytes <= self.budget_bytes else None)
            hint = dict(enumerate(near.values)) if is_large(f) else hint
        nodes = None if self.is_again else NODES
        solve = partial(f.model.solve, gap=self.asked, time_limit_s=limit.left(), node_limit=nodes, hint=hint)
        return self._meanwhile_improved(f, n, solve, limit)

    def _meanwhile_improved(self, f: Formulation, n: int, solve: Solve, limit: Deadline) -> Result:
        """What ``solve`` finds, in a thread; the improver goes on meanwhile, not just until that is done.

        Where the bound shows that what was known before is cheap enough, the improver is stopped, and what it
        found by then is let go of. In the last round, or one that is done again, it goes on until the MILP is
        solved, else for as long as the relaxation took. In an early round it is begun only if the MILP takes
        longer than `HEAD_START_S`, or overruns.
        """
        before = self.before
        is_last = self.asked <= self.final
        is_due = n >= self._easy_rounds() or self.is_hard or self._is_slow(SLOW)
        is_open = is_last or self.is_again or not is_due

        def stop(whole: Future[Result]) -> None:
            if not whole.exception() and self._is_cheap(before, self._bound(f, whole.result())):
                until.at = -math.inf

        with meanwhile(solve) as whole:
            until = whole.until(self.end) if is_open else Deadline.after(self.round_s)
            whole.future.add_done_callback(stop)
            if is_due or not whole.ends_within(HEAD_START_S if is_last else max(HEAD_START_S, limit.left())):
                self._improve(until)
            result = whole.result()
        self.best = before if self._is_cheap(before, self._bound(f, result)) else self.best
        return result

    def _is_slow(self, share: float) -> bool:
        return self.deadline.left() < share * self.limit_s

    def _easy_rounds(self) -> int:
        """Before the improver is begun: few if it starts from the optimum, or a MILP can take all time."""
        is_soon = not self.merged.core.has_forward or (self.is_far and plain_chain(self.merged.core))
        return SOON_ROUNDS if is_soon else EASY_ROUNDS

    def _is_enough(self, f: Formulation, near: Result) -> bool:
        """Does it say as well as the MILP's what the plan is, or, of a large program, where to refine?"""
        rough = max(self.asked, ROUGH) if is_large(f) and self.asked > self.final else self.final
        assert near.values is not None
        return f.model.objective(near.values) <= (1 + rough) * near.bound

    def _bound(self, f: Formulation, result: Result) -> int:
        """What is known with ``result``."""
        return max(self.bound, f.floor_ns(result.bound)) if self.refined.bounds_all else self.bound

    def _offer(self, found: Written | None) -> None:
        if found:
            self.best = min(self.best or found, found, key=lambda w: w.plan.cost_ns)

    def _budgets(self, written: Written) -> float:
        """The peak of ``written`` in budgets, both above what is resident."""
        base = self.problem.base_bytes
        return (written.plan.peak_bytes - base) / max(1, self.budget_bytes - base)

    def _reached(self) -> bool:
        return self._is_cheap(self.best, self.bound)

    def _is_cheap(self, found: Written | None, bound: int) -> bool:
        return found is not None and found.plan.cost_ns <= (1 + self.gap) * bound

    def _improve(self, until: Deadline) -> None:
        """Steps of the improver."""
        if self.improver is None or self._reached():
            return
        self.improver.begin(self.best, self.bound)
        self.bound = max(self.bound, self.improver.bound_ns)
        self.improver.run((1 + self.gap) * self.bound, self.gap / 2, until, self.end)
        self._offer(self.improver.best)

    def _told_exactly(self) -> bool:
        """From now on with the end of the backward pass told exactly, if that helps."""
        assert self.program
        relaxed_ns = self.program.f.floor_ns(self.program.relaxed.bound)
        tail = worthwhile_tail(self.problem, self.merged, self.refined, relaxed_ns, self.deadline)
        if tail is None:
            return False
        self.refined, self.program = replace(self.refined, tail=tail), None
        if self.improver:
            self.improver.tail = tail.within(self.budget_bytes)
        return True

    def _refined(self, written: Written, fits: bool) -> bool:
        """More is told apart, or a smaller gap asked for; False if neither can be."""
        at_once = max(1, min(AT_ONCE, ROOM // max(1, len(self.merged.core.units))))
        if fits:
            self.asked = self.final
        elif refine(self.problem, self.merged, self.refined, written, at_once=at_once):
            self.asked, self.program = max(self.final, self.asked / 2), None
        elif self.asked > self.final:  # all is told apart
            self.asked = self.final
        else:
            return False
        return True
