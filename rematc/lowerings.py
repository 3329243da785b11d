"""What lowering a graph told, kept from one process to the next: what is known is not lowered to plan again.

It is kept by the name that Inductor's own cache has for a graph, its inputs and all settings, and by what
else decides.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import fx

from rematc import cache, compat, passes

T = TypeVar("T")
FORMAT = "rematc.lowering/1"
MOST = 1000  # files kept: with more, the oldest go


class Lowered(NamedTuple):
    """A graph, and how it is lowered."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    is_backward: bool


def told_once(
    lowered: Sequence[Lowered],
    decides: tuple[object, ...],
    folder: Path | None,
    find: Callable[[], T],
    read: Callable[[Any], T],
) -> T:
    """What ``find()`` returned for these graphs before, in whatever process; else it is found now, and kept.

    ``decides``: what else it depends on, as `repr` shows it. ``read`` makes it of its JSON, and raises
    `ValueError` or `TypeError` for what can't be that. ``folder=None`` keeps nothing.
    """
    names = [compat.graph_name(m, inputs, is_backward=back) for m, inputs, back in lowered if folder]
    if folder is None or None in names:
        return find()
    path = folder / "lowerings" / f"{_digest(names, decides)}.json"
    data = cache.load(path, FORMAT)
    if data is not None:
        try:
            told = read(data["told"])
        except (KeyError, TypeError, ValueError) as e:
            cache.damaged(path, e)
        else:
            cache.used(path)
            return told
    told = find()
    cache.keep_among(path, {"format": FORMAT, "told": told}, MOST)
    return told


def _digest(*what: object) -> str:
    return hashlib.sha256(repr((_own_code(), *what)).encode()).hexdigest()[:24]


@functools.cache
def _own_code() -> str:
    """What rematc asks of Inductor, and how it reads the answer, may change between two of its versions."""
    folders = Path(__file__).parent, Path(passes.__file__).parent
    files = sorted({path for folder in folders for path in folder.rglob("*.py")})
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
