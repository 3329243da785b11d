"""What is on a GPU beside the graphs, where the allocator tells all; and the promises, on a GPU itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from rematc import compat
from rematc.arguments import Arguments
from rematc.highest import Highest
from rematc.measure import measure
from rematc.resident import wake_libraries
from rematc.watch import UNIT_BYTES, Gpu
from tests.blocks import Model, batch, count_compiles, made, peak, step_of

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Told:
    """An allocator that tells as CUDA's does: so much in all when a step begins, at most in each pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = self.peak = self.looks = self.reads = 0
        monkeypatch.setattr(Arguments, "cuda", torch.device("cuda"))
        monkeypatch.setattr("rematc.watch.allocated_bytes", lambda _: self.bytes)
        monkeypatch.setattr("rematc.pose.resident_bytes", lambda *_: self.bytes)
        monkeypatch.setattr("rematc.watch.Highest", self.highest)

    def highest(self, _: Any) -> Any:
        self.looks += 1
        return SimpleNamespace(begin_anew=lambda: None, read=self.read)

    def read(self) -> int:
        self.reads += 1
        return self.peak


@pytest.mark.parametrize("how", ["blocks", "graph break"])
def test_what_else_is_there_is_resident_to_several_graphs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, more, told = 1_400_000, 3 * UNIT_BYTES, Told(monkeypatch)
    backend = rematc.backend(budget, inner="eager")
    model, run = made(how, backend)
    told.bytes = sum(4 * p.numel() for p in model.parameters()) + 4 * 256 * 32
    for _ in range(2):
        step_of(model, run)()
    before = backend.resident_bytes
    told.bytes += more
    step_of(model, run)()
    assert backend.resident_bytes == before + more
    assert peak(model, run) + more <= max(plan.peak_bytes for plan in backend.plans) <= budget


def test_what_comes_later_has_one_graph_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, told = count_compiles(monkeypatch), Told(monkeypatch)
    model, run = made("one graph", backend := rematc.backend(1_200_000, inner="eager"))
    told.bytes = sum(4 * p.numel() for p in model.parameters()) + 4 * 256 * 32
    more = 3 * UNIT_BYTES
    for step in range(4):
        told.bytes += more if step == 2 else 0
        step_of(model, run)()
    assert len(seen) == 2
    assert peak(model, run) + more <= backend.plans[0].peak_bytes <= 1_200_000


@pytest.mark.parametrize("how", ["one graph", "blocks"])
def test_what_the_allocator_gives_beyond_what_is_asked_is_planned_for(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found once the code of a graph runs in a second step: in its first Inductor tunes it."""
    told, more = Told(monkeypatch), 2 * UNIT_BYTES
    model, run = made(how, backend := rematc.backend(2_000_000, inner="eager"))
    told.bytes = sum(4 * p.numel() for p in model.parameters()) + 4 * 256 * 32
    step_of(model, run)()
    assert not told.looks
    for _ in range(2):
        step_of(model, run)()
    told.peak = max(plan.peak_bytes for plan in backend.plans) + more
    for _ in range(3):
        step_of(model, run)()
    assert told.looks >= 3
    assert told.reads == 2 * told.looks  # forward and back
    assert max(outside.held_bytes for outside in backend.outside) >= more
    assert peak(model, run) + more <= max(plan.peak_bytes for plan in backend.plans) <= 2_000_000


def test_on_a_cpu_nothing_is_known_of_what_else_is_there() -> None:
    gpu, args = Gpu(), Arguments((torch.ones(4),))
    gpu.begin(args)
    gpu.miss(1 << 30)
    assert (gpu.unknown_bytes(args, 0, None), gpu.missing_bytes) == (0, 0)


def test_a_number_that_is_logged_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    args, gpu = Arguments((nn.Parameter(torch.ones(4)),)), Gpu()
    args.leaves[0].grad = torch.ones(4)
    monkeypatch.setattr(Arguments, "cuda", torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 5 * UNIT_BYTES)
    gpu.begin(args)
    assert gpu.unknown_bytes(args, 0, None) == 5 * UNIT_BYTES
    assert gpu.unknown_bytes(args, 512, None) == 4 * UNIT_BYTES
    assert gpu.unknown_bytes(args, 0, False) == 4 * UNIT_BYTES  # gradients that this step drops


def test_what_others_train_is_not_added_to_what_a_model_has_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models in turn, of two graphs each, and all that is there is theirs."""
    told, backend = Told(monkeypatch), rematc.backend(3_000_000, inner="eager")
    both = [made("graph break", backend) for _ in range(2)]
    told.bytes = sum(4 * p.numel() for model, _ in both for p in model.parameters()) + 4 * 256 * 32
    for _ in range(3):
        for model, run in both:
            step_of(model, run)()
    assert backend.resident_bytes <= told.bytes


@pytest.mark.parametrize("is_made", [False, True])
def test_an_optimizer_s_state_counts_once(is_made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told, budget = Told(monkeypatch), 3_000_000
    torch.manual_seed(0)
    model = Model(broken=True)
    adam = torch.optim.Adam(model.parameters())
    backend = rematc.backend(budget, inner="eager", optimizer=adam if is_made else torch.optim.Adam)
    run = torch.compile(model, backend=backend)
    weights = sum(4 * p.numel() for p in model.parameters())
    told.bytes = weights + 4 * 256 * 32
    for _ in range(4):
        run(batch()).backward()
        adam.step()
        model.zero_grad(set_to_none=True)
        told.bytes = 3 * weights + 4 * 256 * 32
    assert backend.resident_bytes <= told.bytes + UNIT_BYTES


def test_libraries_take_what_they_keep_once_in_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    device, made, ones = torch.device("cpu"), list[Tensor](), torch.ones

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        made.append(ones(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("rematc.resident._AWAKE", set())
    monkeypatch.setattr(torch, "ones", counted)
    with compat.fake_tensors(), torch.no_grad():
        for _ in range(2):
            wake_libraries(device)
    assert len(made) == 2 and all(x.grad is not None and not compat.is_fake(x) for x in made)
    thread = Thread(target=wake_libraries, args=(device,))
    thread.start()
    thread.join()
    assert len(made) == 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Net(nn.Module):
    """In each block some 100 MB; with a graph break where it is asked for."""

    def __init__(self, is_broken: bool = False) -> None:
        super().__init__()
        self.blocks, self.is_broken = nn.ModuleList(Block(512) for _ in range(6)), is_broken

    def forward(self, x: Tensor) -> Tensor:
        for n, block in enumerate(self.blocks):
            if n == 3 and self.is_broken:
                torch._dynamo.graph_break()
            x = block(x)
        return x.float().square().mean()


def highest_of(step: Callable[[], object], times: int) -> int:
    """The most that the allocator gave out in so many steps, all that is resident counted in."""
    gc.collect()
    highest = Highest(torch.device("cuda"))
    for _ in range(times):
        step()
    return highest.read()


def trained(backend: Any, optimizer: bool = False, is_broken: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net(is_broken).cuda()
    x = torch.randn(8192, 512, device="cuda")
    run = torch.compile(model, backend=backend)
    adam = torch.optim.Adam(model.parameters()) if optimizer else None

    def step() -> None:
        run(x).backward()
        if adam:
            adam.step()
        model.zero_grad(set_to_none=True)

    return model, step


@pytest.mark.gpu
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_budget_is_kept_from_the_first_step_on(inner: Any) -> None:
    _, step = trained("inductor" if inner == "inductor" else "aot_eager")
    step()
    free = highest_of(step, 2)
    torch._dynamo.reset()
    del step
    budget = free * 7 // 10
    backend = rematc.backend(budget, inner=inner, costs="roofline")
    _, step = trained(backend)
    found = highest_of(step, 4)
    assert found <= backend.plans[0].peak_bytes <= budget
    steady = measure(step, device="cuda")
    assert steady.resident_bytes is not None
    assert backend.plans[0].peak_bytes <= 1.25 * (steady.resident_bytes + steady.peak_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("is_broken", [False, True])
def test_what_an_optimizer_keeps_is_found(inner: Any, is_broken: bool) -> None:
    budget = 1_000_000_000 if is_broken else 700_000_000
    other = torch.ones(20_000_000, device="cuda")  # of another model, say
    backend = rematc.backend(budget, inner=inner, costs="roofline")
    _, step = trained(backend, optimizer=True, is_broken=is_broken)
    for _ in range(3):
        step()
    assert highest_of(step, 2) <= budget
    assert backend.resident_bytes > other.nbytes


@pytest.mark.gpu
def test_gradients_are_those_of_aot_eager_to_the_bit() -> None:
    def gradients(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model, _ = trained("eager")
        x = torch.randn(8192, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        torch.manual_seed(1)
        torch.compile(model, backend=backend)(x).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    backend = rematc.backend(600_000_000, inner="eager", costs="roofline")
    ours = gradients(backend)
    assert backend.plans[0].cost_ns
    assert all(map(torch.equal, ours, gradients("aot_eager")))
