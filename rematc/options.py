"""Every setting, parsed and checked once, at the edge. Standard library alone, and the names of cards."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from rematc.cards import card
from rematc.errors import OptionError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

Budget = str | int | None
Inner = Literal["inductor", "eager"]
COSTS = ("auto", "measured", "roofline")  # or the name of a card

LIMIT_S = (2.0, 0.03, 20.0)  # to search: at the least, for each op, and at the most


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """How long to search, in seconds, and how close to the proven optimum is close enough.

    The seconds are of work, counted alike on a fast machine and on a slow one. Real time ends it after six
    times as many, and the plan has a note of it then. Without a limit it is by the number of ops, as the
    time that compiling takes is: see `for_ops`.

    >>> SolveOptions(time_limit_s=5).gap
    0.01
    """

    time_limit_s: float | None = None
    gap: float = 0.01

    def __post_init__(self) -> None:
        limit = self.time_limit_s
        if limit is not None and not (_is_number(limit) and 0 < limit < math.inf):
            raise OptionError(
                f"time_limit_s={limit!r}: give seconds above zero, as in 30, or None: by the number of ops"
            )
        if not _is_number(self.gap) or not 0 <= self.gap < math.inf:
            raise OptionError(f"gap={self.gap!r}: give a fraction of at least zero, as in 0.01 for 1 %")

    def for_ops(self, ops: int) -> float:
        """The time limit for a graph of so many ops, in seconds: 20, and less for one of under 670.

        >>> SolveOptions().for_ops(10), SolveOptions().for_ops(500), SolveOptions().for_ops(10_000)
        (2.0, 15.0, 20.0)
        >>> SolveOptions(time_limit_s=5).for_ops(10_000)
        5
        """
        least, each, most = LIMIT_S
        return min(most, max(least, each * ops)) if self.time_limit_s is None else self.time_limit_s


def parse_budget(budget: Budget, device_bytes: int | None = None) -> int | None:
    """``budget`` in bytes; None is no limit. GB is 10^9 bytes and GiB 2^30.

    ``device_bytes`` is the memory of the device, for a budget in percent; None: the device has no
    memory of its own, and a percentage is refused. Raises `OptionError` for what can't be read.

    >>> parse_budget("20GB"), parse_budget("18.5GiB"), parse_budget("2.01GB"), parse_budget(12)
    (20000000000, 19864223744, 2010000000, 12)
    >>> parse_budget("80%", device_bytes=1000)
    800
    """
    how = 'give "20GB", "18.5GiB", "80%", a whole number of bytes, or None for no limit'
    if budget is None:
        return None
    if isinstance(budget, int) and not isinstance(budget, bool):
        nbytes = budget
    elif isinstance(budget, str) and (m := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", budget)):
        nbytes = _share(float(m[1]), device_bytes, budget)
    elif isinstance(budget, str) and (m := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", budget)):
        unit = m[2].upper() or "B"
        if unit not in UNITS:
            raise OptionError(f"budget {budget!r}: unknown unit {m[2]!r}; {how}")
        nbytes = int(Fraction(m[1]) * UNITS[unit])
    else:
        raise OptionError(f"can't read the budget {budget!r}: {how}")
    if nbytes <= 0:
        raise OptionError(f"budget {budget!r}: must be above zero; {how}")
    return nbytes


def _share(percent: float, device_bytes: int | None, given: str) -> int:
    if device_bytes is None:
        raise OptionError(
            f"budget {given!r}: a percentage is of the device's own memory, and the model is on the "
            'CPU, which shares its memory with everything else; give bytes, as in "20GB"'
        )
    if percent > 100:
        raise OptionError(f"budget {given!r}: more than all of the device; give at most 100%")
    return int(device_bytes * percent / 100)


@dataclass(frozen=True)
class Options:
    """The settings of `rematc.backend`, checked; equal and hashable by their values.

    >>> Options(budget="20GB") == Options(budget="20GB")
    True
    """

    budget: Budget
    inner: Inner = "inductor"
    reserve: int | str = 0
    optimizer: Any = None
    solve: SolveOptions = SolveOptions()
    costs: str = "auto"
    measure_s: float = 20.0
    accumulate: bool | None = None
    regather: bool = False

    def __post_init__(self) -> None:
        is_percent = isinstance(self.budget, str) and "%" in self.budget
        parse_budget(self.budget, device_bytes=100 if is_percent else None)
        if self.inner not in ("inductor", "eager"):
            raise OptionError(f'inner={self.inner!r}: give "inductor" or "eager"')
        if self.optimizer is not None and not (
            callable(self.optimizer) or hasattr(self.optimizer, "param_groups")
        ):
            raise OptionError(
                f"optimizer={self.optimizer!r}: give an optimizer, or a function from parameters to one, "
                "as in lambda params: torch.optim.AdamW(params)"
            )
        if self.costs not in COSTS:
            card(self.costs)
        if not _is_number(self.measure_s) or not 0 <= self.measure_s < math.inf:
            raise OptionError(f"measure_s={self.measure_s!r}: give seconds of at least zero, as in 20")
        if self.accumulate not in (True, False, None):
            raise OptionError(f"accumulate={self.accumulate!r}: give True or False, or None to find out")
        if self.regather not in (True, False):
            raise OptionError(f"regather={self.regather!r}: give True or False")
        _ = self.reserve_bytes  # raises what is wrong with it

    @property
    def reserve_bytes(self) -> int:
        """``reserve`` in bytes."""
        try:
            return 0 if self.reserve in (0, None) else parse_budget(self.reserve) or 0
        except OptionError as e:
            how = 'give "500MB", "2GiB", or a whole number of bytes, zero or more'
            raise OptionError(f"reserve={self.reserve!r}: {how}") from e
