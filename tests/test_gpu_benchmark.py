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
from benchmarks.gpu import Cell
from benchmarks.gpu_models import MODELS, Segment, Training, built, sqrt_of
from benchmarks.gpu_rows import FREE, Row, claims, table
from benchmarks.gpu_turns import Clock
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
        yield Cell(
            "rematc, 60%", lambda b: rematc.backend(b, inner="eager", time_limit_s=1, measure_s=1), 0.6
        )
        yield Cell(
            "rematc, less", lambda b: rematc.backend(b, inner="eager", time_limit_s=1, measure_s=1), -1.8
        )
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
    assert names[0] == FREE and names[1].startswith("rematc") and len(names) == 10
    assert sum(name.startswith("rematc") for name in names) == 5
    assert len(list(gpu.cells(replace(training, chains=())))) == 9


def test_a_process_that_fails_is_told_from_one_that_had_no_time() -> None:
    def ended(code: str, seconds: float) -> str:
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
            return gpu._ended(process, time.monotonic() + seconds)

    assert ended("", 60) == ended(f"exit({gpu.OVER})", 60) == ""
    assert ended("exit(1)", 60) == "failed: exit status 1"
    assert ended("input()", 0) == "not run: no time left"
