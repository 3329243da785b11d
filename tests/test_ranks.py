"""Two and four processes that train together, over gloo: gradients are those of all, and they plan alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes

from tests import ranks
from tests.ways import WAYS, WHOLE

Ranks = list[dict[str, ranks.Found]]
Finder = Callable[[int, str], Ranks]

BUDGETS = {
    2: {
        "ddp": 11_500_000,
        "fsdp": 13_500_000,
        "sharded": 6_400_000,
        "tensor": 8_000_000,
        "pipeline": 15_500_000,
        "ddp, noisy": 7_900_000,
    },
    4: {"tensor": 5_400_000, "pipeline": 12_000_000},
}
SLOW = {
    2: {
        "fsdp, whole": 13_500_000,
        "sharded, inductor": 5_800_000,
        "regathered": 4_900_000,
        "regathered, inductor": 4_900_000,
        "fsdp, noisy": 9_900_000,
        "tensor, noisy": 5_500_000,
    },
    4: {"ddp": 11_500_000, "fsdp": 13_500_000, "sharded": 5_700_000},
}
COLLECTIVES_IN_THE_GRAPH = ("sharded", "sharded, inductor", "regathered", "regathered, inductor", "tensor")
GATHERED_IN_THE_GRAPH = COLLECTIVES_IN_THE_GRAPH[:-1]
SCATTERS = ("_c10d_functional::reduce_scatter_tensor", "gloo:all_reduce")
ONE_GRAPH = (*COLLECTIVES_IN_THE_GRAPH, "pipeline", "tensor, noisy")
NOISY = ["ddp, noisy", *(pytest.param(f"{of}, noisy", marks=pytest.mark.slow) for of in ("fsdp", "tensor"))]
QUICK = 2  # ranks: with more it is the same ways, and they take longer


def cells(left_out: str = "") -> list[Any]:
    """Each way to train with so many ranks, but the one ``left_out``."""
    quick = [(count, name, count > QUICK) for count, names in BUDGETS.items() for name in names]
    every = [*quick, *((count, name, True) for count, names in SLOW.items() for name in names)]
    return [
        pytest.param(count, name, marks=pytest.mark.slow if is_slow else ())
        for count, name, is_slow in every
        if name != left_out
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Finder:
    """What each rank found in a way of training; the ways of so many ranks run one after the other."""

    @functools.cache
    def of(count: int, is_slow: bool) -> Ranks:
        folder, budgets = tmp_path_factory.mktemp("ranks"), (SLOW if is_slow else BUDGETS)[count]
        budgets = {name: budget_of(count, name) for name in budgets}
        processes.spawn(ranks.train, (count, str(folder), budgets), nprocs=count)
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(count)]

    return lambda count, name: of(count, name in SLOW.get(count, {}))


def budget_of(count: int, name: str) -> int:
    return {**BUDGETS[count], **SLOW.get(count, {})}[name] + WAYS[name].more_bytes


@pytest.mark.parametrize(("count", "name"), cells())
def test_gradients_are_those_of_all_ranks_together(count: int, name: str, found: Finder) -> None:
    """To the bit as under `aot_eager`; eager PyTorch adds them up in another order, and so does Inductor."""
    for rank in found(count, name):
        same = map(torch.equal, rank[name]["gradients"], rank[name]["plain"])
        assert all(same) or WAYS[name].inner == "inductor"
        for ours, theirs in zip(rank[name]["gradients"], rank[name]["expected"], strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("count", "name"), cells())
def test_on_each_rank_the_graphs_of_a_step_share_the_budget(count: int, name: str, found: Finder) -> None:
    """DDP runs the pieces of the model on fake tensors first: that is no step, and keeps nothing.

    Of a pipeline the first stage has the most batches open, and the last one at a time.
    """
    for n, rank in enumerate(found(count, name)):
        _, costs, peaks, _ = zip(*rank[name]["plans"], strict=True)
        assert len(costs) > 1 or name in ONE_GRAPH
        assert sum(costs) > 0 or (name == "pipeline" and n > 0)
        assert max(peaks) <= budget_of(count, name)


@pytest.mark.parametrize(("count", "name"), cells("pipeline"))
def test_all_ranks_have_the_same_plans(count: int, name: str, found: Finder) -> None:
    """Though each measured its costs for itself: the digest tells those too."""
    first, *others = (rank[name]["plans"] for rank in found(count, name))
    assert all(plans == first for plans in others)


@pytest.mark.parametrize(("count", "name"), cells())
def test_each_rank_measures_no_more_than_the_budget(count: int, name: str, found: Finder) -> None:
    """Though threads of gloo hold what they sent for a moment longer, now on one rank, now on another."""
    assert all(rank[name]["peak_bytes"] <= budget_of(count, name) for rank in found(count, name))


@pytest.mark.parametrize("name", NOISY)
def test_masks_and_statistics_are_those_of_each_rank(name: str, found: Finder) -> None:
    """A mask is drawn once, and statistics change once: all ends as it does without recomputation."""
    for rank in found(2, name):
        ours, plain = rank[name]["state"]
        assert len(ours) > 1 and all(map(torch.equal, ours, plain))
    first, second = (rank[name]["state"][0][0] for rank in found(2, name))
    assert torch.equal(first, second) == (name == "tensor, noisy")


@pytest.mark.parametrize(
    "name",
    [
        "fsdp",
        pytest.param("fsdp, whole", marks=pytest.mark.slow),
        "sharded",
        pytest.param("sharded, inductor", marks=pytest.mark.slow),
        pytest.param("regathered", marks=pytest.mark.slow),
        pytest.param("regathered, inductor", marks=pytest.mark.slow),
    ],
)
def test_gathered_weights_are_not_kept(name: str, found: Finder) -> None:
    """The backward pass gathers them again: once, or where a plan may gather, as often as it likes."""
    for rank in found(2, name):
        assert rank[name]["saved"]
        assert WHOLE not in rank[name]["saved"]


@pytest.mark.parametrize(("count", "name"), cells())
def test_no_collective_is_run_twice_unless_that_is_asked_for(count: int, name: str, found: Finder) -> None:
    """But that what the graph gathers is gathered once in each pass, as FSDP does."""
    for rank in found(count, name):
        ours, plain = rank[name]["collectives"]
        gathers = {kind for kind in plain if "gather" in kind}
        if name in GATHERED_IN_THE_GRAPH:
            assert gathers and (WAYS[name].regather or all(ours[k] <= 2 * plain[k] for k in gathers))
            ours, plain = ({k: n for k, n in c.items() if k in SCATTERS} for c in (ours, plain))
        assert ours == plain and sum(plain.values()) > 0
