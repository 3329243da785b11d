"""Costs as measured: each distinct op once, what matters first, kept for the next process, never trusted."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rematc.backend import partition, pose
from rematc.cards import cards
from rematc.costs import Call, Prices, Rates, Table, made_up, rates_of_card, table, time_ops, timing
from rematc.costs.roofline import is_free
from rematc.costs.workspace import workspaces
from rematc.errors import OptionError
from rematc.options import Options
from tests.test_capture import joint_of
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
    assert workspaces([LARGE, SMALL]) == {LARGE.key: 0, SMALL.key: 0}


def test_nothing_is_timed_when_the_time_is_up() -> None:
    assert timing.timings([(SMALL, 0)], 0.0) == {}


def test_timing_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    assert timing.timings([(Call(aten.native_dropout.default, (torch.ones(9), 0.5, True), {}), 0)], 60.0)
    assert torch.equal(torch.get_rng_state(), before)


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


def test_workspaces_are_kept_beside_times(tmp_path: Path, timed: Timed) -> None:
    call = Call(aten.logsumexp.default, (torch.ones(4), [0]), {})
    Table(CPU, tmp_path).times([(call, 1)], 1.0)
    assert Table(CPU, tmp_path).workspaces([call]) == {call.key: 20}
    again = Table(CPU, tmp_path)
    assert again.times([(call, 1)], 1.0) == {call.key: 77}
    assert again.workspaces([call]) == {call.key: 20}
    assert len(timed) == 1


DAMAGE: dict[str, Callable[[str], bytes]] = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2].encode(),
    "no text": lambda text: b"\xff\xfe\x00\x80",
    "nested beyond reason": lambda text: b"[" * 100_000,
    "a list of times": lambda text: json.dumps({**json.loads(text), "runtime_ns": [1]}).encode(),
    "no workspaces": lambda text: text.replace("workspace_bytes", "workspace").encode(),
    "below zero": lambda text: text.replace("77", "-77").encode(),
    "infinite": lambda text: text.replace("77", "Infinity").encode(),
    "text": lambda text: text.replace("77", '"77"').encode(),
    "true": lambda text: text.replace("77", "true").encode(),
    "another format": lambda text: text.replace("rematc.costs/1", "rematc.costs/0").encode(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_figures_are_measured_again(
    damage: str, tmp_path: Path, timed: Timed, caplog: pytest.LogCaptureFixture
) -> None:
    Table(CPU, tmp_path).times([(SMALL, 1)], 1.0)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    path.write_bytes(DAMAGE[damage](text))
    with caplog.at_level(logging.WARNING, "rematc"):
        assert Table(CPU, tmp_path).times([(SMALL, 1)], 1.0) == {SMALL.key: 77}
    assert "not used, and written anew" in caplog.text
    assert len(timed) == 2
    assert path.read_text() == text  # and it is whole again


def test_a_file_beyond_all_measure_is_not_read(
    tmp_path: Path, timed: Timed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Table(CPU, tmp_path).times([(SMALL, 1)], 1.0)
    monkeypatch.setattr("rematc.cache.LARGEST_BYTES", 10)
    with caplog.at_level(logging.WARNING, "rematc"):
        Table(CPU, tmp_path)
    assert "more than 10 bytes" in caplog.text


def test_tables_written_at_the_same_time_stay_whole(tmp_path: Path, timed: Timed) -> None:
    calls = [Call(aten.exp.default, (torch.ones(n),), {}) for n in range(1, 9)]

    def write(call: Call) -> None:
        for _ in range(5):
            Table(CPU, tmp_path).times([(call, 1)], 1.0)

    threads = [threading.Thread(target=write, args=(call,)) for call in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())["runtime_ns"]
    assert set(kept.values()) == {77}
    assert 1 <= len(kept) <= len(calls)


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


# Cards


@pytest.mark.parametrize("name", cards())
def test_a_card_has_rates_in_the_order_that_physics_has_them(name: str) -> None:
    card = cards()[name]
    rates = rates_of_card(card)
    assert card.memory_bytes > 1e9
    assert 0.1e12 < rates.gather < rates.stream < card.bytes_per_s < 1e13
    assert rates.matmul < card.flops["float32"] <= card.flops["tf32"] < card.flops["bfloat16"]
    assert rates.times(torch.bfloat16) > 1 == rates.times(torch.float64)


def test_products_in_tf32_are_faster_where_torch_may_use_them() -> None:
    slow = rates_of_card(cards()["h100"])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert rates_of_card(cards()["h100"]).matmul == pytest.approx(slow.matmul * 494 / 67)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_plan_for_a_card_says_so_and_knows_its_memory(timed: Timed) -> None:
    joint, outputs = joint_of(model, leaf(64, 64), leaf(64, 64))
    done = partition(joint, outputs, Options("50%", "eager", costs="rtx4090"))
    assert not timed
    assert done.plan.budget_bytes == 12_000_000_000
    assert any("GeForce RTX 4090" in note for note in done.plan.notes)
    assert all(size % 512 == 0 for size in done.problem.graph.storage_bytes)


@pytest.mark.parametrize("spelling", ["H100", "h-100", "NVIDIA H100"])
def test_cards_have_names_in_any_spelling(spelling: str) -> None:
    assert Options(None, costs=spelling).costs == spelling


def test_a_card_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(OptionError, match=r"no card is called 'b300': give h200, h100"):
        Options(None, costs="b300")
    with pytest.raises(OptionError, match="measure_s=-1"):
        Options(None, measure_s=-1)


def test_a_product_in_another_dtype_is_as_much_faster() -> None:
    single, half = (
        ops_of(lambda a: (a @ a).sum(), leaf(512, 512, dtype=d)) for d in (torch.float32, torch.bfloat16)
    )
    prices = Prices(Rates(1e13, 1e13, 1e13, 1e13, 1e13, 1e9, 1e9, 1e9, 0, {"bfloat16": 4.0}))
    mm = [next(n for n in nodes if "aten.mm." in str(n.target)) for nodes in (single, half)]
    assert prices.of(mm[0]).runtime_ns == pytest.approx(4 * prices.of(mm[1]).runtime_ns)
