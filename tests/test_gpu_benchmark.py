"""The benchmark for GPUs, as far as a CPU can tell: its models, its clock, what it makes of its numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rematc
from benchmarks import gpu
from benchmarks.gpu_board import Board
from benchmarks.gpu_cells import Cell
from benchmarks.gpu_models import MODELS, Segment, Training, built, sqrt_of
from benchmarks.gpu_rows import FREE, Row, claims, table
from benchmarks.gpu_turns import Clock, Turns
from rematc import options

CPU = torch.device("cpu")
BASE = Row("m", FREE, 100, measured_bytes=1100, seconds=2.0)
OURS = Row("m", "rematc, 60%", 100, 700, 690, 680, seconds=3.0, solve_s=1.0)
TORCHS = Row("m", "torch's budget 0.0", 100, measured_bytes=900)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def gradients(training: Training) -> list[torch.Tensor]:
    torch.manual_seed(0)
    training.loss(training.model(**training.inputs)).backward()
    found = [p.grad for p in training.model.parameters() if p.grad is not None]
    training.model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_a_model_has_the_same_gradients_and_then_it_is_as_it_was(name: str) -> None:
    training = built(name, CPU, large=False)
    before, names = gradients(training), [n for n, _ in training.model.named_modules()]
    for segment in (1, sqrt_of(training.layers)):
        expected = sum(-(-len(chain) // segment) for chain in training.chains)
        expected += sum(map(len, training.blocks))
        with training.checkpointed(segment):
            segments = [m for m in training.model.modules() if isinstance(m, Segment)]
            assert len(segments) == expected > 0
            after = gradients(training)
        torch.testing.assert_close(after, before)
    assert [n for n, _ in training.model.named_modules()] == names


def test_each_model_has_its_share_of_the_time_and_no_cell_begins_that_would_outlast_it() -> None:
    now = 0.0
    clock = Clock(10, 2, lambda: now)
    clock.begin_model()
    clock.ran(200)
    now = 99.0
    assert clock.has_time()
    now = 101.0
    assert not clock.has_time()
    clock.begin_model()
    assert clock.has_time() and clock.model_end == 600


def test_claims_are_of_what_ran_and_notice_each_fault() -> None:
    skipped = replace(OURS, predicted_bytes=None, measured_bytes=None, note="not run: no time left")
    good = claims([BASE, OURS, TORCHS, skipped])
    assert [c["holds"] for c in good] == [True] * 4
    assert good[-1]["measured"] == 580 / 800
    timed = claims([BASE, OURS, replace(TORCHS, seconds=2.5), replace(TORCHS, measured_bytes=600, seconds=9)])
    assert timed[-1]["measured"] == 3.0 / 2.5 and not timed[-1]["holds"]
    assert not OURS.over and replace(OURS, measured_bytes=701).over
    assert [c["holds"] for c in claims([replace(OURS, measured_bytes=701)])] == [False, False, True]
    assert claims([BASE]) == []


def test_the_table_says_what_was_not_run() -> None:
    text = table([BASE, OURS, replace(TORCHS, measured_bytes=None, note="not run: no time left")])
    assert "1.50x" in text and "not run: no time left" in text


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")  # torch's, where its caches are off
def test_it_runs_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cells(_: Training) -> Iterator[Cell]:
        yield Cell(FREE, lambda _: "eager")

        def ours(budget: int) -> rematc.Backend:
            return rematc.backend(budget, inner="eager", time_limit_s=1, measure_s=1)

        yield Cell("rematc, 60%", ours, FREE, 0.6)
        yield Cell("rematc, less", ours, FREE, -1.8)
        yield Cell("checkpoint every layer", lambda _: "aot_eager", segment=1)

    monkeypatch.setattr(gpu, "cells", cells)
    monkeypatch.setattr(gpu, "gpu_tests", lambda: (0, "1 skipped"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(options, "LIMIT_S", (1.0, 0.0, 1.0))
    file = tmp_path / "gpu.json"
    assert gpu.main(["--names", "llama-1b", "--minutes", "5", "--json", str(file)]) == 0
    free, ours, refused, each = json.loads(file.read_text())["rows"]
    assert ours["measured_bytes"] <= ours["predicted_bytes"] <= ours["budget_bytes"]
    assert each["measured_bytes"] < free["measured_bytes"]
    assert refused["note"].startswith("refused: needs")
    assert "No budget exceeded." in capsys.readouterr().out
    assert gpu.main(["--names", "llama-1b", "--minutes", "0"]) == 0
    assert capsys.readouterr().out.count("not run: no time left") == 6  # three, each said twice


def test_the_most_telling_comes_first() -> None:
    training = Training(torch.nn.Linear(1, 1), {}, lambda out: out, chains=(torch.nn.ModuleList(),))
    names = [cell.name for cell in gpu.cells(training)]
    assert names[0] == FREE and len(names) == 10
    assert sum(name.startswith("rematc") for name in names) == 5
    assert len(list(gpu.cells(replace(training, chains=())))) == 9


def test_processes_share_the_cells_and_budgets_wait_for_the_peak_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(row: Row, *_: object) -> None:
        row.measured_bytes = {FREE: 1_000_000, "torch's budget 0.0": None}.get(row.name, 400_000)

    training = Training(torch.nn.Linear(1, 1), {}, lambda out: out, least=0.5)
    ours, other = (
        gpu.rows_of("m", training, CPU, Clock(60, 1), Turns(None), Board(tmp_path, "m")) for _ in range(2)
    )
    monkeypatch.setattr(gpu, "_fill", fill)
    first, second = next(ours), next(other)
    assert (first.name, second.name) == (FREE, "torch's budget 0.5")
    rows = {row.name: row for row in [first, second, *ours]}
    assert list(other) == []
    assert list(rows) == [cell.name for cell in gpu.cells(training)]
    assert rows["rematc, as torch's budget 0.5"].budget_bytes == 400_000
    assert rows["rematc, as torch's budget 0.0"].note == "not run: torch's budget 0.0 failed"
    resident = first.resident_bytes
    assert rows["rematc, 50%"].budget_bytes == int(resident + 0.75 * (1_000_000 - resident))


def test_who_waits_for_a_peak_in_vain_says_that_there_was_no_time(tmp_path: Path) -> None:
    training, board = Training(torch.nn.Linear(1, 1), {}, lambda out: out), Board(tmp_path, "m")
    assert board.takes(FREE)  # and whoever did never says what it took
    rows = list(gpu.rows_of("m", training, CPU, Clock(0, 1), Turns(None), board))
    assert len(rows) == 8 and {row.note for row in rows} == {gpu.NO_TIME}


def test_the_rows_of_several_processes_are_put_in_order() -> None:
    names = ["rematc, 20%", "the rest", "rematc, 50%", "torch's budget 0.5", FREE]
    rows = [Row("m", name, 0, int(name[-3:-1]) if name.endswith("%") else None) for name in names]
    assert [row.name for row in sorted(rows, key=gpu._in_the_table)] == [
        FREE, "torch's budget 0.5", "rematc, 50%", "rematc, 20%", "the rest",
    ]  # fmt: skip


def test_a_process_that_fails_is_told_from_one_that_had_no_time() -> None:
    def ended(code: str, seconds: float) -> str:
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
            return gpu._ended(process, time.monotonic() + seconds)

    assert ended("", 60) == ended(f"exit({gpu.OVER})", 60) == ""
    assert ended("exit(1)", 60) == "failed: exit status 1"
    assert ended("input()", 0) == "not run: no time left"
