"""What was measured of single ops on one device, kept from one process to the next.

A file by device and torch version has, for each op (target, shapes, dtypes, strides), the nanoseconds of
a run, the bytes of workspace and results, and how these lie in memory, as far as that was measured.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from rematc import cache
from rematc.costs.call import Call
from rematc.costs.device import device_name
from rematc.costs.timing import timings
from rematc.costs.workspace import Taken, stays_unknown, taken

log = logging.getLogger(__name__)

FORMAT = "rematc.costs/4"
TIME, WORKSPACE, RESULT, LAYOUTS = KINDS = "runtime_ns", "workspace_bytes", "result_bytes", "layouts"
UNKNOWN = (
    "what %s takes while it runs, beside its results, is not known, and not counted: leave reserve= for it, "
    "or, if it is a custom op that does nothing but compute, declare it by rematc.pure"
)
Figures = dict[str, dict[str, Any]]  # of each kind, by the name of a call
Measure = Callable[[Iterable[Call]], Mapping[Hashable, tuple[Any, ...]]]


class Table:
    """The measured costs of ops on ``device``; what is not there is measured, once.

    ``folder=None`` keeps nothing. Processes that write at the same time may drop each other's figures,
    which are then measured again; they never mix or halve a file.

    >>> x = torch.ones(4)
    >>> call = Call(torch.ops.aten.logsumexp.default, (x, [0]), {})
    >>> Table(torch.device("cpu"), None).taken([call])[call.key]  # four exponentials, and a number
    Taken(workspace_bytes=20, result_bytes=4, layouts=(((), ()),))
    """

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"costs-{device_name(device)}.json"
        self._kept = self._read()
        self._said: set[str] = set()  # ops of which it can't be known what they take

    def times(self, calls: Iterable[tuple[Call, int]], limit_s: float) -> dict[Hashable, int]:
        """Nanoseconds by the key of a call, see `rematc.costs.timing.timings`."""
        expected = {call.key: (call, ns) for call, ns in calls}

        def measure(unknown: Iterable[Call]) -> Mapping[Hashable, tuple[Any, ...]]:
            found = timings((expected[call.key] for call in unknown), limit_s)
            return {key: (ns,) for key, ns in found.items()}

        found = self._known_or_measured((TIME,), [call for call, _ in expected.values()], measure)
        return {key: ns for key, (ns,) in found.items()}

    def taken(self, calls: Iterable[Call]) -> dict[Hashable, Taken]:
        """What calls take and return, by their keys, see `rematc.costs.workspace.taken`."""
        distinct = list({c.key: c for c in calls}.values())
        unknown = {str(call.target) for call in distinct if stays_unknown(call)} - self._said
        if unknown:
            log.warning(UNKNOWN, ", ".join(sorted(unknown)))
            self._said |= unknown
        found = self._known_or_measured((WORKSPACE, RESULT, LAYOUTS), distinct, taken)
        return {
            key: Taken(workspace, result, tuple((tuple(shape), tuple(stride)) for shape, stride in layouts))
            for key, (workspace, result, layouts) in found.items()
        }

    def _known_or_measured(
        self, kinds: tuple[str, ...], calls: list[Call], measure: Measure
    ) -> dict[Hashable, tuple[Any, ...]]:
        known = [self._kept[kind] for kind in kinds]
        names = {call.key: _name(call.key) for call in calls}

        def unknown() -> list[Call]:
            return [call for call in calls if not all(names[call.key] in kept for kept in known)]

        if self._path is not None and unknown():  # another process may have measured them since
            for kind, figures in self._read().items():
                self._kept[kind] |= figures
        measured = measure(unknown())
        if measured:
            _put(self._kept, kinds, {names[key]: figures for key, figures in measured.items()})
            lasting = {call.key for call in calls if call.is_of_torch}  # a user's op may be another tomorrow
            self._keep(kinds, {names[key]: figures for key, figures in measured.items() if key in lasting})
        return {
            key: tuple(kept[name] for kept in known)
            for key, name in names.items()
            if all(name in kept for kept in known)
        }

    def _keep(self, kinds: tuple[str, ...], new: dict[str, tuple[Any, ...]]) -> None:
        if self._path is not None and new:
            data = self._read()  # another process may have added to it since
            _put(data, kinds, new)
            cache.keep(self._path, {"format": FORMAT, **data})

    def _read(self) -> Figures:
        data = None if self._path is None else cache.load(self._path, FORMAT)
        if data is None or self._path is None:
            return {kind: {} for kind in KINDS}
        found = {kind: data.get(kind) for kind in KINDS}
        if all(isinstance(kept, dict) and all(map(IS[kind], kept.values())) for kind, kept in found.items()):
            return {kind: dict(kept or {}) for kind, kept in found.items()}
        cache.damaged(self._path, "figures that are none")
        return {kind: {} for kind in KINDS}


def _put(figures: Figures, kinds: tuple[str, ...], new: Mapping[str, tuple[Any, ...]]) -> None:
    """Add figures by their kind: of each call there is one of each of ``kinds``."""
    for n, kind in enumerate(kinds):
        figures[kind] |= {name: found[n] for name, found in new.items()}


def _is_figure(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**62


def _are_layouts(x: object) -> bool:
    """Shapes, each with as many strides?"""
    return isinstance(x, list) and all(isinstance(each, list) and _is_layout(*each) for each in x)


def _is_layout(shape: object = None, strides: object = None, *more: object) -> bool:
    both = [shape, strides, *more]
    figures = all(isinstance(each, list) and all(map(_is_figure, each)) for each in both)
    return figures and not more and len(shape) == len(strides)  # type: ignore[arg-type]


def _name(key: Hashable) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:24]


IS = dict.fromkeys(KINDS, _is_figure) | {LAYOUTS: _are_layouts}
