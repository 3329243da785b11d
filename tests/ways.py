"""Ways in which ranks train together: how a model is spread and compiled, and what eager PyTorch finds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from rematc.options import Inner
from rematc.versions import torch_version

WIDTH, ROWS, BLOCKS = 128, 512, 4
WHOLE = 4 * WIDTH * WIDTH  # elements of a weight
MICROBATCHES = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(x)).tanh())
        return out


class Noisy(Block):
    """Draws a mask, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.drop(self.down(F.gelu(self.up(x)).tanh())))
        return out


class Stage(nn.Module):
    """Some of the blocks of `Net`."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Net(Stage):
    def __init__(self, block: type[Block] = Block) -> None:
        torch.manual_seed(0)
        super().__init__([block() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Way(ABC):
    """How ranks train together: ``model`` is this rank's, a ``step`` leaves gradients, ``expected`` are those
    of eager PyTorch.
    """

    model: nn.Module
    block: type[Block] = Block
    rows = ROWS
    inner: Inner = "eager"
    regather = False
    more_bytes = 0  # that this torch takes outside of the graphs, with eager PyTorch too; the budget has them

    def __init__(self, backend: Any) -> None:
        self.x = torch.randn(self.rows, WIDTH, generator=torch.Generator().manual_seed(self.seed))
        self.run: Callable[..., Any] = self.built(backend)

    @property
    def seed(self) -> int:
        """Of this rank's batch, and of what a step draws."""
        return dist.get_rank()

    @classmethod
    def reserve_bytes(cls, rank: int, count: int) -> int:
        """For what lies outside of the graphs of a rank: on a CPU nobody counts it."""
        return 0

    @abstractmethod
    def built(self, backend: Any) -> Callable[..., Any]:
        """What a step runs: ``model``, which this sets, compiled with ``backend``."""

    def step(self) -> None:
        torch.manual_seed(self.seed)
        self.run(self.x).backward()

    def expected(self) -> list[Tensor]:
        """The mean of what the ranks find for their batches."""
        eager = Net(self.block)
        torch.manual_seed(self.seed)
        eager(self.x).backward()
        found = [p.grad for p in eager.parameters() if p.grad is not None]
        for gradient in found:
            dist.all_reduce(gradient)
        return [gradient / dist.get_world_size() for gradient in found]


class Ddp(Way):
    """Buckets so small that the graph is cut into several."""

    def built(self, backend: Any) -> Callable[..., Any]:
        self.model = Net(self.block)
        parallel = DistributedDataParallel(self.model, bucket_cap_mb=1)
        return torch.compile(parallel, backend=backend)


class Fsdp(Way):
    """Blocks are compiled one by one, and gathered outside of their graphs: the next one beside the last."""

    @classmethod
    def reserve_bytes(cls, rank: int, count: int) -> int:
        return 2 * bytes_of(list(cls.block().parameters()))

    def built(self, backend: Any) -> Callable[..., Any]:
        self.model = Net(self.block)
        for block in self.model.blocks:
            block.compile(backend=backend)
        return self.sharded()

    def sharded(self) -> nn.Module:
        for block in self.model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh())
        return fully_shard(self.model, mesh=mesh())


class FsdpOfTheWhole(Fsdp):
    """Torch breaks the graph around each block."""

    def built(self, backend: Any) -> Callable[..., Any]:
        self.model = Net(self.block)
        return torch.compile(self.sharded(), backend=backend)


class Gather(nn.Module):
    def forward(self, shard: DTensor) -> Tensor:
        whole: Tensor = shard.redistribute(placements=[Replicate()]).to_local(
            grad_placements=[Partial("avg")]
        )
        return whole


class Sharded(Way):
    """The graph itself gathers the weights, and scatters their gradients."""

    rows = ROWS // 2

    def built(self, backend: Any) -> Callable[..., Any]:
        self.model = Net(self.block)
        for module in [m for m in self.model.modules() if isinstance(m, nn.Linear)]:
            for name, parameter in list(module.named_parameters()):
                shard = distribute_tensor(parameter.detach(), mesh(), [Shard(0)])
                module.register_parameter(name, nn.Parameter(shard))
                parametrize.register_parametrization(module, name, Gather(), unsafe=True)
        return torch.compile(self.model, backend=backend)


class ShardedUnderInductor(Sharded):
    inner = "inductor"


class Regathered(Sharded):
    """Plans gather as often as they like; one rank has less room than the others."""

    regather = True

    @classmethod
    def reserve_bytes(cls, rank: int, count: int) -> int:
        return 4096 * rank


class RegatheredUnderInductor(Regathered):
    inner = "inductor"


class TensorParallel(Way):
    """The graph itself has collectives; all ranks have the same batch."""

    seed = 0

    def built(self, backend: Any) -> Callable[..., Any]:
        self.model = Net(self.block)
        parts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        plan = {f"blocks.{n}.{name}": style for n in range(BLOCKS) for name, style in parts.items()}
        parallelize_module(self.model, mesh(), plan)
        return torch.compile(self.model, backend=backend)


class Pipeline(Way):
    """Each rank has a graph of its own, and several forward passes are open at once."""

    seed, rows = 0, MICROBATCHES * ROWS
    more_bytes = 4 * rows * WIDTH if torch_version() >= (2, 15) else 0  # on the last rank

    @classmethod
    def reserve_bytes(cls, rank: int, count: int) -> int:
        """The last rank has the targets of all batches; here each has the inputs, which the first reads."""
        return 4 * cls.rows * WIDTH * ((rank > 0) + (rank == count - 1)) + cls.more_bytes

    def built(self, backend: Any) -> Callable[..., Any]:
        rank, count = dist.get_rank(), dist.get_world_size()
        each = BLOCKS // count
        self.mine = slice(rank * each, (rank + 1) * each)
        self.model = Stage(list(Net().blocks[self.mine]))
        compiled = torch.compile(self.model, backend=backend)
        stage = PipelineStage(compiled, rank, count, torch.device("cpu"))  # type: ignore[arg-type]
        schedule = Schedule1F1B(
            stage, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().mean()
        )
        return schedule.step

    def step(self) -> None:
        given = [self.x] if dist.get_rank() == 0 else []
        is_last = dist.get_rank() == dist.get_world_size() - 1
        self.run(*given, **({"target": torch.zeros_like(self.x)} if is_last else {}))

    def expected(self) -> list[Tensor]:
        eager = Net()
        eager(self.x).backward()
        return [p.grad for block in eager.blocks[self.mine] for p in block.parameters() if p.grad is not None]


class NoisyDdp(Ddp):
    """Each rank draws masks of its own, and has the statistics of the first."""

    block = Noisy


class NoisyFsdp(Fsdp):
    block = Noisy


class NoisyTensorParallel(TensorParallel):
    """All ranks draw the same masks."""

    block = Noisy


WAYS: dict[str, type[Way]] = {
    "ddp": Ddp,
    "fsdp": Fsdp,
    "fsdp, whole": FsdpOfTheWhole,
    "sharded": Sharded,
    "sharded, inductor": ShardedUnderInductor,
    "regathered": Regathered,
    "regathered, inductor": RegatheredUnderInductor,
    "tensor": TensorParallel,
    "pipeline": Pipeline,
    "ddp, noisy": NoisyDdp,
    "fsdp, noisy": NoisyFsdp,
    "tensor, noisy": NoisyTensorParallel,
}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def bytes_of(given: list[Any]) -> int:
    """Of what this rank has of them."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in given]
    return sum(t.untyped_storage().nbytes() for t in local)
