"""`python -m benchmarks.gpu`: on a machine with a GPU, everything that is claimed of one, in ten minutes.

The tests that need a GPU, and then five models, each without limit, checkpointed, under torch's own budget
and under five of rematc's: three between the least that a plan needs and no limit, two at what torch's own
took. Compiling takes most of the time, so each model has processes of its own, about as many as there are
cores; what is measured or timed on the GPU, one does while the others wait. The most telling runs first, and
what does not fit is left out. Without a GPU the same runs on the CPU, small and one after the other, so that
it is known to work.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

import rematc
from benchmarks.gpu_board import Board
from benchmarks.gpu_cells import Cell, cells
from benchmarks.gpu_models import MODELS, Training, built
from benchmarks.gpu_rows import FREE, Row, claims, size_of, table
from benchmarks.gpu_turns import Clock, Turns
from benchmarks.machine import nothing_kept, write_results
from benchmarks.models import resident_bytes
from rematc.errors import format_bytes

ROUNDS = 5
WARMUP = 3  # a first step compiles, a second may share the budget among several graphs
FAILED, OVER = "failed", 3  # a note, and an exit status: argparse has 2
NO_TIME = "not run: no time left"
GRACE_S = 10.0  # for a cell that began in time
POLL_S = 0.5
MOST = 2  # processes of a model: each has the weights on the GPU


def rows_of(
    model: str, training: Training, device: torch.device, clock: Clock, turns: Turns, board: Board
) -> Iterator[Row]:
    """Cells of one model that nobody else runs, or a row that says that there was no time for it."""
    resident = resident_bytes(training.model, training.inputs.values())
    left = list(cells(training))
    while left:
        ready = [cell for cell in left if cell.base is None or board.has_ended(cell.base)]
        if not ready and clock.has_time():
            time.sleep(POLL_S)
            continue
        cell = (ready or left)[0]
        left.remove(cell)
        if not board.takes(cell.name):
            continue
        row = Row(model, cell.name, resident)
        limit = _limit(cell.base, board, device) if cell in ready else None
        if cell.name != FREE and not clock.has_time():
            row.note = NO_TIME
        elif cell.base is not None and limit is None:
            row.note = f"not run: {cell.base} failed"
        else:
            row.budget_bytes = limit and cell.budget(training, resident, limit)
            started, waited_s, had_s = clock.now(), turns.waited_s, turns.had_s
            _fill(row, cell, training, device, turns)
            clock.ran(clock.now() - started)
            row.waited_s, row.had_s = turns.waited_s - waited_s, turns.had_s - had_s
        board.ended(cell.name, row.measured_bytes)
        yield row


def _limit(base: str | None, board: Board, device: torch.device) -> int | None:
    """What the cell ``base`` took; where the step without limit ran out of memory, all that there is."""
    took = None if base is None else board.peak(base)
    return _memory(device) if base == FREE and took is None else took


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


def each_in_processes(names: Sequence[str], minutes: float, each: int) -> list[Row]:
    """The rows of all models, each run by ``each`` processes, which say by themselves what they found."""
    cores = os.cpu_count() or 1
    threads = max(1, cores // (each * len(names)))
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(name, Path(folder) / f"{name}-{n}.json") for n in range(each) for name in names]
        run = [sys.executable, "-m", "benchmarks.gpu", "--no-tests", "--minutes", str(minutes)]
        running = [
            subprocess.Popen([*run, "--board", folder, "--names", name, "--json", str(file)], env=env)
            for name, file in jobs
        ]
        end = time.monotonic() + 60 * minutes + GRACE_S
        ended = [_ended(process, end) for process in running]
        found = [json.loads(file.read_text())["rows"] if file.exists() else [] for _, file in jobs]
    notes = dict.fromkeys((name, note) for (name, _), note in zip(jobs, ended, strict=True) if note)
    rows = [Row(**row) for of_one in found for row in of_one]
    rows += [Row(name, "the rest", 0, note=note) for name, note in notes]
    return sorted(rows, key=lambda row: (names.index(row.model), *_in_the_table(row)))


def _in_the_table(row: Row) -> tuple[bool, bool, bool, int]:
    """Without limit, the rivals, and ours from the largest budget on."""
    return row.name == "the rest", row.name != FREE, row.name.startswith("rematc"), -(row.budget_bytes or 0)


def _ended(process: subprocess.Popen[bytes], end: float) -> str:
    """Why a process has not run all of its cells; "" if it has."""
    try:
        status = process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:  # what it has by then is in its file
        process.kill()
        process.wait()
        return NO_TIME
    return "" if status in (0, OVER) else f"{FAILED}: exit status {status}"


def each_after_the_other(
    names: Sequence[str], minutes: float, board: Path | None, json: Path | None
) -> list[Row]:
    """The rows of all models; what is known by now is written after each.

    Processes with the same ``board``, a folder, share the cells, the GPU, and what rematc measures of ops.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock, rows = Clock(minutes, len(names)), list[Row]()
    turns = Turns(None if board is None else board / "turns")
    with nothing_kept(board) as folder, turns.for_costs():
        for model in names:
            clock.begin_model()
            training = built(model, device, large=device.type == "cuda")
            for row in rows_of(model, training, device, clock, turns, Board(folder, model)):
                rows.append(row)
                print(f"{row.model}, {row.name}: {row.note or size_of(row.measured_bytes)}", flush=True)
                _write(json, rows)
    return rows


def _by_cores(models: int) -> int:
    return max(1, min(MOST, (os.cpu_count() or 1) // models))


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
    parser.add_argument("--processes", type=int, metavar="N", help="for each model; default: by cores")
    parser.add_argument("--board", metavar="FOLDER", type=Path, help="where processes share the cells")
    args = parser.parse_args(argv)
    print(where(), flush=True)
    status, tests = (0, "left out") if args.no_tests else gpu_tests()
    print(f"tests marked gpu: {tests}", flush=True)
    each = args.processes or (_by_cores(len(args.names)) if torch.cuda.is_available() else 0)
    if args.board is None and each:
        rows = each_in_processes(args.names, args.minutes, each)
    else:
        rows = each_after_the_other(args.names, args.minutes, args.board, args.json)
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
