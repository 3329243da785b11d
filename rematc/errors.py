"""What can go wrong, each with the way out. Standard library alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

CUT = "  the clock ended the search: another run, or a machine with less to do, may find a smaller budget.\n"
OUTSIDE = "what is taken outside of the graph"  # a loss, say, as it stands among values


class RematcError(Exception):
    """Base of every error that rematc raises on purpose."""


class OptionError(RematcError, ValueError):
    """A setting can't be read; the message lists what can."""


class ProblemError(RematcError, ValueError):
    """A problem contradicts itself, or a problem file can't be read."""


class PlanError(RematcError, ValueError):
    """A plan does not fit its problem: it reads what is not there, repeats what it may not, ..."""


class CaptureError(RematcError):
    """The model, or the file that builds it, can't be turned into a graph to plan for."""


class BudgetError(RematcError):
    """No plan fits the budget, or none was found that does: the first if ``bound_bytes`` is above it.

    ``minimum_bytes`` is the smallest budget that is accepted, ``bound_bytes`` what is proven that no plan
    can do with less than, with the backward ops in the order chosen (0: nothing is), ``budget_bytes`` what
    was asked, ``step`` the op at which that plan peaks (or what runs, where several graphs share the budget),
    and ``largest`` the three largest values alive there, as (name, bytes), largest first. ``advice`` is what
    else to try. ``was_cut``: the clock ended the search. ``plan`` is that plan, where one process solves and
    refuses (it is not pickled), else None.

    >>> raise BudgetError(100, 120, step="mm_4", largest=(("relu", 64),))
    Traceback (most recent call last):
    rematc.errors.BudgetError: ...
    """

    def __init__(
        self,
        budget_bytes: int,
        minimum_bytes: int,
        *,
        step: str,
        largest: tuple[tuple[str, int], ...],
        resident_bytes: int = 0,
        bound_bytes: int = 0,
        advice: str = "",
        was_cut: bool = False,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.step = step
        self.largest = largest
        self.resident_bytes = resident_bytes
        self.bound_bytes = bound_bytes
        self.advice, self.was_cut = advice, was_cut
        self.plan: Any = None
        is_proven = bound_bytes > budget_bytes
        asked = format_bytes(budget_bytes)
        head = (
            f"a budget of {asked} can't be met" if is_proven else f"no plan was found for a budget of {asked}"
        )
        proven = f"; no plan can do with less than {format_bytes(bound_bytes)}" if bound_bytes else ""
        alive = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
        is_outside = any(name == OUTSIDE for name, _ in largest)
        inside = "the loss compiled with the model, " if is_outside else ""
        super().__init__(
            f"{head}: the smallest that there is a plan for is "
            f"{format_bytes(minimum_bytes)} ({minimum_bytes} bytes), of which "
            f"{format_bytes(resident_bytes)} is resident before the step (parameters, inputs, reserve)"
            f"{proven}.\n"
            f"  in the way: {step}, where that plan peaks; "
            f"largest alive there: {alive or 'nothing'}.\n"
            f"{CUT if was_cut else ''}"
            f"  what to try: budget={minimum_bytes}, {advice}{inside}a smaller batch or sequence, "
            f"a lower precision, or a smaller reserve."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (
            self.budget_bytes,
            self.minimum_bytes,
            self.step,
            self.largest,
            self.resident_bytes,
            self.bound_bytes,
            self.advice,
            self.was_cut,
        )


def _rebuild(
    budget: int,
    minimum: int,
    step: str,
    largest: tuple[tuple[str, int], ...],
    resident: int,
    bound: int,
    advice: str,
    was_cut: bool,
) -> BudgetError:
    return BudgetError(
        budget,
        minimum,
        step=step,
        largest=largest,
        resident_bytes=resident,
        bound_bytes=bound,
        advice=advice,
        was_cut=was_cut,
    )


def format_bytes(n: int) -> str:
    """``n`` bytes for people, in powers of 1000.

    >>> format_bytes(21_390_000_000), format_bytes(999), format_bytes(154_537_992)
    ('21.39 GB', '999 B', '154.54 MB')
    """
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"


def refused(error: RematcError) -> Callable[..., Any]:
    """What is called in place of compiled code, and raises ``error``: each time another.

    Torch never forgets what it was given, nor an error the frames that it came through with the model.
    """
    bare = _without_frames(error)

    def refuse(*_: Any, **__: Any) -> Any:
        raise _without_frames(bare)

    return refuse


def _without_frames(error: RematcError) -> RematcError:
    twin = copy.copy(error)
    vars(twin).update(vars(error))
    return twin


def error_of_ours(error: BaseException | None, before: BaseException | None = None) -> RematcError | None:
    """The rematc error that caused ``error``, if one did.

    ``before``: an error that was being handled when all this began is no cause of it.
    """
    while error is not None and error is not before:
        if isinstance(error, RematcError):
            return error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None
