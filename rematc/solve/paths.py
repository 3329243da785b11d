"""What makes the bound tight: a fraction of a block can't be had for a fraction of its price.

Alone, the rows of `formulate` let the linear relaxation cheat: a unit runs again by a tenth in each of
ten spans, each time on a tenth of its inputs, and in the end its block is there as a whole. But let unit u
make b1, which is read to make b2, and so on to bn, which is asked for in spans j to d - 1, where all of them
have been made once before span j. Then one of those blocks is at hand when span j begins, or u runs again by
the end of span d - 1:

    sum of R[u, k] over k from j to d - 1  +  sum of S[b, j] over b1 to bn  >=  what is asked for

    1           if an op of those spans reads bn
    S[bn, d]    if bn is kept for later ones
    R[w, k]     if unit w, which reads bn, runs again in span k of those

There are too many of these to write down, so those are added that a solution of the relaxation breaks
(`tighten`). The path that it breaks most is found from the last unit to the first, for all j and d at once:
what is asked of a unit is what is asked of those that read its block, less what is at hand of it. The idea
is that of the (l, S) inequalities of lot sizing (Barany, Van Roy, Wolsey 1984), along paths: what is needed
and is not in stock has to be made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rematc.solve.formulate import Formulation
from rematc.solve.model import Term

BROKEN = 0.05  # by less than that a cut is not worth its row
FEW = 32  # spans: all d are tried for each j; of more, those 1, 2, 4, ... spans from it, and the end
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
    """None: the formulation can't tell its stages apart, or what is asked for is never there."""
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


def broken(f: Formulation, values: Any, *, by_reads: bool = False) -> list[Cut]:
    """What ``values`` break, most first: of each unit and first span, the last span with which it is worst.

    ``by_reads``: only what ops ask for.
    """
    return _Asked(f, values, by_reads).cuts()


class _Asked:
    """What is asked of each unit, as ``values`` have it: by span j, in columns for several d."""

    def __init__(self, f: Formulation, values: Any, by_reads: bool) -> None:
        self.f, core, n = f, f.core, len(f.spans)
        self.by_reads = by_reads
        self.starts = np.array((*f.spans.starts, f.spans.n_stages))
        self.there = np.zeros((len(core.block_bytes), n + 1))
        for (b, k), x in f.kept.items():
            self.there[b, k] = values[x]
        self.runs = np.zeros((len(core.units), n))
        for (u, k), x in f.again.items():
            self.runs[u, k] = values[x]
        self.before = np.pad(self.runs.cumsum(axis=1), ((0, 0), (1, 0)))  # runs before each span
        self.lengths = list(range(1, n)) if n <= FEW else [1 << i for i in range((n - 1).bit_length())]
        ends = np.arange(n)[:, None] + np.array([*self.lengths, n])
        self.ends = np.minimum(ends, n)
        self.next_read = self._next_reads()
        self.of = dict[int, Any]()
        for u in reversed(range(len(core.units))):
            if (asked := self._asked(u)) is not None:
                self.of[u] = asked

    def cuts(self) -> list[Cut]:
        found = []
        for u, asked in self.of.items():
            lacking = asked - (self.before[u][self.ends] - self.before[u][:-1, None])
            for j in np.flatnonzero(lacking.max(axis=1) > BROKEN):
                column = int(lacking[j].argmax())
                found.append((-lacking[j, column], u, int(j), column))
        return [self._cut(u, j, column) for _, u, j, column in sorted(found)]

    def _next_reads(self) -> Any:
        """By block and span, the first span from there on in which an op reads it."""
        n = len(self.f.spans)
        found = np.full((len(self.there), n + 1), n + 1)
        for k in reversed(range(n)):
            found[:, k] = found[:, k + 1]
            found[self.f.reads(k), k] = k
        return found[:, :n]

    def _of_block(self, b: int) -> Any:
        """What is asked of block b: all of it by ops, or what later spans find."""
        is_read = self.next_read[b][:, None] < self.ends
        return np.where(is_read, 1.0, 0.0 if self.by_reads else self.there[b][self.ends])

    def _of_runs(self, u: int) -> Any:
        """The largest of the runs of unit u from j to d - 1: for twice the length, of two that are known."""
        most, length, columns = self.runs[u], 1, list[Any]()
        for longer in self.lengths:
            if shift := longer - length:
                most, length = np.maximum(most, np.pad(most[shift:], (0, shift))), longer
            columns.append(most)
        to_the_end = np.maximum.accumulate(self.runs[u][::-1])[::-1]
        return np.column_stack((*columns, to_the_end))

    def _asked(self, u: int) -> Any:
        """None: nothing that matters."""
        asked: Any = None
        for _, _, what in self._reasons(u):
            asked = what if asked is None else np.maximum(asked, what)
        if asked is None:
            return None
        is_old = self.f.core.born[u] < self.starts[:-1]
        asked = np.where(is_old[:, None], asked, 0.0)
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
        if self.runs[u].any() and not self.by_reads:
            yield None, None, self._of_runs(u)

    def _cut(self, u: int, j: int, column: int) -> Cut:
        """The cut along the path from unit u that asks most."""
        d, blocks, at = int(self.ends[j, column]), list[int](), u
        first, end = int(self.starts[j]), int(self.starts[d])
        while True:
            b, w, _ = max(self._reasons(at), key=lambda reason: float(reason[2][j, column]))
            if b is None:
                k = j + int(self.runs[at, j:d].argmax())
                return Cut(u, tuple(blocks), first, end, run=(at, int(self.starts[k])))
            blocks.append(b)
            if w is None:
                is_read = self.next_read[b, j] < d
                return Cut(u, tuple(blocks), first, end, kept=None if is_read else b)
            at = w
