"""Lower the peak of the plan that makes all anew for each stage: where it is highest, blocks stay.

What a stage reads can take less to keep from a stage before, where there was more room to make it, than to
make again. Which blocks, a greedy search says: of those that are made in a stage that needs too much, the one
stays that leaves least too much in the stages between, and another, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rematc.problem import Problem
from rematc.solve.burst import Burst
from rematc.solve.clock import spend
from rematc.solve.deadline import Deadline
from rematc.solve.decode import missing
from rematc.solve.expand import Draft, Written, expand
from rematc.solve.merge import Merged, last_needed

STAGE_S = 1e-4  # of work
LOWER = 0.005  # of the peak: what is tried each time
NEAR = 16  # stages: a block stays no longer than so many


def held_longer(problem: Problem, merged: Merged, asked_bytes: int, deadline: Deadline) -> Written:
    """The plan with the lowest peak that is found; no lower one is looked for than ``asked_bytes``."""
    holding = _Holding(merged)
    best = expand(problem, merged, holding.draft())
    while best.plan.peak_bytes > asked_bytes and deadline.left() > 0:
        above = best.plan.peak_bytes - problem.base_bytes
        if not holding.lower(best.plan.peak_bytes - max(1, int(LOWER * above)), deadline):
            break
        found = expand(problem, merged, holding.draft())
        if found.plan.peak_bytes >= best.plan.peak_bytes:
            break
        best = found
    return best


class _Holding:
    """``stay[t]``: the blocks that are there when stage t begins; all else is made when it is read."""

    def __init__(self, merged: Merged) -> None:
        self.core = core = merged.core
        once = {b for unit in core.units if unit.pinned for b in unit.makes} - core.held
        last = last_needed(core, by_units=True)
        self.saved = frozenset(b for b in once if last[b] >= 0)
        stages = range(len(core.stages))
        self.saved_bytes = [self._bytes(b for b in self.saved if last[b] >= t) for t in stages]
        self.counted = frozenset(range(len(core.block_bytes))) - core.held - self.saved
        self.burst = Burst(merged)
        self.stay = [set[int]() for _ in (*stages, 0)]
        self.known: dict[object, tuple[int, ...]] = {}

    def draft(self) -> Draft:
        return Draft(self.saved, tuple(self._runs(t) for t in range(len(self.core.stages))))

    def lower(self, limit: int, deadline: Deadline) -> bool:
        """Let blocks stay until no stage needs more than ``limit``; False if that is not found."""
        while over := [t for t in range(len(self.core.stages)) if self._excess(t, limit)]:
            for t in over:
                while self._excess(t, limit):
                    if not self._keep_one(t, limit, deadline):
                        return False
        return True

    def _keep_one(self, t: int, limit: int, deadline: Deadline) -> bool:
        """Let that block stay for stage t with which least is over; False if that is no less than before."""
        best, least = None, 0
        for b in sorted({b for u in self._runs(t) for b in self.core.units[u].makes} - self.core.held):
            if deadline.left() <= 0:
                return False
            first = self._made_before(b, t)
            if first is None:
                continue
            before = sum(self._excess(s, limit) for s in range(first, t + 1))
            for s in range(first + 1, t + 1):
                self.stay[s].add(b)
            more = sum(self._excess(s, limit) for s in range(first, t + 1)) - before
            for s in range(first + 1, t + 1):
                self.stay[s].discard(b)
            if more < least:
                best, least = (first, b), more
        if best is None:
            return False
        first, b = best
        for s in range(first + 1, t + 1):
            self.stay[s].add(b)
        return True

    def _made_before(self, b: int, t: int) -> int | None:
        """The last stage before t, not far away, that has block b."""
        for s in range(t - 1, max(0, t - NEAR) - 1, -1):
            if b in self.stay[s] or any(b in self.core.units[u].makes for u in self._runs(s)):
                return s
        return None

    def _runs(self, t: int) -> tuple[int, ...]:
        reads = self.stay[t + 1].union(self.core.stages[t].reads)
        return tuple(missing(self.core, sorted(reads), self.core.held | self.saved | self.stay[t]))

    def _excess(self, t: int, limit: int) -> int:
        """What its op and the runs before it need over ``limit``, each for itself."""
        return sum(max(0, live - limit) for live in self.live(t))

    def live(self, t: int) -> tuple[int, ...]:
        """Bytes alive in stage t: while its op runs, and from the last run to the first."""
        state = t, frozenset(self.stay[t]), frozenset(self.stay[t + 1])
        if state not in self.known:
            spend(STAGE_S)
            self.known[state] = tuple(live + self.saved_bytes[t] for live in self._live(t))
        return self.known[state]

    def _live(self, t: int) -> Iterator[int]:
        stage = self.core.stages[t]
        wanted = self.counted & self.stay[t + 1].union(stage.reads)
        yield stage.op_bytes + self._bytes(wanted)
        yield from (
            stage.before_bytes + live for live in self.burst.live(self._runs(t), wanted, self.counted)
        )

    def _bytes(self, blocks: Iterable[int]) -> int:
        return sum(self.core.block_bytes[b] for b in blocks)
