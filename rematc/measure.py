"""What one step really takes: the peak of the allocator, and the time. The judge of every plan.

On the CPU the allocator tells the profiler of each allocation and each free, with its address. It
does so only for the threads that the profiler follows: the caller's, where autograd's backward
pass on the CPU runs too. What a thread of gloo's lets go of counts until its address is given out
again, so a rank's step may measure higher than it is. The allocator knows the size of a block only
if it saw it allocated, so frees of older blocks do not count here: a step that drops gradients from
before it measures higher than it is. Measure with gradients None, or with ``warmup=1``, which has
the profiler see them made. Scratch memory that a library takes past the allocator (oneDNN, MKL) is
in no figure.

On CUDA the caching allocator counts for itself, in blocks of 512 bytes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from rematc import compat
from rematc.allocations import FORWARD, Span, backward_passes, mark, memory_profile, spans, timeline
from rematc.highest import Highest
from rematc.meters import give_way

UPDATE = "update"

Phases = list[tuple[str, Span]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One step, as measured.

    ``peak_bytes`` is the highest that the allocator's live bytes rose above what was live when the
    step began, ``end_bytes`` what was live at its end, its result included, less the same.
    ``duration_ns`` is the time of the measured step: on the CPU the profiler adds about
    a microsecond for each op, so compare it only with steps that were measured too.

    ``phases`` has the peak of each phase, above the same: "forward" (all that is outside of a backward pass
    and before one), "backward", and "update" (what follows the last one). ``resident_bytes`` was live when
    the step began: on CUDA what the allocator says, on the CPU the tensors that Python knows; None if nobody
    asked. ``reserved_bytes`` is the most that CUDA's allocator held of the device, None on the CPU.

    >>> Measurement(peak_bytes=3000, end_bytes=500, duration_ns=81_000).peak_bytes
    3000
    """

    peak_bytes: int
    end_bytes: int
    duration_ns: int
    phases: Mapping[str, int] = field(default_factory=dict)
    resident_bytes: int | None = None
    reserved_bytes: int | None = None


def measure(
    step: Callable[[], object], *, device: torch.device | str | None = None, warmup: int = 0
) -> Measurement:
    """Run ``step()`` once, after ``warmup`` runs that do not count, and return what it took.

    A step that is compiled by its first run takes then what compiling takes, too: with ``warmup=1`` that does
    not count. ``device`` says whose allocator is read; None is CUDA where it is in use, else the CPU. What
    ``step`` returns is held until all is read, so it counts in ``end_bytes``. Garbage is collected
    beforehand, so that the frees of an earlier step do not fall into this one.

    >>> def step():
    ...     a = torch.empty(1000, dtype=torch.uint8)
    ...     b = torch.empty(2000, dtype=torch.uint8)
    ...     del a
    ...     return torch.empty(500, dtype=torch.uint8)
    >>> m = measure(step, device="cpu")
    >>> m.peak_bytes, m.end_bytes, m.phases
    (3000, 500, {'forward': 3000})
    """
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    device = torch.device(device)
    match device.type:
        case "cpu":
            return _measure_cpu(step, warmup)
        case "cuda":
            return _measure_cuda(step, warmup, device)
        case other:
            raise ValueError(f"can't measure memory on {other!r}; device must be 'cpu' or 'cuda'")


def measure_each(prepare: Iterable[Callable[[], Callable[[], object]]]) -> list[Measurement]:
    """Measure many short CPU steps in one profile: starting and reading one takes some 0.1 s.

    Each of ``prepare`` returns the step that is to be measured; what it does itself does not count.

    >>> def prepare():
    ...     x = torch.ones(10)
    ...     return lambda: x.double().abs()
    >>> [(m.peak_bytes, m.end_bytes) for m in measure_each([prepare, prepare])]
    [(160, 80), (160, 80)]
    """
    marks = _Marks()
    durations_ns = []
    give_way()
    with memory_profile() as prof:
        for make in prepare:
            step = make()
            marks.begin(FORWARD)
            start_ns = time.perf_counter_ns()
            with backward_passes(marks.begin):
                result = step()
            durations_ns.append(time.perf_counter_ns() - start_ns)
            marks.begin(None)
            del result, step
    steps = marks.steps(spans(timeline(prof))[1:])  # nothing is measured before the first mark
    return [_measurement(phases, ns) for phases, ns in zip(steps, durations_ns, strict=True)]


def _measurement(phases: Phases, duration_ns: int, **more: int) -> Measurement:
    """The spans of one step, one after the other, as one."""
    peaks: dict[str, int] = {}
    live = 0
    for n, (name, (peak, end)) in enumerate(phases):
        is_last = n > 0 and n == len(phases) - 1 and name == FORWARD
        name = UPDATE if is_last else name
        peaks[name] = max(peaks.get(name, 0), live + peak)
        live += end
    return Measurement(max(peaks.values()), live, duration_ns, peaks, **more)


def _measure_cpu(step: Callable[[], object], warmup: int) -> Measurement:
    resident = 0
    for _ in range(warmup - 1):
        step()

    def prepare() -> Callable[[], object]:
        nonlocal resident
        if warmup:  # what it leaves, and the step frees, has to be seen
            step()
        gc.collect()
        resident = _known_bytes()
        return step

    (measured,) = measure_each([prepare])
    return replace(measured, resident_bytes=resident)


def _known_bytes() -> int:
    """Bytes of the CPU tensors that Python knows, each storage once."""
    storages = {}
    for t in [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]:
        with suppress(RuntimeError):  # some have no storage to speak of: sparse ones, those of a transform
            if t.device.type == "cpu" and not compat.is_fake(t):
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(storages.values())


def _measure_cuda(step: Callable[[], object], warmup: int, device: torch.device) -> Measurement:
    for _ in range(warmup):
        step()
    gc.collect()
    torch.cuda.synchronize(device)
    resident = before = torch.cuda.memory_allocated(device)
    highest = Highest(device)
    phases: Phases = []
    name = FORWARD
    reserved = 0

    def begin(next_name: str | None) -> None:
        nonlocal name, before, reserved
        torch.cuda.synchronize(device)
        peak, now = highest.read(), torch.cuda.memory_allocated(device)
        phases.append((name, (peak - before, now - before)))
        reserved = max(reserved, torch.cuda.max_memory_reserved(device))
        highest.begin_anew()
        name, before = next_name or FORWARD, now

    with backward_passes(begin):
        start_ns = time.perf_counter_ns()
        result = step()
        torch.cuda.synchronize(device)
        duration_ns = time.perf_counter_ns() - start_ns
        begin(None)
    del result
    return _measurement(phases, duration_ns, resident_bytes=resident, reserved_bytes=reserved)


class _Marks:
    """Marks on the profiler's clock, and the phase that begins at each (None: no step is measured)."""

    def __init__(self) -> None:
        self.names: list[str | None] = []

    def begin(self, name: str | None) -> None:
        """A phase begins, and the one before it ends."""
        mark()
        self.names.append(name)

    def steps(self, spans: Iterable[Span]) -> list[Phases]:
        """The phases of each step, given the spans from mark to mark."""
        steps: list[Phases] = []
        apart = True
        for name, span in zip(self.names[:-1], spans, strict=True):
            if apart:
                steps.append([])
            apart = name is None
            if name is not None:
                steps[-1].append((name, span))
        return steps
