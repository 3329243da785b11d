"""`python -m benchmarks.gpu`: on a machine with a GPU, everything that is claimed of one, in ten minutes.

The tests that need a GPU, and then five models, each without limit, checkpointed, under torch's own budget
and under five of rematc's. Compiling takes most of the time, so each model has a process of its own; what is
measured or timed on the GPU, one does while the others wait. The most telling runs first, and what does not
fit is left out. Without a GPU the same runs on the CPU, small and one after the other, so that it is known to
work.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

import rematc
from benchmarks.gpu_models import MODELS, Training, built, sqrt_of
from benchmarks.gpu_rows import FREE, Row, claims, size_of, table
from benchmarks.gpu_turns import Clock, Turns
from benchmarks.llama import torchs_budget
from benchmarks.machine import nothing_kept, write_results
from benchmarks.models import resident_bytes
from rematc.errors import format_bytes

ROUNDS = 5
SHARES = (0.5, 0.2, 0.8, 0.35, 0.1)  # of the way from where no plan reaches to the step without limit
TORCH_S = (0.5, 0.0)
WARMUP = 3  # a first step compiles, a second may share the budget among several graphs
SOLVE_S = 10.0
FAILED, OVER = "failed", 3  # a note, and an exit status: argparse has 2
GRACE_S = 10.0  # for a cell that began in time


@dataclass
class Cell:
    """What is to be run: a backend, made once the peak without limit is known, and the model so or so."""

    name: str
    backend: Callable[[int], Any]  # of the budget of ``share``
    share: float | None = None
    segment: int | None = None


def cells(training: Training) -> Iterator[Cell]:
    """The most telling first: after the base, each rival beside one of ours."""
    ours = [Cell(f"rematc, {s:.0%}", lambda b: rematc.backend(b, time_limit_s=SOLVE_S), s) for s in SHARES]
    torchs = [Cell(f"torch's budget {x}", lambda _, x=x: torchs_budget(x, "inductor")) for x in TORCH_S]  # type: ignore[misc]
    each = Cell("checkpoint every layer", lambda _: "inductor", segment=1)
    yield Cell(FREE, lambda _: "inductor")
    yield from (ours[0], torchs[0], ours[1], each)
    if training.chains:
        yield Cell("checkpoint sqrt(L)", lambda _: "inductor", segment=sqrt_of(training.layers))
    yield from (ours[3], torchs[1], ours[2], ours[4])


def rows_of(
    model: str, training: Training, device: torch.device, clock: Clock, turns: Turns
) -> Iterator[Row]:
    """All cells of one model that there is time for; of the others a row that says so."""
    resident = resident_bytes(training.model, training.inputs.values())
    limit = _memory(device)
    for cell in cells(training):
        row = Row(model, cell.name, resident)
        if cell.share is not None:
            share = training.least + cell.share * (1 - training.least)
            row.budget_bytes = int(resident + share * (limit - resident))
        if cell.name != FREE and not clock.has_time():
            row.note = "not run: no time left"
        else:
            started = clock.now()
            _fill(row, cell, training, device, turns)
            clock.ran(clock.now() - started)
        if cell.name == FREE and row.measured_bytes is not None:
            limit = row.measured_bytes
        yield row


def _fill(row: Row, cell: Cell, training: Training, device: torch.device, turns: Turns) -> None:
    """Compile, measure and time; what fails is noted."""
    model, backend = training.model, cell.backend(row.budget_bytes or 0)
    segments: AbstractContextManager[None] = nullcontext()
    if cell.segment is not None:
        segments = training.checkpointed(cell.segment)
    with segments:
        in_turn = turns.from_the_first_run(lookup_backend(backend) if isinstance(backend, str) else backend)
        run = torch.compile(lambda **inputs: training.loss(model(**inputs)), backend=in_turn)

        def step() -> None:
            run(**training.inputs).backward()
            model.zero_grad(set_to_none=True)

        try:
            row.first_step_s, row.first_bytes = _first(step, device)
            for _ in range(WARMUP - 1):
                step()
            found = rematc.measure(step, device=device, warmup=1)
            row.seconds = seconds_of(step, device)
        except rematc.BudgetError as e:
            row.note = f"refused: needs {format_bytes(e.minimum_bytes)}"
            return
        except torch.OutOfMemoryError:
            row.note = "out of memory"
            return
        except Exception as e:
            if isinstance(backend, rematc.Backend):
                raise
            row.note = f"{FAILED}: {type(e).__name__}"  # a rival: BatchNorm in a compiled checkpoint, say
            return
        finally:
            turns.give()
            model.zero_grad(set_to_none=True)
            _forget()
    if isinstance(backend, rematc.Backend):
        row.predicted_bytes = max(plan.peak_bytes for plan in backend.plans)
        row.solve_s = sum(plan.solve_s for plan in backend.plans)
        row.resident_bytes = backend.resident_bytes
    is_cuda = device.type == "cuda"
    resident = found.resident_bytes if is_cuda and found.resident_bytes else row.resident_bytes
    row.measured_bytes, row.reserved_bytes = resident + found.peak_bytes, found.reserved_bytes


def _first(step: Callable[[], None], device: torch.device) -> tuple[float, int | None]:
    """Seconds and, on a GPU, the peak."""
    started = time.perf_counter()
    if device.type != "cuda":  # where measuring would keep compiling from its own
        step()
        return time.perf_counter() - started, None
    found = rematc.measure(step, device=device)
    return time.perf_counter() - started, (found.resident_bytes or 0) + found.peak_bytes


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
    """The median of some steps; on a GPU by its own events."""
    return statistics.median(
        (_by_events if device.type == "cuda" else _by_clock)(step) for _ in range(ROUNDS)
    )


def _by_events(step: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def _by_clock(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _memory(device: torch.device) -> int:
    """What a step may take where the one without limit runs out of memory."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).total_memory if is_cuda else 10**9


def _forget() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def gpu_tests() -> tuple[int, str]:
    """Exit status and closing line of the tests that are marked gpu."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    lines = (done.stdout.strip() or done.stderr.strip() or "pytest said nothing").splitlines()
    return done.returncode, lines[-1]


def each_in_a_process(names: Sequence[str], minutes: float) -> list[Row]:
    """The rows of all models, each in a process of its own; they say by themselves what they found."""
    cores = os.cpu_count() or 1
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores // len(names)))}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.json" for name in names]
        common = ["--no-tests", "--minutes", str(minutes), "--turns", str(Path(folder) / "turns")]
        run = [sys.executable, "-m", "benchmarks.gpu", *common]
        running = [
            subprocess.Popen([*run, "--names", name, "--json", str(file)], env=env)
            for name, file in zip(names, files, strict=True)
        ]
        end = time.monotonic() + 60 * minutes + GRACE_S
        ended = [_ended(process, end) for process in running]
        found = [json.loads(file.read_text())["rows"] if file.exists() else [] for file in files]
    rows = [Row(**row) for of_one in found for row in of_one]
    return [
        *rows,
        *(Row(name, "the rest", 0, note=note) for name, note in zip(names, ended, strict=True) if note),
    ]


def _ended(process: subprocess.Popen[bytes], end: float) -> str:
    """Why a process has not run all of its cells; "" if it has."""
    try:
        status = process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:  # what it has by then is in its file
        process.kill()
        process.wait()
        return "not run: no time left"
    return "" if status in (0, OVER) else f"{FAILED}: exit status {status}"


def each_after_the_other(names: Sequence[str], minutes: float, turns: Turns, json: Path | None) -> list[Row]:
    """The rows of all models; what is known by now is written after each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock, rows = Clock(minutes, len(names)), list[Row]()
    with nothing_kept(), turns.for_costs():
        for model in names:
            clock.begin_model()
            training = built(model, device, large=device.type == "cuda")
            for row in rows_of(model, training, device, clock, turns):
                rows.append(row)
                print(f"{row.model}, {row.name}: {row.note or size_of(row.measured_bytes)}", flush=True)
                _write(json, rows)
    return rows


def _write(path: Path | None, rows: Sequence[Row], **more: Any) -> None:
    if path is not None:
        found = {"device": where(), **more, "rounds": ROUNDS, "claims": claims(rows)}
        whole = path.with_suffix(".part")  # it may be ended while it writes
        write_results(whole, "gpu", {**found, "rows": [asdict(r) for r in rows]})
        whole.replace(path)


def where() -> str:
    """What all of this is measured on."""
    is_cuda = torch.cuda.is_available()
    return torch.cuda.get_device_name() if is_cuda else "no GPU: on the CPU, at a small size"


def main(argv: Sequence[str] | None = None) -> int:
    """Test, measure and time; 1 if a test or a process failed, 3 if a budget was exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="for the models; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    parser.add_argument("--names", nargs="*", default=list(MODELS), choices=list(MODELS), help="which models")
    parser.add_argument("--no-tests", action="store_true", help="leave the tests out")
    parser.add_argument("--turns", metavar="FILE", type=Path, help="processes with the same FILE take turns")
    args = parser.parse_args(argv)
    print(where(), flush=True)
    status, tests = (0, "left out") if args.no_tests else gpu_tests()
    print(f"tests marked gpu: {tests}", flush=True)
    if torch.cuda.is_available() and len(args.names) > 1:
        rows = each_in_a_process(args.names, args.minutes)
    else:
        rows = each_after_the_other(args.names, args.minutes, Turns(args.turns), args.json)
    _write(args.json, rows, tests=tests)
    print(f"\n{table(rows)}\n\nstep: time of one, to that without limit; median of {ROUNDS}.")
    for claim in claims(rows):
        print(f"{claim['claim']}: {claim['measured']:.3f} (goal: at most {claim['goal']:g})")
    over = [f"{r.model}, {r.name}" for r in rows if r.over]
    print("\n".join(f"FAILED: {name} took more than its budget" for name in over) or "No budget exceeded.")
    if status not in (0, 5) or any(r.name == "the rest" and r.note.startswith(FAILED) for r in rows):
        return 1
    return OVER if over else 0


if __name__ == "__main__":
    sys.exit(main())
