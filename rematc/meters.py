"""What measures the spans of a survey: torch's profiler on the CPU, the caching allocator on CUDA."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch.profiler import profile

from rematc import compat
from rematc.allocations import (
    FORWARD,
    Span,
    backward_passes,
    mark,
    memory_profile,
    profiler_is_taken,
    spans,
    timeline,
)
from rematc.compat import before_profiles
from rematc.highest import Highest
from rematc.storages import tensors
from rematc.survey import Survey

log = logging.getLogger(__name__)
UNWATCHED = (
    "where several processes train on the CPU, what lies outside of the graphs is not watched (a loss, eager "
    "code, buffers of transfers): leave a reserve for it"
)
PROFILED = (
    "a step runs under a profile, and none was watched before: what lies outside of its graphs (a loss, "
    "eager code) is not in the plan, so a step may take more than the budget\n"
    "  what to try: one or two steps before the profile, the loss compiled with the model, or a reserve"
)


class CpuMeter:
    """By the profiler: one profile, with marks in it.

    A profile is bound to its thread, and can neither begin nor end in a backward pass, which puts back what
    it found of the thread's state: ``then`` is called after each. Nor may another begin in a compiled region,
    or in a `record_function`, that was entered while this one ran: torch would write the end of that to
    memory that is gone with this one. So there is one for a step at most, and where one had to give way the
    next step has none. ``is_missed``: somebody has to hear of it where another profile is in the way.
    """

    waits = True

    def __init__(self, then: Callable[[], object], *, is_missed: bool = False) -> None:
        self.rises: list[Span] = []
        self.is_whole = True
        self.is_pass_over = False  # has one just ended? Then nothing runs that was entered under the profile
        self.then, self.is_missed = then, is_missed
        self.running: profile | None = None
        self.thread = threading.get_ident()
        self.until = ExitStack()

    def open(self) -> None:
        """Start the profile, or put a mark in it."""
        if self.running is not None:
            mark()
        elif not self.is_whole or compat.is_in_backward():
            self.is_whole = False
        elif profiler_is_taken():
            self.is_whole = False
            if self.is_missed:
                _say_profiled()
        else:
            self.running = memory_profile()
            self.running.start()
            _Profiler.holder.add(self)
            self.until.enter_context(backward_passes(self._begins))
            self.until.enter_context(before_profiles(give_way))

    def shut(self) -> None:
        """Put a mark in the profile."""
        if self.running is not None:
            mark()

    def close(self) -> None:
        """Read the profile: every other span is outside, from the first on."""
        self.until.close()
        running, self.running = self.running, None  # garbage that is collected meanwhile may have it give way
        _Profiler.holder.discard(self)
        if running is not None:
            running.stop()
            self.rises = spans([*timeline(running), None], every=2)
            _Profiler.was_taken = not self.is_pass_over

    def _begins(self, phase: str) -> None:
        self.is_pass_over = phase == FORWARD
        if self.is_pass_over:
            self.then()
            self.is_pass_over = False


class _Profiler:
    """A process has one: who has it, and whether it was taken away since a survey last asked for it."""

    holder: ClassVar[weakref.WeakSet[CpuMeter]] = weakref.WeakSet()
    was_taken = False


def give_way() -> None:
    """End what is measured on the CPU: somebody compiles or needs the profiler, or nobody goes back.

    A profile can be stopped in its own thread alone, and not in a backward pass: else that is done at the
    end of it, or at the next step.
    """
    for meter in list(_Profiler.holder):
        meter.is_whole = False
        if meter.thread == threading.get_ident() and not compat.is_in_backward():
            meter.close()


class CudaMeter:
    """By what the caching allocator counts; the peak that it knows begins anew with each span."""

    waits, is_whole = False, True

    def __init__(self, device: torch.device) -> None:
        self.rises: list[Span] = []
        self.device, self.before, self.highest = device, 0, Highest(device)

    def open(self) -> None:
        """Remember what is there."""
        self.highest.begin_anew()
        self.before = torch.cuda.memory_allocated(self.device)

    def shut(self) -> None:
        """Compare."""
        now = torch.cuda.memory_allocated(self.device)
        self.rises.append((self.highest.read() - self.before, now - self.before))

    def close(self) -> None:
        """All is read."""


def survey_of(args: Iterable[Any], then: Callable[[], object], *, is_missed: bool = False) -> Survey | None:
    """A survey on the device of ``args``, or None where none is possible now.

    ``is_missed``: something is outside, and no survey has found how much.
    """
    device = next((t.device for t in tensors(list(args)) if t.is_cuda), None)
    if device is not None:
        return Survey(CudaMeter(device), then)
    if compat.rank_store() is not None:
        _say_unwatched()
        return None
    was_taken, _Profiler.was_taken = _Profiler.was_taken, False
    is_main = threading.current_thread() is threading.main_thread()  # profiles of several threads meet
    return Survey(CpuMeter(then, is_missed=is_missed), then) if is_main and not was_taken else None


@functools.cache
def _say_unwatched() -> None:
    """A transfer that is under way when a profile ends writes its own end to memory that is gone."""
    log.warning(UNWATCHED)


@functools.cache
def _say_profiled() -> None:
    """There is one profile at a time, and this one is the user's; allocations are read when it ends."""
    log.warning(PROFILED)
