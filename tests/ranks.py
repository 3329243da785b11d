"""What a rank of `test_ranks` runs: a few training steps under a budget, and what came of it."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import rematc
from rematc.measure import measure
from tests.ways import ROWS, WAYS, Fsdp, Sharded, Way, bytes_of

Found = dict[str, Any]


def train(rank: int, count: int, folder: str, budgets: dict[str, int]) -> None:
    """The process of one rank: each way of `budgets`, its findings written to ``folder``."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ["REMATC_CACHE_DIR"] = f"{folder}/cache{rank}"  # as on as many machines
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    try:
        found = {name: _trained(WAYS[name], budget) for name, budget in budgets.items()}
        torch.save(found, Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


def _trained(kind: type[Way], budget: int) -> Found:
    plain, reference = _after_steps(kind, "aot_eager")
    plain_state = _state(reference)
    plain_collectives = _collectives(reference)
    backend = rematc.backend(
        budget,
        inner=kind.inner,
        reserve=kind.reserve_bytes(dist.get_rank(), dist.get_world_size()),
        time_limit_s=2.0,
        costs="measured",
        measure_s=0.5,
        regather=kind.regather,
    )
    gradients, way = _after_steps(kind, backend)
    state = _state(way)
    collectives = _collectives(way)
    plans = [(plan.digest, plan.cost_ns, plan.peak_bytes, plan.backward) for plan in backend.plans]
    found = {"gradients": gradients, "plain": plain, "expected": way.expected(), "plans": plans}
    way.model.zero_grad()
    peak_bytes = bytes_of([way.x, *way.model.parameters()]) + measure(way.step).peak_bytes
    saved = _saved(kind, budget) if issubclass(kind, (Fsdp, Sharded)) else []
    return {
        **found,
        "peak_bytes": peak_bytes,
        "saved": saved,
        "state": (state, plain_state),
        "collectives": (collectives, plain_collectives),
    }


def _collectives(way: Way) -> Counter[str]:
    """How often a step calls each. None may be under way when the profile ends: the ranks end it together."""
    way.model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        way.step()
        dist.barrier()
    return Counter(e.key for e in profiled.events() if "gloo" in e.key or "c10d" in e.key)


def _saved(kind: type[Way], budget: int) -> list[int]:
    """Elements of each tensor that is kept for the backward pass; FSDP lets go of what it has gathered.

    The batch is so small that no activation is as large as a weight.
    """
    torch._dynamo.reset()
    way, found = kind(rematc.backend(budget, inner=kind.inner, regather=kind.regather)), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = way.run(way.x[: ROWS // 2])
    assert loss.requires_grad
    return [t.numel() for t in found if t.untyped_storage().nbytes()]


def _after_steps(kind: type[Way], backend: Any) -> tuple[list[Tensor], Way]:
    torch._dynamo.reset()
    way = kind(backend)
    for _ in range(3):
        way.model.zero_grad()
        way.step()
    return [_whole(p.grad) for p in way.model.parameters()], way


def _state(way: Way) -> list[Tensor]:
    """What steps leave behind besides gradients: statistics, and where the generator stands."""
    return [torch.get_rng_state(), *(buffer.clone() for buffer in way.model.buffers())]


def _whole(gradient: Any) -> Tensor:
    """Of all ranks together."""
    found: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found.clone()
