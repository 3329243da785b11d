"""Collectives in the graph: no plan runs one twice, and what they gather is not kept."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

import rematc
from rematc.baselines import recompute_all
from rematc.errors import BudgetError
from rematc.regather import READS_SHARED
from tests.test_graphs import WIDTH, Around, assert_kept, by_turns, compiled, eager, plain, step_of
from tests.test_opaque import kept, pinned

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "alone"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def summed(x: Tensor) -> Tensor:
    out: Tensor = collectives.all_reduce(x.sin(), "sum", dist.group.WORLD)  # type: ignore[arg-type]
    return out.exp()


class Gathered(nn.Module):
    """A parameter that the graph gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = collectives.all_gather_tensor_autograd(self.shard, 0, dist.group.WORLD)  # type: ignore[arg-type]
        return (x @ whole).sin()


def collectives_of_a_step(model: Around, backend: rematc.Backend) -> dict[str, int]:
    run = compiled(model, backend)
    by_turns(model, run, (plain,))
    with torch.profiler.profile(acc_events=True) as profile:
        step_of(model, run, plain(model))
    return {
        e.key.split("::")[1]: e.count
        for e in profile.key_averages()
        if e.key.startswith("_c10d_functional::")
    }


def test_no_plan_runs_a_collective_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = kept(summed, share=0.65)
    backends = [eager("1GB"), eager(tight.options.budget), rematc.backend(None, inner="eager")]
    for n, backend in enumerate(backends):
        if n == 2:  # whatever can be is recomputed
            home = importlib.import_module("rematc.partition")
            monkeypatch.setattr(home, "solve", lambda problem, _: recompute_all(problem))
        found = collectives_of_a_step(Around(summed), backend)
        assert found == {"all_reduce": 2, "wait_tensor": 2}


def test_a_parameter_is_gathered_once_in_each_pass_whatever_the_plan() -> None:
    budget = assert_kept(lambda _: Around(Gathered())).options.budget
    for limit in ("1GB", budget):
        found = collectives_of_a_step(Around(Gathered()), eager(limit))
        assert found["all_gather_into_tensor"] == 2
        assert found["reduce_scatter_tensor"] == 1


def test_what_is_gathered_is_not_kept_for_ops_that_are_recomputed() -> None:
    """What reads it runs once; unless the plan may gather again, as the refusal says."""
    backend = assert_kept(lambda _: Around(Gathered()))
    (plan,), (problem,) = backend.plans, backend.problems
    graph, values = problem.graph, problem.graph.values
    whole = {
        values[v].storage
        for i in graph.forward
        if "c10d" in graph.ops[i].target
        for v in graph.ops[i].outputs
    }
    assert whole and whole.isdisjoint(values[v].storage for v in plan.saved)
    assert [op.name for op in pinned(backend, READS_SHARED)] == ["mm"]
    model = Around(Gathered())
    for regather, advice in ((False, "regather=True, a"), (True, r"budget=\d+, a smaller")):
        with pytest.raises(BudgetError, match=advice):
            step_of(model, compiled(model, eager(1, regather=regather)), plain(model))
