"""What makes the bound tight: a fraction of a block can't be had for a fraction of its price.

Alone, the rows of `formulate` let the linear relaxation cheat: a unit runs again by a tenth in each of
ten spans, each time on a tenth of its inputs, and in the end its block is there as a whole. But let unit u
make b1, which is read to make b2, and so on to bn, which is asked for in spans j to d - 1. Then one of those
blocks is at hand when span j begins, or u runs again by the end of span d - 1:

    sum of R[u, k] over k from j to d - 1  +  sum of S[b, j] over b1 to bn  >=  what is asked for

    1           if an op of those spans reads bn
    S[bn, d]    if bn is kept for later ones
    R[w, k]     if unit w, which reads bn, runs again in span k of those

Of these there are too many to write down, so those are added that a solution of the relaxation breaks. The
path that it breaks most is found from the last unit to the first, for all j and d at once: what is asked of
a unit is what is asked of those that read its block, less what is at hand of it. The idea is that of the
(l, S) inequalities of lot sizing (Barany, Van Roy, Wolsey 1984), along paths: what is needed and is not in
stock has to be made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rematc.solve.formulate import Formulation
from rematc.solve.model import Term

BROKEN = 0.05  # by less than that a cut is not worth its row
HOP = 1e-3  # what a step of a path costs: of two that are as good, the shorter is taken


@dataclass(frozen=True, slots=True)
class Cut:
    """Unit ``unit`` runs in stages ``first`` to ``end`` - 1, or one of ``blocks`` is there when they begin.

    That is asked as a whole; or as much as block ``kept`` is there at the end; or as ``run``, a unit, runs in
    the span that begins with the stage beside it.
    """

    unit: int
    blocks: tuple[int, ...]
    first: int
    end: int
    kept: int | None = None
    run: tuple[int, int] | None = None


Row = tuple[list[Term], float]


def add_cuts(f: Formulation, cuts: Iterable[Cut]) -> None:
    """Add the rows of ``cuts``, but of those whose stages begin no span of ``f``."""
    for row in rows(f, cuts).values():
        f.model.row(*row)


def rows(f: Formulation, cuts: Iterable[Cut]) -> dict[Cut, Row]:
    """The rows, by cut."""
    span = _spans(f)
    return {cut: row for cut in cuts if (row := _row(f, cut, span)) is not None}


def _spans(f: Formulation) -> dict[int, int]:
    """The span that begins with a stage, the end of all among them."""
    return {t: k for k, t in enumerate((*f.spans.starts, f.spans.n_stages))}


def _row(f: Formulation, cut: Cut, span: dict[int, int]) -> Row | None:
    """None: the formulation can't tell its stages apart."""
    if cut.first not in span or cut.end not in span:
        return None
    j, d = span[cut.first], span[cut.end]
    there = [f.kept.get((b, j)) for b in cut.blocks] + [f.again.get((cut.unit, k)) for k in range(j, d)]
    terms = [(x, -1.0) for x in there if x is not None]
    if cut.kept is None and cut.run is None:
        return terms, -1.0
    asked = f.kept.get((cut.kept, d)) if cut.kept is not None else None
    if cut.run is not None and cut.run[1] in span:
        asked = f.again.get((cut.run[0], span[cut.run[1]]))
    return None if asked is None else ([*terms, (asked, 1.0)], 0.0)


def broken(f: Formulation, values: Any) -> list[Cut]:
    """What ``values`` break, most first: of each unit and first span, the last span with which it is worst."""
    return _Asked(f, values).cuts()


class _Asked:
    """What is asked of each unit, as ``values`` have it: by first span, and by the span after the last."""

    def __init__(self, f: Formulation, values: Any) -> None:
        self.f, core, n = f, f.core, len(f.spans)
        self.there = np.zeros((len(core.block_bytes), n + 1))
        for (b, k), x in f.kept.items():
            self.there[b, k] = values[x]
        self.runs = np.zeros((len(core.units), n))
        for (u, k), x in f.again.items():
            self.runs[u, k] = values[x]
        self.before = np.pad(self.runs.cumsum(axis=1), ((0, 0), (1, 0)))  # runs before each span
        self.is_later = np.arange(n + 1)[None, :] > np.arange(n)[:, None]
        self.next_read = self._next_reads()
        self.of = dict[int, Any]()
        for u in reversed(range(len(core.units))):
            if (asked := self._asked(u)) is not None:
                self.of[u] = asked

    def cuts(self) -> list[Cut]:
        found = []
        for u, asked in self.of.items():
            ran = self.before[u][None, :] - self.before[u][:-1, None]
            lacking = np.where(self.is_later, asked - ran, 0.0)
            for j in np.flatnonzero(lacking.max(axis=1) > BROKEN):
                d = int(lacking[j].argmax())
                found.append((-lacking[j, d], u, int(j), d))
        return [self._cut(u, j, d) for _, u, j, d in sorted(found)]

    def _next_reads(self) -> Any:
        """By block and span, the first span from there on in which an op reads it."""
        n = len(self.f.spans)
        found = np.full((len(self.there), n + 1), n + 1)
        for k in reversed(range(n)):
            found[:, k] = found[:, k + 1]
            found[self.f.reads(k), k] = k
        return found[:, :n]

    def _of_block(self, b: int) -> Any:
        """What is asked of block b by ops, and for later spans, beyond what is at hand of it."""
        is_read = self.next_read[b][:, None] < np.arange(self.there.shape[1])[None, :]
        return np.where(is_read, 1.0, self.there[b][None, :])

    def _of_runs(self, u: int) -> Any:
        """The largest of the runs of unit u between the two spans."""
        n = len(self.f.spans)
        found = np.zeros((n, n + 1))
        for j in range(n):
            found[j, j + 1 :] = np.maximum.accumulate(self.runs[u, j:])
        return found

    def _asked(self, u: int) -> Any:
        """None: nothing that its runs don't fulfil."""
        core = self.f.core
        if core.born[u] >= self.f.spans.starts[-1]:
            return None
        asked: Any = None
        for _, _, what in self._reasons(u):
            asked = what if asked is None else np.maximum(asked, what)
        if asked is None:
            return None
        is_old = core.born[u] < np.array(self.f.spans.starts)
        asked = np.where(self.is_later & is_old[:, None], asked, 0.0)
        return asked if asked.max() > BROKEN else None

    def _reasons(self, u: int) -> Iterator[tuple[int | None, int | None, Any]]:
        """(block, unit that reads it, what is asked of unit u by that)."""
        for b in self.f.core.units[u].makes:
            if b in self.f.core.held:
                continue
            there = self.there[b][:-1, None]
            yield b, None, self._of_block(b) - there
            for w in self.f.core.readers[b]:
                if w in self.of:
                    yield b, w, self.of[w] - there - HOP
        if self.runs[u].any():
            yield None, None, self._of_runs(u)

    def _cut(self, u: int, j: int, d: int) -> Cut:
        """The cut along the path from unit u that asks most."""
        starts = (*self.f.spans.starts, self.f.spans.n_stages)
        blocks, at = list[int](), u
        while True:
            b, w, _ = max(self._reasons(at), key=lambda reason: float(reason[2][j, d]))
            if b is None:
                k = j + int(self.runs[at, j:d].argmax())
                return Cut(u, tuple(blocks), starts[j], starts[d], run=(at, starts[k]))
            blocks.append(b)
            if w is None:
                is_read = self.next_read[b, j] < d
                return Cut(u, tuple(blocks), starts[j], starts[d], kept=None if is_read else b)
            at = w
