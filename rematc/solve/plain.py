"""The chain of blocks in a core that nearly all of its time goes into, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from rematc.solve.reduce import Core

LONGEST = 192  # blocks: a longer one takes long
SHARE = 0.9  # of the time of all that may run again, and of its own bytes: with less it says little


@dataclass(frozen=True)
class PlainChain:
    """A chain in a core: ``blocks[k - 1]`` is block k, of ``size[k]`` bytes, made in ``cost_ns[k]``.

    It is read in stage ``read_in[k]`` (-1: in none), where ``beside_bytes[k]`` are there but for what is
    kept. Recomputation for it runs in stage ``run_in[k]``, beside ``before_bytes[k]``. To make it takes
    ``make_bytes[k]``, itself included. At 0 all is zero: what the first is made of is always there.
    """

    blocks: tuple[int, ...]
    cost_ns: tuple[int, ...]
    size: tuple[int, ...]
    make_bytes: tuple[int, ...]
    read_in: tuple[int, ...]
    run_in: tuple[int, ...]
    beside_bytes: tuple[int, ...]
    before_bytes: tuple[int, ...]

    def never_growing(self) -> PlainChain:
        """The same with each size the least up to it, and the rest of a block beside where it is read."""
        least = (0, *accumulate(self.size[1:], min))
        rest = (b + s - m for b, s, m in zip(self.beside_bytes, self.size, least, strict=True))
        return replace(self, size=least, beside_bytes=tuple(rest))


def plain_chain(core: Core, share: float = SHARE) -> PlainChain | None:
    """The chain of blocks that takes longest to run, if that is ``share`` of all that may run again.

    And if as much of its bytes is left where no block counts more than those before it.
    """
    most, before = dict[int, int](), dict[int, int | None]()
    total = 0
    for u, unit in enumerate(core.units):
        if unit.pinned or not unit.required or core.born[u] >= 0:
            continue
        total += unit.cost_ns
        first = max((b for b in unit.reads if b in most), key=most.__getitem__, default=None)
        if made := [b for b in unit.makes if b not in core.held]:
            largest = max(made, key=core.block_bytes.__getitem__)
            most[largest] = unit.cost_ns + (0 if first is None else most[first])
            before[largest] = first
    last = max(most, key=most.__getitem__, default=None)
    if last is None or most[last] < share * total:
        return None
    blocks = [last]
    while (first := before[blocks[-1]]) is not None:
        blocks.append(first)
    path = _path(core, tuple(reversed(blocks))) if len(blocks) <= LONGEST else None
    return path if path and sum(path.never_growing().size) >= share * sum(path.size) else None


def _path(core: Core, blocks: tuple[int, ...]) -> PlainChain | None:
    size, units = core.block_bytes, [core.units[core.maker[b]] for b in blocks]
    made = [sum(size[b] for b in unit.makes) + unit.workspace_bytes for unit in units]
    reads: dict[int, list[int]] = {b: [] for b in blocks}
    for t, stage in enumerate(core.stages):
        for b in reads.keys() & set(stage.reads):
            reads[b].append(t)

    def needs(t: int) -> int:
        # Of others on the chain nothing is counted: those before it may be kept anyway.
        others = (size[o] for o in core.stages[t].reads if o not in core.held and o not in reads)
        return core.stages[t].op_bytes + sum(others)

    read_in, later = [-1], len(core.stages)
    for b in blocks:
        t = max((t for t in reads[b] if t < later), default=-1)
        read_in.append(t)
        later = later if t < 0 else t
    earlier = [max((t for t in read_in[k + 1 :] if t >= 0), default=-1) for k in range(len(read_in))]
    run_in = [_run_in(core, e + 1, t, needs) if t >= 0 else -1 for e, t in zip(earlier, read_in, strict=True)]
    beside = [needs(t) if t >= 0 else 0 for t in read_in]
    before = [core.stages[t].before_bytes if t >= 0 else 0 for t in run_in]
    if max(read_in) < 0:
        return None
    costs, sizes = (0, *(u.cost_ns for u in units)), (0, *(size[b] for b in blocks))
    return PlainChain(blocks, costs, sizes, (0, *made), *map(tuple, (read_in, run_in, beside, before)))


def _run_in(core: Core, first: int, last: int, needs: Callable[[int], int]) -> int:
    """The stage from ``first`` on in which there is most room to make what is read in the stage ``last``."""
    possible = [last]
    for t in reversed(range(first, last)):
        if needs(t) > needs(last):  # what was made would be there too
            break
        possible.append(t)
    return min(possible, key=lambda t: (core.stages[t].before_bytes, -t))
