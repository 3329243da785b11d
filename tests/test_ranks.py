"""Two processes that train together, over gloo: gradients are those of both, and each plans by its budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as processes

from tests import ranks

BUDGETS = {"ddp": 11_500_000, "fsdp": 13_500_000}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, ranks.Found]]:
    folder = tmp_path_factory.mktemp("ranks")
    processes.spawn(ranks.train, (str(folder), BUDGETS), nprocs=ranks.RANKS)
    return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(ranks.RANKS)]


@pytest.mark.parametrize("name", BUDGETS)
def test_gradients_are_the_mean_of_those_of_all_ranks(name: str, found: list[dict[str, ranks.Found]]) -> None:
    for rank in found:
        for ours, theirs in zip(rank[name]["gradients"], rank[name]["expected"], strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", BUDGETS)
def test_on_each_rank_the_graphs_of_a_step_share_the_budget(
    name: str, found: list[dict[str, ranks.Found]]
) -> None:
    """DDP runs the pieces of the model on fake tensors first: that is no step, and keeps nothing."""
    for rank in found:
        plans = rank[name]["plans"]
        assert len(plans) > 1
        assert sum(cost for cost, _ in plans) > 0
        assert max(peak for _, peak in plans) <= BUDGETS[name]
