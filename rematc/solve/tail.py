"""The end of the backward pass, told exactly: the cheapest way through it from every set of blocks.

There the first blocks of the model are read, in CNNs the largest: few fit at a time, and the relaxation of
the MILP, which takes fractions of them, says little. But because few fit, the sets of them are few, too.
With S the blocks at hand, V(t, S) is the least time of all that runs again from the beginning of stage t on.
It is found from the end backwards. A label (S, ns) says that whoever has S may pay no more than ns; before

    the op of stage t      it is   (S + what the op reads, ns)
    a run of unit u        it is   (S - what u makes + what u reads, ns + time of u)

each where what is alive meanwhile is within the budget. So there are labels for that alone which somebody
asks for, and none that has more than another and pays as much. Dynamic programming over ideals, as it is
known from scheduling with precedences (Schrage, Baker 1978), here with runs that may come again.

Only that is counted which is alive in any order, so no plan pays less than V. Blocks kept for the tail are
few where it is narrow: it begins at the earliest stage from where there are at most `WAYS` labels. To the
MILP it is one choice among them (`formulate`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from rematc.solve.clock import spend
from rematc.solve.deadline import Deadline
from rematc.solve.merge import Merged
from rematc.solve.reduce import Core

SOME, LABEL_S = 4096, 1e-5  # labels; of work, for each
WAYS = 3000  # at the tail's beginning: columns of the MILP
AT_ONCE = 100_000  # labels looked at in one stage

Runs = tuple[tuple[int, ...], ...]  # units by stage, from the tail's first one
_Path = tuple[int, int, Any] | None  # what is done from a label on: stage, unit that runs in it, the rest
_Label = tuple[int, int, int, _Path]  # ns, bytes of its set, peak bytes to the end
_Labels = dict[int, _Label]  # by the set of blocks, a bit for each


@dataclass(frozen=True, slots=True)
class Way:
    """Whoever has the blocks ``needs`` when the tail begins can end with ``runs``, within ``peak_bytes``."""

    needs: frozenset[int]
    cost_ns: int
    peak_bytes: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class Tail:
    """All ways from stage ``start`` of ``core`` to the end that could be part of a cheapest plan."""

    core: Core
    start: int
    ways: tuple[Way, ...]

    def within(self, budget_bytes: int) -> Tail:
        """The ways that keep to ``budget_bytes`` with the small blocks counted that `merge` left out."""
        return replace(self, ways=tuple(way for way in self.ways if way.peak_bytes <= budget_bytes))


class _Run(NamedTuple):
    """A unit, sets as bits: ``lead_bytes`` is what it surely takes beside what it reads."""

    unit: int
    reads: int
    makes: int
    lead_bytes: int
    cost_ns: int


def find_tail(merged: Merged, budget_bytes: int, most_labels: int, deadline: Deadline) -> Tail | None:
    """The tail of ``merged`` for plans within ``budget_bytes``, after looking at ``most_labels``.

    None if there is none that costs anything: what is for nothing, the MILP knows. None too where a unit
    could run late, but only once: labels don't know what ran.
    """
    core = merged.core
    if any(unit.pinned and not unit.required for unit in core.units):
        return None
    found = None
    for t, labels in _Backwards(merged, budget_bytes, most_labels, deadline).labels():
        if len(labels) <= WAYS and min(ns for ns, *_ in labels.values()) > 0:
            found = t, labels
    if found is None:
        return None
    start, labels = found
    n = len(core.stages) - start
    ways = (
        Way(frozenset(_members(s)), ns, peak, _runs(path, start, n))
        for s, (ns, _, peak, path) in labels.items()
    )
    return Tail(core, start, tuple(ways))


class _Backwards:
    """The labels when each stage begins, from the last stage to the first."""

    def __init__(self, merged: Merged, budget_bytes: int, most_labels: int, deadline: Deadline) -> None:
        self.core, self.budget_bytes, self.deadline = merged.core, budget_bytes, deadline
        counted = zip(merged.counted().core.stages, self.core.stages, strict=True)
        self.small_bytes = [more.op_bytes - stage.op_bytes for more, stage in counted]
        self.left = most_labels
        self.sizes = dict[int, int]()
        units = enumerate(self.core.units)
        self.all_runs = [
            _Run(u, self._bits(unit.reads), self._bits(unit.makes), merged.lead_bytes(u), unit.cost_ns)
            for u, unit in units
        ]

    def labels(self) -> Iterator[tuple[int, _Labels]]:
        """(stage, labels when it begins), until it takes too long, nothing fits, or nothing may run again."""
        labels: _Labels = {0: (0, 0, 0, None)}
        for t in reversed(range(len(self.core.stages))):
            if self.core.stages[t].is_between:
                return
            begun = self._before_runs(t, self._before_op(t, labels))
            labels = _undominated(self._held(t, begun or {}))
            if not labels:
                return
            yield t, labels

    def _before_op(self, t: int, labels: _Labels) -> _Labels:
        stage, found = self.core.stages[t], _Labels()
        reads = self._bits(stage.reads)
        first = 0 if stage.unit is None else self.all_runs[stage.unit].makes  # op_bytes has them
        for s, (ns, _, peak, path) in labels.items():
            there = (s & ~first) | reads
            size = self._bytes(there)
            alive = stage.op_bytes + size
            if alive <= self.budget_bytes:
                _offer(found, there, (ns, size, max(peak, alive + self.small_bytes[t]), path))
        return found

    def _before_runs(self, t: int, labels: _Labels) -> _Labels | None:
        """Cheapest first (Dijkstra); None if there are too many."""
        runs = self._by_bit(t)
        can_run, room = sum(runs), self.budget_bytes - self.core.stages[t].before_bytes
        beside = self.core.stages[t].before_bytes + self.small_bytes[t]
        heap = [(label[0], s) for s, label in labels.items() if label[1] <= room]
        heapify(heap)
        done: _Labels = {}
        while heap:
            ns, s = heappop(heap)
            label = labels[s]
            if ns > label[0] or s in done:
                continue
            done[s] = label
            if len(done) % SOME == 0:
                spend(SOME * LABEL_S)
            if len(done) > min(AT_ONCE, self.left) or (len(done) % SOME == 0 and self.deadline.left() < 0):
                return None
            _, size, peak, path = label
            made = s & can_run
            while made:
                lowest = made & -made
                unit, reads, makes, lead_bytes, cost_ns = runs[lowest]
                made &= ~makes
                cost, there = ns + cost_ns, (s & ~makes) | reads
                if there in labels and labels[there][0] <= cost:
                    continue
                new_size = size - self._bytes(s & makes) + self._bytes(reads & ~s)
                if new_size + lead_bytes <= room:
                    labels[there] = cost, new_size, max(peak, new_size + lead_bytes + beside), (t, unit, path)
                    heappush(heap, (cost, there))
        self.left -= len(done)
        return done

    def _by_bit(self, t: int) -> dict[int, _Run]:
        """What can run again in stage t, by each block that it makes."""
        units = self.core.units
        there = (run for u, run in enumerate(self.all_runs) if self.core.born[u] < t and not units[u].pinned)
        return {1 << b: run for run in there for b in _members(run.makes)}

    def _held(self, t: int, labels: _Labels) -> _Labels:
        """``labels`` where a view holds some blocks since an earlier stage."""
        stage, found = self.core.stages[t], _Labels()
        if not (holds := self._bits(stage.holds)):
            return labels
        for s, (ns, _, peak, path) in labels.items():
            size = self._bytes(s | holds)
            if stage.before_bytes + size <= self.budget_bytes:
                _offer(found, s | holds, (ns, size, peak, path))
        return found

    def _bits(self, blocks: Iterable[int]) -> int:
        return sum(1 << b for b in {*blocks} - self.core.held)

    def _bytes(self, bits: int) -> int:
        found = self.sizes.get(bits)
        if found is None:
            found = self.sizes[bits] = sum(self.core.block_bytes[b] for b in _members(bits))
        return found


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _offer(labels: _Labels, s: int, label: _Label) -> None:
    if s not in labels or label[0] < labels[s][0]:
        labels[s] = label


def _undominated(labels: _Labels) -> _Labels:
    """Without those that some other with one block less is no dearer than."""
    kept = _Labels()
    for s, label in labels.items():
        rest = s
        while rest:
            lowest = rest & -rest
            rest ^= lowest
            less = labels.get(s ^ lowest)
            if less is not None and less[0] <= label[0]:
                break
        else:
            kept[s] = label
    return kept


def _runs(path: _Path, start: int, n: int) -> Runs:
    found: list[list[int]] = [[] for _ in range(n)]
    while path is not None:
        stage, unit, path = path
        found[stage - start].append(unit)
    return tuple(map(tuple, found))
