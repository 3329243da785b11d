"""What a rank of `test_ranks` runs: a few training steps under a budget, and what came of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rematc

RANKS, WIDTH, ROWS = 2, 128, 512
Found = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(x)).tanh())
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def ddp(model: Net, backend: rematc.Backend) -> Callable[[Tensor], Tensor]:
    """Buckets so small that the graph is cut into several."""
    return torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend=backend)


def fsdp(model: Net, backend: rematc.Backend) -> Callable[[Tensor], Tensor]:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        block.compile(backend=backend)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(rank: int, folder: str, budgets: dict[str, int | None]) -> None:
    """The process of one rank: each way of `budgets`, its findings written to ``folder``."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        found = {name: _trained(rank, name, budget) for name, budget in budgets.items()}
        torch.save(found, Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


def _trained(rank: int, name: str, budget: int | None) -> Found:
    torch._dynamo.reset()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    backend = rematc.backend(budget, inner="eager", costs="roofline", time_limit_s=2.0)
    model = Net()
    run = {"ddp": ddp, "fsdp": fsdp}[name](model, backend)
    for _ in range(3):
        model.zero_grad()
        run(x).backward()
    gradients = [_whole(p.grad) for p in model.parameters()]
    expected = []
    eager = Net()
    eager(x).backward()
    for p in eager.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        expected.append(p.grad / RANKS)
    plans = [(plan.cost_ns, plan.peak_bytes) for plan in backend.plans]
    return {"gradients": gradients, "expected": expected, "plans": plans}


def _whole(gradient: Any) -> Tensor:
    """Of all ranks together."""
    found: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found.clone()
