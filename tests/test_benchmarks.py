"""The benchmarks notice what they are there to notice, on a GPT so small that it takes seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rematc
from benchmarks import __main__ as bench
from benchmarks import demo, llama, rival
from benchmarks.machine import machine, nothing_kept, seconds_of_each, write_results
from benchmarks.models import GPTConfig, largest_difference
from rematc.cache import cache_folder

TINY = GPTConfig(layers=2, width=32, heads=2, length=32)
GOOD = demo.Row("rematc 9.0MB", 9_000_000, 8_900_000, 8_900_000, 1.1, 0.0, 2.0)
WITHOUT = demo.Row(demo.REFERENCE, None, None, 20_000_000, 1.0, 0.0, 2.0)


def test_the_machine_is_described(tmp_path: Path) -> None:
    known = machine()
    assert {"cpu", "cores", "memory_bytes", "python", "torch", "ortools", "transformers"} <= set(known)
    assert known["torch"] == torch.__version__.partition("+")[0] or known["torch"] == torch.__version__
    write_results(tmp_path / "new" / "x.json", "x", {"rows": []})
    assert json.loads((tmp_path / "new" / "x.json").read_text())["machine"]["cores"] == known["cores"]


def test_nothing_that_was_kept_before_is_found_by_a_benchmark_and_all_of_it_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REMATC_CACHE_DIR", str(tmp_path))
    with nothing_kept():
        inside = cache_folder()
        assert inside != tmp_path and inside.is_dir()
        assert torch.compiler.config.force_disable_caches
    assert cache_folder() == tmp_path and not inside.exists()
    assert not torch.compiler.config.force_disable_caches


class Logged:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def clear(self) -> None:
        pass

    def step(self) -> None:
        self.log.append(self.name)


def test_a_round_runs_each_once_in_an_order_that_rotates() -> None:
    log: list[str] = []
    taken = seconds_of_each({name: Logged(name, log) for name in "abc"}, rounds=3)
    assert "".join(log) == "abcbcacab"
    assert [len(seconds) for seconds in taken.values()] == [3, 3, 3]


def test_a_difference_is_found_wherever_it_is() -> None:
    one, nan = torch.ones(3), torch.tensor([0.0, float("nan"), 0.0])
    assert largest_difference([one, None], [one.clone(), None]) == 0
    assert largest_difference([one, one], [one, one - 2]) == 2
    assert largest_difference([one, nan], [one, one]) == float("inf")
    assert largest_difference([None, one], [one, one]) == float("inf")
    with pytest.raises(ValueError, match="zip"):
        largest_difference([one], [one, one])


def test_the_demo_s_checks_pass_good_rows_and_notice_each_fault() -> None:
    unlimited = replace(WITHOUT, measured_bytes=10**12, difference=1.0)
    assert demo.faults([WITHOUT, GOOD, unlimited]) == []
    assert demo.faults([replace(GOOD, measured_bytes=9_000_000)]) == []
    (over,) = demo.faults([WITHOUT, replace(GOOD, measured_bytes=9_000_001)])
    assert over == "rematc 9.0MB: a step took 1 bytes more than the budget of 9000000"
    (off,) = demo.faults([WITHOUT, replace(GOOD, difference=1e-9)])
    assert "a gradient differs" in off
    assert len(demo.faults([replace(GOOD, measured_bytes=10**8, difference=float("nan"))])) == 2


def test_what_the_demo_prints_is_readable_in_100_columns() -> None:
    rows = [WITHOUT, GOOD, replace(GOOD, name="sqrt(L): every 2 blocks")]
    text = "\n".join([demo.table(rows), demo.EXPLANATION])
    assert max(map(len, text.splitlines())) <= 105
    assert demo.verdict([WITHOUT, GOOD]).startswith("In plain words: 44% of the memory for 1.10x the time")
    assert [c["holds"] for c in demo.claims([GOOD])] == [True, True]
    assert [c["holds"] for c in demo.claims([replace(GOOD, measured_bytes=10**8)])] == [False, True]


def test_budgets_are_never_below_the_floor() -> None:
    assert demo.budgets(200_000_000, 60_000_000, 20_000_000) == ["150.00MB", "100.00MB", "62.00MB"]
    assert demo.budgets(100_000_000, 80_000_000, 60_000_000) == ["81.00MB"]


def test_the_demo_runs_on_a_tiny_gpt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TIME_LIMIT_S", 2.0)
    torch._dynamo.reset()
    rows = demo.run(demo.Demo(TINY, size=4), steps=3)
    assert [row.name.split()[0] for row in rows[:4]] == ["eager", "compiled", "sqrt(L):", "rematc"]
    assert all(row.predicted_bytes == row.measured_bytes for row in rows[3:])
    assert demo.faults(rows) == []
    assert all(row.time > 0 for row in rows)
    assert {row.loss for row in rows[1:]} == {rows[1].loss}
    assert rows[-1].measured_bytes < rows[1].measured_bytes
    assert "rematc refuses" in capsys.readouterr().out


def test_a_wrong_gradient_is_seen_by_the_demo_s_own_training() -> None:
    shown = demo.Demo(TINY, size=4)
    shown.add(demo.REFERENCE)
    row = shown.add("other")
    row.budget_bytes = 10**9
    with torch.no_grad():
        next(shown.variants[1].model.parameters())[0, 0] += 1.0
    shown.train(1)
    assert any("a gradient differs" in line for line in demo.faults(shown.rows))


def test_a_budget_that_is_accepted_though_no_step_can_keep_it_ends_the_demo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "TOO_LITTLE", None)
    torch._dynamo.reset()
    with pytest.raises(SystemExit, match="accepted a budget"):
        demo.Demo(TINY, size=4).smallest_budget()


def test_recomputation_is_compared_within_rounds() -> None:
    names = (llama.BASE, llama.PEER, llama.SAME_MEMORY)
    rows = [llama.Row(name, 52_500_000, 52_000_000, 52_000_000, 0.0) for name in names]
    slow = (1.0, 2.0, 9.0)  # the machine: each round slower than the one before
    per_step = dict(zip(names, (1.0, 1.4, 1.2), strict=True))
    llama.fill_times(rows, {name: [s * per_step[name] for s in slow] for name in names})
    assert [round(row.ratio, 6) for row in rows] == [1.0, 1.4, 1.2]
    assert [round(row.recompute, 6) for row in rows] == [0.0, 1.0, 0.5]
    solved = [llama.Solved(None, 1, 0.0, 0.0, "optimal", 31.0)]
    held = [c["holds"] for c in llama.claims(rows, solved, 38_000_000)]
    assert held == [True, True, False, True]


def rivals(seconds: float = 0.9, difference: float = 0.0) -> list[rival.Row]:
    """Torch's budget at 9 MB and, faster and wrong, at 5; rematc at 9 and at 4."""
    rows = [
        rival.Row("m", rival.ALONE, None, 10_000_000, 0.0, [1.0, 2.0]),
        rival.Row("m", "torch's budget 0.5", None, 9_000_000, 0.0, [1.1, 2.2]),
        rival.Row("m", "torch's budget 0.0", None, 5_000_000, 1.5, [0.5, 1.0]),
        rival.Row("m", "rematc, 9.00 MB", 9_000_000, 8_990_000, difference, [seconds, 2 * seconds]),
        rival.Row("m", rival.SMALLEST, 4_000_000, 3_000_000, 0.0, [1.5, 3.0]),
    ]
    for row in rows:
        row.ratio = row.seconds[0]
    return rows


def test_rivals_meet_at_the_peaks_of_torch_s_budget_and_wrong_gradients_do_not_count() -> None:
    found = [(peak, ours.name, ratio) for peak, _, ours, ratio in rival.duels(rivals())]
    assert [f[:2] for f in found] == [(10_000_000, "rematc, 9.00 MB"), (9_000_000, "rematc, 9.00 MB")]
    assert [round(ratio, 3) for *_, ratio in found] == [0.9, 0.818]
    assert rival.lowest(rivals()) == {"m": 0.6}
    assert [c["holds"] for c in rival.claims(rivals())] == [True, True, True]
    assert [c["holds"] for c in rival.claims(rivals(seconds=1.01))] == [False, True, True]
    assert [c["holds"] for c in rival.claims(rivals(difference=float("inf")))][2:] == [False]
    assert "WRONG" in rival.table(rivals()) and "0.82" in rival.summary(rivals())


def test_gradients_are_compared_with_the_largest() -> None:
    large, small = torch.full((2,), 4.0), torch.ones(2)
    assert rival.relative_difference([large, small], [large, small]) == 0
    assert rival.relative_difference([large, small - 1], [large, small]) == 0.25
    assert rival.relative_difference([large, small * float("nan")], [large, small]) == float("inf")


def test_all_benchmarks_are_summed_up(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_results(file, "x", {"claims": [{"claim": "c", "measured": 0.5, "goal": 0.25, "holds": False}]})
    first, last = bench.lines("x", 1, 3.2, file)
    assert first == ("x", "c", "0.5", "at most 0.25", "MISSED")
    assert last[1] == "FAILED, exit status 1, 3 s"
    assert len(bench.lines("x", 2, 3.2, tmp_path / "absent.json")) == 1


def test_an_unknown_benchmark_is_refused() -> None:
    with pytest.raises(SystemExit):
        bench.main(["nonesuch"])
    assert rematc.__version__ == machine()["rematc"]
