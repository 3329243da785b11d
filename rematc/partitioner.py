"""`partitioner()`: the same line as an Inductor ``custom_partitioner_fn``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from rematc import compat
from rematc.compiled import ALONE, Given
from rematc.options import Budget, Options, SolveOptions
from rematc.partition import Partitioned, partition
from rematc.passes import mark_static
from rematc.plan import Plan
from rematc.resident import NO_TRAINING, Training

_Base: Any = compat.partitioner_base()


class Partitioner(_Base):
    """What `partitioner` returns. ``plans`` has one `Plan` for each training graph."""

    def __init__(
        self,
        options: Options,
        record: Callable[[Partitioned], object] | None = None,
        beside: Training = NO_TRAINING,
        given: Given = ALONE,
        planned: bool = False,
    ) -> None:
        self.options, self.beside, self.given, self.planned = options, beside, given, planned
        self.plans: list[Plan] = []
        self.record = record

    def __call__(self, joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **told: Any) -> Any:
        """Split a joint graph as the plan says."""
        mark_static(joint, told)
        options, given = self.options, self.given
        done = partition(joint, num_fwd_outputs, options, self.beside, given, planned=self.planned)
        self.plans.append(done.plan)
        if self.record is not None:
            self.record(done)
        return done.forward, done.backward

    def uuid(self) -> str:
        """Names the settings: Inductor's cache key."""
        return "rematc-" + "-".join(map(repr, self.__getstate__()))

    def __getstate__(self) -> tuple[Options, int, Given]:
        """Settings alone: Inductor hashes this state, and what was planned so far is no setting.

        Of the optimizer only its bytes count: it may be a function that can't be pickled.
        """
        return replace(self.options, optimizer=None), self.beside.resident_bytes, self.given

    def __setstate__(self, state: tuple[Options, int, Given]) -> None:
        options, resident_bytes, given = state
        self.__init__(options, None, Training(accumulated_bytes=resident_bytes), given)  # type: ignore[misc]


def partitioner(
    budget: Budget,
    *,
    reserve: int | str = 0,
    time_limit_s: float | None = None,
    gap: float = 0.01,
    costs: str = "auto",
    measure_s: float = 20.0,
    regather: bool = False,
) -> Partitioner:
    """A ``custom_partitioner_fn`` for Inductor, for those who can set only that.

    The settings are those of `rematc.backend`. On a hit in AOTAutograd's cache no partitioner runs;
    then ``plans`` stays empty.

    >>> import rematc
    >>> rematc.partitioner(budget="20GB").plans
    []
    """
    solve = SolveOptions(time_limit_s, gap)
    return Partitioner(Options(budget, "inductor", reserve, None, solve, costs, measure_s, regather=regather))
