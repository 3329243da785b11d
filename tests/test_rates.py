"""The rates of a device: measured once, in the room that there is, and kept."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rematc
from rematc import target
from rematc.compiled import ALONE, Given
from rematc.costs import Rates, rates, rates_of
from rematc.costs.rates import calibrate
from rematc.measure import measure
from rematc.options import Options
from tests.damaged import read_damaged, saying
from tests.test_fuse import joint_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CPU = torch.device("cpu")
RATES = Rates(1e10, 5e9, 2e9, 6e9, 4e9, 1e9, 1e11, 8e10, 6e10, 5000, {"bfloat16": 2.0})


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were measured, in order; nothing is really measured."""
    seen: list[torch.device] = []

    def calibrate(device: torch.device, _: object) -> Rates:
        seen.append(device)
        return RATES

    monkeypatch.setattr(rates, "calibrate", calibrate)
    return seen


def test_rates_are_measured_once_and_kept(tmp_path: Path, calibrations: list[torch.device]) -> None:
    folder = tmp_path / "new" / "cache"
    assert [rates_of(CPU, folder) for _ in range(3)] == [RATES] * 3
    assert calibrations == [CPU]
    (kept,) = folder.iterdir()  # no temporary file is left
    assert kept.name.startswith("rates-cpu-")
    assert torch.__version__.replace("+", "-") in kept.name


def test_rates_are_measured_in_the_room_that_there_is_and_then_kept_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of the first process took 16 MB for that, whatever the budget."""
    monkeypatch.setattr(rates, "calibrate", calibrate)
    for room, name in ((3_000_000, "-256.json"), (1_000, "-128.json"), (math.inf, "cpu.json")):
        before = {*tmp_path.iterdir()}
        measured = measure(lambda room=room: rates_of(CPU, tmp_path, room), device="cpu")
        (kept,) = {*tmp_path.iterdir()} - before
        assert kept.name.endswith(name)
        assert measured.peak_bytes < max(room, 1_000_000)
    assert rates_of(CPU, tmp_path, 1_000) == rates_of(CPU, tmp_path)  # the best that there are


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_all_that_the_first_compile_takes_is_within_the_budget(
    inner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMATC_CACHE_DIR", str(tmp_path))  # nothing is known of the device
    monkeypatch.setattr(rates, "calibrate", calibrate)
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(4096, 64)
    resident = x.nbytes + sum(p.nbytes for p in model.parameters())
    run = torch.compile(lambda x: model(x).square().mean(), backend=rematc.backend("6MB", inner=inner))
    assert resident + measure(lambda: run(x).backward()).peak_bytes <= 6_000_000


def test_what_other_graphs_keep_is_no_room_to_measure_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = list[float]()

    def rates_in(device: torch.device, folder: Path, room_bytes: float) -> Rates:
        rooms.append(room_bytes)
        return RATES

    monkeypatch.setattr(target, "rates_of", rates_in)
    x = torch.randn(1000, requires_grad=True)
    joint, _ = joint_of(torch.sin, x)
    for given in (
        ALONE,
        Given(others_bytes=2000),
        Given(resident_bytes=9000),
        Given(resident_bytes=0),
        Given(budget_bytes=20_000, others_bytes=2000),
    ):
        target.target_of(joint, Options(10_000, "eager", reserve=500), tmp_path, given)
    assert rooms == [5500, 3500, 1000, 10_000, 13_500]


WRONG = {
    "rates are a list": lambda rates: [1],
    "a field is missing": lambda rates: {name: rate for name, rate in rates.items() if name != "matmul"},
    "zero": lambda rates: {**rates, "stream": 0},
    "infinite": lambda rates: {**rates, "stream": math.inf},
    "not a number": lambda rates: {**rates, "stream": math.nan},
    "true": lambda rates: {**rates, "stream": True},
    "text": lambda rates: {**rates, "stream": "fast"},
    "a dtype is below zero": lambda rates: {**rates, "faster": {"bfloat16": -1.0}},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_rates_that_are_none_are_measured_again(
    wrong: str, tmp_path: Path, calibrations: list[torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    rates_of(CPU, tmp_path)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    damage = saying(lambda data: data.update(rates=WRONG[wrong](data["rates"])))
    assert read_damaged(path, damage, lambda: rates_of(CPU, tmp_path), caplog) == RATES
    assert len(calibrations) == 2
    assert path.read_text() == text  # and it is whole again


def test_a_folder_that_can_t_be_used_is_no_reason_to_fail(
    tmp_path: Path, calibrations: list[torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("")
    assert rates_of(CPU, tmp_path / "cache") == RATES
    assert "nothing is kept for the next time" in caplog.text


def test_no_folder_keeps_nothing(calibrations: list[torch.device]) -> None:
    assert rates_of(CPU, None) == rates_of(CPU, None) == RATES
    assert len(calibrations) == 2


def test_calibration_gives_rates_above_zero() -> None:
    *found, faster = astuple(calibrate(CPU, rates._ON_A_CPU))
    assert all(rate > 0 for rate in (*found, *faster.values()))
    assert set(faster) == {"bfloat16", "float16"}


def test_what_is_slow_while_another_process_has_the_core_is_not_its_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def run() -> None:
        nonlocal now
        now += 0.004 if now < 0.08 else 0.0002  # twenty slow runs in a row

    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert rates._seconds(run, CPU) == pytest.approx(0.0002)


def test_of_processes_that_begin_at_once_all_use_what_the_first_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def calibrate(*_: object) -> Rates:
        monkeypatch.setattr(rates, "calibrate", lambda *_: RATES)
        rates_of(CPU, tmp_path)  # another process, while this one measures
        return replace(RATES, matmul=2 * RATES.matmul)

    monkeypatch.setattr(rates, "calibrate", calibrate)
    assert rates_of(CPU, tmp_path) == RATES
