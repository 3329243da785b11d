"""What was measured of single ops on one device, kept from one process to the next.

A file by device and torch version has, for each op (target, shapes, dtypes, strides), the nanoseconds of
a run and the bytes of workspace, as far as either was measured.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path

import torch

from rematc import cache
from rematc.costs.call import Call
from rematc.costs.device import device_name
from rematc.costs.timing import timings
from rematc.costs.workspace import stays_unknown, workspaces

log = logging.getLogger(__name__)

FORMAT = "rematc.costs/1"
TIME, WORKSPACE = "runtime_ns", "workspace_bytes"
UNKNOWN = (
    "what %s takes while it runs, beside its results, is not known, and not counted: leave reserve= for it, "
    "or, if it is a custom op that does nothing but compute, declare it by rematc.pure"
)
Measure = Callable[[Iterable[Call]], Mapping[Hashable, int]]


class Table:
    """The measured costs of ops on ``device``; what is not there is measured, once.

    ``folder=None`` keeps nothing. Processes that write at the same time may drop each other's figures,
    which are then measured again; they never mix or halve a file.

    >>> x = torch.ones(4)
    >>> call = Call(torch.ops.aten.logsumexp.default, (x, [0]), {})
    >>> Table(torch.device("cpu"), None).workspaces([call])[call.key]  # four exponentials, and a number
    20
    """

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"costs-{device_name(device)}.json"
        self._kept = self._read()
        self._said: set[str] = set()  # ops whose workspace can't be known

    def times(self, calls: Iterable[tuple[Call, int]], limit_s: float) -> dict[Hashable, int]:
        """Nanoseconds by the key of a call, see `rematc.costs.timing.timings`."""
        expected = {call.key: (call, ns) for call, ns in calls}

        def measure(unknown: Iterable[Call]) -> Mapping[Hashable, int]:
            return timings((expected[call.key] for call in unknown), limit_s)

        return self._known_or_measured(TIME, [call for call, _ in expected.values()], measure)

    def workspaces(self, calls: Iterable[Call]) -> dict[Hashable, int]:
        """Workspace bytes by the key of a call, see `rematc.costs.workspace.workspaces`."""
        distinct = list({c.key: c for c in calls}.values())
        unknown = {str(call.target) for call in distinct if stays_unknown(call)} - self._said
        if unknown:
            log.warning(UNKNOWN, ", ".join(sorted(unknown)))
            self._said |= unknown
        return self._known_or_measured(WORKSPACE, distinct, workspaces)

    def _known_or_measured(self, what: str, calls: list[Call], measure: Measure) -> dict[Hashable, int]:
        known = self._kept[what]
        names = {call.key: _name(call.key) for call in calls}
        measured = measure([call for call in calls if names[call.key] not in known])
        if measured:
            known |= {names[key]: figure for key, figure in measured.items()}
            lasting = {call.key for call in calls if call.is_of_torch}  # a user's op may be another tomorrow
            self._keep(what, {names[key]: figure for key, figure in measured.items() if key in lasting})
        return {key: known[name] for key, name in names.items() if name in known}

    def _keep(self, what: str, new: dict[str, int]) -> None:
        if self._path is not None and new:
            data = self._read()  # another process may have added to it since
            data[what] |= new
            cache.keep(self._path, {"format": FORMAT, **data})

    def _read(self) -> dict[str, dict[str, int]]:
        data = None if self._path is None else cache.load(self._path, FORMAT)
        if data is None or self._path is None:
            return {TIME: {}, WORKSPACE: {}}
        found = {what: data.get(what) for what in (TIME, WORKSPACE)}
        if all(isinstance(kept, dict) and all(map(_is_figure, kept.values())) for kept in found.values()):
            return {what: dict(kept or {}) for what, kept in found.items()}
        cache.damaged(self._path, "figures that are none")
        return {TIME: {}, WORKSPACE: {}}


def _is_figure(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**62


def _name(key: Hashable) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:24]
