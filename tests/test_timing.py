"""Costs as measured: each distinct op once, what matters first, kept for the next process, never trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rematc
from rematc.costs import Call, Table, made_up, table, time_ops, timing
from rematc.costs.roofline import is_free
from rematc.costs.stopwatch import cuda_ns
from rematc.costs.workspace import Taken, taken
from rematc.options import Options
from rematc.pose import pose
from tests.damaged import read_damaged, saying
from tests.joints import joint_of
from tests.test_costs import RATES, leaf, ops_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CPU = torch.device("cpu")
aten = torch.ops.aten
SMALL, LARGE = (
    Call(aten.exp.default, (torch.ones(8),), {}),
    Call(aten.exp.default, (torch.ones(1 << 20),), {}),
)


def test_a_large_op_takes_longer_than_a_small_one() -> None:
    found = timing.timings([(SMALL, 0), (LARGE, 0)], 60.0)
    assert 0 < found[SMALL.key] < found[LARGE.key]


def test_what_has_effects_refuses_or_would_take_too_long_is_left_to_the_roofline() -> None:
    indices = torch.zeros(3, dtype=torch.long)
    refused = Call(aten.mm.default, (indices, torch.ones(3, 3)), {})
    too_slow = Call(aten.sin.default, (torch.ones(8),), {})
    expected = [(refused, 0), (too_slow, 10**12), (Call(print, (), {}), 0), (SMALL, 0)]
    assert list(timing.timings(expected, 60.0)) == [SMALL.key]


def test_what_there_is_no_room_for_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up, "_free_bytes", lambda device: 4 << 20)
    with pytest.raises(MemoryError, match=r"its arguments take 0.0 GB on cpu"):
        made_up.check_room(LARGE)
    assert list(timing.timings([(LARGE, 0), (SMALL, 0)], 60.0)) == [SMALL.key]
    assert taken([LARGE, SMALL]) == {LARGE.key: Taken(0, 0), SMALL.key: Taken(0, 32, (((8,), (1,)),))}


def test_nothing_is_timed_when_the_time_is_up() -> None:
    assert timing.timings([(SMALL, 0)], 0.0) == {}


def test_timing_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    assert timing.timings([(Call(aten.native_dropout.default, (torch.ones(9), 0.5, True), {}), 0)], 60.0)
    assert torch.equal(torch.get_rng_state(), before)


class Event:
    """Of a GPU on which each run takes 10,000 ns, and to launch the first of some another 90,000."""

    runs = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ns = Event.runs * 10_000

    def elapsed_time(self, other: Event) -> float:
        return (other.at_ns - self.at_ns + 90_000) / 1e6


def test_on_a_gpu_an_op_is_timed_in_a_row_or_its_launch_would_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        Event.runs += 1

    monkeypatch.setattr(Event, "runs", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(device))
    assert cuda_ns(run, torch.device("cuda", 0)) == pytest.approx(10_000 + 90_000 / 10)
    assert Event.runs == 1 + 10


Timed = list[tuple[Hashable, int]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """The calls that were timed, and what they were expected to take; each is said to take 77 ns."""
    seen: Timed = []

    def timings(calls: Iterable[tuple[Call, int]], limit_s: float) -> dict[Hashable, int]:
        new = [(call.key, expected_ns) for call, expected_ns in calls] if limit_s else []
        seen.extend(new)
        return {key: 77 for key, _ in new}

    monkeypatch.setattr(table, "timings", timings)
    return seen


def model(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(5):
        x = (x @ w).relu()
    return (x + 1).exp().sum()


def test_each_distinct_op_is_timed_once_and_what_takes_most_in_all_comes_first(timed: Timed) -> None:
    nodes = ops_of(model, leaf(64, 64), leaf(64, 64))
    time_ops(nodes, RATES, Table(CPU, None), 1.0)
    keys = [Call.of(n).key for n in nodes if not is_free(n)]
    assert sorted(map(str, {k for k, _ in timed})) == sorted(map(str, set(keys)))
    in_all = [keys.count(key) * ns for key, ns in timed]
    assert in_all == sorted(in_all, reverse=True)
    assert len(timed) == len(set(keys)) < len(keys)


def test_figures_are_kept_and_another_process_adds_to_them(tmp_path: Path, timed: Timed) -> None:
    first, second = Table(CPU, tmp_path), Table(CPU, tmp_path)
    first.times([(SMALL, 1)], 1.0)
    second.times([(LARGE, 1)], 1.0)  # it does not know of the other's figure, and keeps it
    assert Table(CPU, tmp_path).times([(SMALL, 1), (LARGE, 1)], 1.0) == {SMALL.key: 77, LARGE.key: 77}
    assert len(timed) == 2
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("costs-cpu-")


def test_what_another_process_measured_since_is_not_measured_again(tmp_path: Path, timed: Timed) -> None:
    first, second = Table(CPU, tmp_path), Table(CPU, tmp_path)
    first.times([(SMALL, 1)], 1.0)
    assert second.times([(SMALL, 1), (LARGE, 1)], 1.0) == {SMALL.key: 77, LARGE.key: 77}
    assert len(timed) == 2


def test_workspaces_are_kept_beside_times(tmp_path: Path, timed: Timed) -> None:
    call = Call(aten.logsumexp.default, (torch.ones(4), [0]), {})
    Table(CPU, tmp_path).times([(call, 1)], 1.0)
    assert Table(CPU, tmp_path).taken([call]) == {call.key: Taken(20, 4, (((), ()),))}
    again = Table(CPU, tmp_path)
    assert again.times([(call, 1)], 1.0) == {call.key: 77}
    assert again.taken([call]) == {call.key: Taken(20, 4, (((), ()),))}
    assert len(timed) == 1


WRONG: dict[str, dict[str, object]] = {
    "a list": {"runtime_ns": [1]},
    "no workspaces": {"workspace_bytes": None},
    "no results": {"result_bytes": None},
    "below zero": {"runtime_ns": {"an op": -1}},
    "infinite": {"runtime_ns": {"an op": math.inf}},
    "text": {"runtime_ns": {"an op": "77"}},
    "true": {"workspace_bytes": {"an op": True}},
    "no layouts": {"layouts": None},
    "a number for layouts": {"layouts": {"an op": 1}},
    "a layout of nothing": {"layouts": {"an op": [[]]}},
    "a shape alone": {"layouts": {"an op": [[[2]]]}},
    "fewer strides": {"layouts": {"an op": [[[2, 2], [1]]]}},
    "a stride below zero": {"layouts": {"an op": [[[2], [-1]]]}},
    "text for strides": {"layouts": {"an op": [[[2], "1"]]}},
}


def test_figures_of_a_user_s_op_are_for_this_process_alone(tmp_path: Path) -> None:
    """It is pure, so it may be run to find out; but its code may be another tomorrow."""

    @rematc.pure
    @torch.library.custom_op("test_timing::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return (x.sin() + x).clone()

    call = Call(torch.ops.test_timing.twice.default, (torch.ones(4),), {})
    assert Table(CPU, tmp_path).taken([call]) == {call.key: Taken(16, 16, (((4,), (1,)),))}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", WRONG)
def test_figures_that_are_none_are_measured_again(
    wrong: str, tmp_path: Path, timed: Timed, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> dict[Hashable, int]:
        return Table(CPU, tmp_path).times([(SMALL, 1)], 1.0)

    read()
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert read_damaged(path, saying(lambda data: data.update(WRONG[wrong])), read, caplog) == {SMALL.key: 77}
    assert len(timed) == 2
    assert path.read_text() == text  # and it is whole again


# What a plan is made of


def costs_of(options: Options, fn: Callable[..., Any] = model) -> dict[str, int]:
    joint, outputs = joint_of(fn, leaf(64, 64), leaf(64, 64), inductor_ops=options.inner == "inductor")
    problem = pose(joint, outputs, options)[1]
    return {op.name: c.runtime_ns for op, c in zip(problem.graph.ops, problem.costs, strict=True)}


def test_what_may_be_recomputed_costs_what_was_measured(
    timed: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMATC_CACHE_DIR", str(tmp_path))
    costs = costs_of(Options(None, "eager"))
    assert costs["mm"] == costs["relu_1"] == costs["exp"] == 77
    assert costs["mm_5"] != 77  # a gradient: it runs once, whatever it takes
    by_roofline = costs_of(Options(None, "eager", costs="roofline"))
    assert by_roofline["mm"] != 77 and by_roofline["mm_5"] == costs["mm_5"]


def test_under_inductor_ready_made_kernels_cost_what_was_measured(
    timed: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMATC_CACHE_DIR", str(tmp_path))
    costs = costs_of(Options(None))
    assert costs["mm"] == 77
    assert costs["relu_1"] > 77
    assert {str(key[0]) for key, _ in timed if isinstance(key, tuple)} == {"aten.mm.default"}


def test_without_time_nothing_is_measured(
    timed: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMATC_CACHE_DIR", str(tmp_path))
    assert costs_of(Options(None, "eager", measure_s=0)) == costs_of(Options(None, "eager", costs="roofline"))
    assert not timed


def test_without_time_what_is_known_is_used(
    timed: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMATC_CACHE_DIR", str(tmp_path))
    measured = costs_of(Options(None, "eager"))
    monkeypatch.setattr(table, "timings", timing.timings)
    assert costs_of(Options(None, "eager", measure_s=0)) == measured
