"""The machine and the versions that numbers are from, and how times are taken on it."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from rematc.costs.device import processor

PACKAGES = ("rematc", "torch", "ortools", "highspy", "transformers")


class Step(Protocol):
    """What can be timed: one training step, and what puts things as they were before it."""

    def clear(self) -> None: ...

    def step(self) -> object: ...


def machine() -> dict[str, Any]:
    """What a reader must know to compare: processor, cores, memory, versions, and who else was at work.

    ``load_average`` is that of the last minute: near zero where nothing else runs. A number above the spare
    cores says that the times are of little worth. What can't be learned is None.

    >>> machine()["cores"] >= 1
    True
    """
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


@contextmanager
def nothing_kept(folder: Path | None = None) -> Iterator[Path]:
    """Inside, plans and costs that rematc kept, and code that torch kept, are not found; none are kept.

    But for plans and costs that processes share in ``folder``. Gives the folder.
    """
    before = os.environ.get("REMATC_CACHE_DIR")
    no_code = torch.compiler.config.patch(force_disable_caches=True)
    with tempfile.TemporaryDirectory() as fresh, no_code:
        os.environ["REMATC_CACHE_DIR"] = str(folder or fresh)
        try:
            yield folder or Path(fresh)
        finally:
            del os.environ["REMATC_CACHE_DIR"]
            if before is not None:
                os.environ["REMATC_CACHE_DIR"] = before


def seconds_of_each(steps: Mapping[str, Step], rounds: int, turn: int = 0) -> dict[str, list[float]]:
    """Seconds of each step in each round: a round runs each once, so that what disturbs one disturbs all.

    The order rotates, as who runs after whom matters (caches); ``turn`` says who is first in the first
    round. Garbage is collected off the clock.
    """
    names = list(steps)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for n in range(turn, turn + rounds):
        first = n % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(seconds_of(steps[name]))
            steps[name].clear()
    return taken


def leave_compilers_garbage() -> None:
    """What compilers left is not looked through before each step that is timed from now on."""
    gc.collect()
    gc.freeze()


def seconds_of(step: Step) -> float:
    """Seconds of one step, begun without gradients; they are there when it ends."""
    step.clear()
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        step.step()
        return time.perf_counter() - started
    finally:
        gc.enable()


def write_results(path: Path, name: str, results: Mapping[str, Any]) -> None:
    """Results of the benchmark ``name`` as JSON, with the machine that they are from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": name, "machine": machine(), **results}, indent=1) + "\n")


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
