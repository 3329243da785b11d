"""The cells of `benchmarks.gpu`: a model without limit, and what bounds its memory, ours and its rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import rematc
from benchmarks.gpu_models import Training, sqrt_of
from benchmarks.gpu_rows import FREE
from benchmarks.llama import torchs_budget

SHARES = (0.5, 0.2, 0.1)  # of the way from where no plan reaches to the step without limit
SOLVE_S = 10.0


@dataclass
class Cell:
    """What is to be run: a backend, and the model so or so.

    The budget of ours is what ``base`` took, another cell, or a ``share`` of the way there from where no plan
    reaches. A rival has none; ``segment`` layers of it are checkpointed together.
    """

    name: str
    backend: Callable[[int], Any]  # of the budget
    base: str | None = None
    share: float | None = None
    segment: int | None = None

    def budget(self, training: Training, resident: int, limit: int) -> int:
        """Bytes, where ``base`` took ``limit``."""
        share = 1.0 if self.share is None else training.least + self.share * (1 - training.least)
        return int(resident + share * (limit - resident))


def cells(training: Training) -> Iterator[Cell]:
    """Those first of which others need the peak, then the most telling."""
    half, least = torchs = [f"torch's budget {x}" for x in (0.5, 0.0)]
    yield Cell(FREE, lambda _: "inductor")
    for name, ratio in zip(torchs, (0.5, 0.0), strict=True):
        yield Cell(name, lambda _, x=ratio: torchs_budget(x, "inductor"))  # type: ignore[misc]
    yield _ours(SHARES[0])
    yield Cell(f"rematc, as {half}", _backend, half)
    yield _ours(SHARES[1])
    yield Cell("checkpoint every layer", lambda _: "inductor", segment=1)
    yield Cell(f"rematc, as {least}", _backend, least)
    if training.chains:
        yield Cell("checkpoint sqrt(L)", lambda _: "inductor", segment=sqrt_of(training.layers))
    yield _ours(SHARES[2])


def _ours(share: float) -> Cell:
    return Cell(f"rematc, {share:.0%}", _backend, FREE, share)


def _backend(budget: int) -> rematc.Backend:
    return rematc.backend(budget, time_limit_s=SOLVE_S)
