"""What a rank of `test_ranks` runs: a few training steps under a budget, and what came of it."""

from __future__ import annotations

import ctypes
import gc
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
from rematc.allocations import MEMORY, memory_profile
from tests.ways import ROWS, WAYS, Fsdp, Sharded, Way, bytes_of

Found = dict[str, Any]


def train(rank: int, count: int, folder: str, budgets: dict[str, int]) -> None:
    """The process of one rank: each way of `budgets`, its findings written to ``folder``."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    _count_all_threads()
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
        time_limit_s=10.0,  # what graphs share is the least of plans that the clock should not cut
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
    peak_bytes = bytes_of([way.x, *way.model.parameters()]) + _peak_bytes(way)
    saved = _saved(kind, budget) if issubclass(kind, (Fsdp, Sharded)) else []
    return {
        **found,
        "peak_bytes": peak_bytes,
        "saved": saved,
        "state": (state, plain_state),
        "collectives": (collectives, plain_collectives),
    }


def _count_all_threads() -> None:
    """Have the allocator count what each thread allocates and frees, not only threads under a profile.

    Without, what gloo's threads free stays alive for a profile until its address is given out again: a step
    in fifty then measures up to a fifth more than it took.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _peak_bytes(way: Way) -> int:
    """Of a step, by the allocator's count, above what was there before it."""
    gc.collect()
    before = torch.empty(1)  # the first event of the profile is that it goes
    with memory_profile() as profiled:
        del before
        way.step()
    assert profiled.profiler is not None
    nodes: list[Any] = list(profiled.profiler.kineto_results.experimental_event_tree())
    for node in nodes:  # grows as it is read
        nodes.extend(node.children)
    events = [node for node in nodes if node.name == MEMORY]
    first = min(events, key=lambda node: node.start_time_ns)
    counts = [node.extra_fields.total_allocated for node in events]
    return max(counts) - first.extra_fields.total_allocated


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
