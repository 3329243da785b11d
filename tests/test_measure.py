"""`measure` against allocations worked out by hand, and against the allocator's own count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from rematc.allocations import profiler_is_taken, spans
from rematc.measure import Measurement, measure, measure_each


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def taken(step: Any, warmup: int = 0) -> tuple[int, int]:
    m = measure(step, device="cpu", warmup=warmup)
    return m.peak_bytes, m.end_bytes


def test_blocks_freed_in_a_known_order() -> None:
    def step() -> torch.Tensor:
        a = block(1000)
        b = block(2000)
        del a
        c = block(500)
        del b
        return c

    assert taken(step) == (3000, 500)


def test_of_the_warm_runs_only_the_last_is_under_the_profiler() -> None:
    """A step that is compiled by its first run can measure what it needs to."""
    seen: list[bool] = []
    measure(lambda: seen.append(profiler_is_taken()), device="cpu", warmup=3)
    assert seen == [False, False, True, True]


def test_the_result_is_held_and_nothing_else() -> None:
    assert taken(lambda: [block(10), block(20)[:5], block(0)]) == (30, 30)
    assert taken(lambda: None) == (0, 0)


def test_peak_in_the_middle_and_views_are_free() -> None:
    def step() -> None:
        kept = [block(100) for _ in range(10)]
        views = [t.view(10, 10).t() for t in kept]
        del kept[::2], views[::2]
        kept.append(block(7))

    assert taken(step) == (1000, 0)


@pytest.mark.parametrize("count", [100, 5000])
def test_many_events_are_counted_to_the_byte(count: int) -> None:
    """A queue that holds three blocks: ``count`` allocations, as many frees."""
    sizes = [1 + 7919 * i % 4093 for i in range(count)]

    def step() -> list[torch.Tensor]:
        queue: list[torch.Tensor] = []
        for size in sizes:
            if len(queue) == 3:
                queue.pop(0)
            queue.append(block(size))
        return queue

    peak = max(sum(sizes[i : i + 3]) for i in range(count - 2))
    assert taken(step) == (peak, sum(sizes[-3:]))


def test_backward_is_counted() -> None:
    """y = x.sin().exp(): at sin's backward x, y, dy, exp's gradient, cos(x) and their product live."""
    n = 4 * 1000

    def step() -> torch.Tensor:
        x = torch.zeros(1000, requires_grad=True)
        y = x.sin().exp()
        y.backward(torch.zeros(1000))
        del y
        assert x.grad is not None
        return x.grad

    assert taken(step) == (6 * n, n)


def test_reentrant_backward_is_counted() -> None:
    """Deeply nested backward passes move to autograd's own threads; their blocks count all the same."""

    def step(depth: int) -> torch.Tensor:
        def nest(x: torch.Tensor, left: int) -> torch.Tensor:
            if not left:
                return x.exp()
            return checkpoint(nest, x, left - 1, use_reentrant=True) * 1.0

        x = torch.zeros(100_000, requires_grad=True)
        nest(x, depth).sum().backward()
        assert x.grad is not None
        return x.grad

    assert taken(lambda: step(70))[1] == 400_000


def test_agrees_with_the_allocators_own_total() -> None:
    """Its running total, as it tells the profiler, rises by what `measure` says."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))
    x = torch.randn(32, 64)

    def step() -> None:
        model(x).relu().sum().backward()

    mine = taken(step)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        step()
    assert prof.profiler is not None
    results: Any = prof.profiler.kineto_results
    live = peak = 0
    for event in results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert mine == (peak, live)
    assert live == sum(p.nbytes for p in model.parameters())


def test_frees_of_older_blocks_count_only_after_a_warmup() -> None:
    old = [block(4000)]

    def swap() -> None:
        old.clear()
        old.append(block(4000))

    assert taken(swap) == (4000, 4000)
    assert taken(swap, warmup=1) == (0, 0)


def test_an_address_with_a_new_owner_is_not_freed_with_its_old_size() -> None:
    assert spans([None, (7, 50), (9, -10_000), (8, 30), (7, -50), None])[1] == (80, 30)


def test_a_block_that_another_thread_freed_unseen_is_gone_when_its_address_is_given_out_again() -> None:
    assert spans([(7, 50), (8, 10), (7, 30), (7, -30), None]) == [(60, 10)]


def test_a_span_begins_with_what_is_live() -> None:
    assert spans([(1, 10), None, (1, -10), (2, 10), None, (3, 7), None]) == [(10, 10), (0, 0), (7, 7)]


def test_what_was_made_inside_is_not_freed_outside() -> None:
    """Outside: 10 bytes; inside: 50 more, and the 10 go; outside: those 50 are freed, and 7 made."""
    events = [(1, 10), None, (2, 50), (1, -10), None, (2, -50), (3, 7), None]
    assert spans(events, every=2) == [(10, 10), (7, 7)]


def test_each_of_many_steps_counts_its_own_and_not_its_preparation() -> None:
    def prepare(size: int) -> Callable[[], object]:
        held = block(1_000_000)
        return lambda: (held, block(size), block(size).clone())

    measured = measure_each(partial(prepare, size) for size in (10, 0, 30))
    assert [(m.peak_bytes, m.end_bytes) for m in measured] == [(30, 20), (0, 0), (90, 60)]


def test_same_step_same_figures() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(50, 70), torch.nn.GELU(), torch.nn.Linear(70, 1))
    x = torch.randn(40, 50)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    assert len({taken(step, warmup=1) for _ in range(5)}) == 1


class Scratch(torch.autograd.Function):
    """A thousand bytes in forward, three thousand in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        block(1000)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        block(3000)
        return g.clone()


def test_each_phase_has_its_peak() -> None:
    x = torch.ones(1, requires_grad=True)

    def step() -> None:
        Scratch.apply(x).backward()
        block(500)

    m = measure(step, device="cpu", warmup=1)
    assert list(m.phases) == ["forward", "backward", "update"]
    assert 1000 <= m.phases["forward"] < 1100 and 3000 <= m.phases["backward"] < 3100
    assert 500 <= m.phases["update"] < 600 and m.peak_bytes == m.phases["backward"]


def test_what_a_phase_leaves_counts_in_the_next() -> None:
    x, kept = torch.ones(1, requires_grad=True), []

    def step() -> None:
        kept.append(block(700))
        torch.autograd.grad(Scratch.apply(x), x)

    m = measure(step, device="cpu")
    assert 1700 <= m.phases["forward"] < 1800 and 3700 <= m.phases["backward"] < 3800
    assert m.end_bytes == 700


def test_accumulated_steps_have_the_same_phases() -> None:
    x = torch.ones(1, requires_grad=True)

    def step() -> None:
        for _ in range(3):
            Scratch.apply(x).backward()

    assert set(measure(step, device="cpu").phases) == {"forward", "backward", "update"}


def test_a_backward_pass_within_another_begins_no_phase() -> None:
    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            with torch.enable_grad():
                Scratch.apply(torch.ones(1, requires_grad=True)).backward()
            block(200)
            return g.clone()

    x = torch.ones(1, requires_grad=True)
    m = measure(lambda: Nested.apply(x).backward(), device="cpu", warmup=1)
    assert m.phases["update"] < 200 < 3000 <= m.phases["backward"]


def test_what_was_there_before_is_resident() -> None:
    before = measure(lambda: None, device="cpu").resident_bytes
    there = torch.ones(1000)
    views = [there[:10], there.view(10, 100)]
    after = measure(lambda: None, device="cpu").resident_bytes
    assert before is not None and after is not None
    assert after - before == 4000 and len(views) == 2


def test_after_measuring_autograd_is_as_it_was() -> None:
    entries = torch.autograd.backward, torch.autograd.grad
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, device="cpu")
    assert (torch.autograd.backward, torch.autograd.grad) == entries


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 'cpu' or 'cuda'"):
        measure(lambda: None, device="meta")


def test_an_error_in_the_step_comes_through() -> None:
    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(step, device="cpu")
    assert isinstance(measure(lambda: None, device="cpu"), Measurement)


@pytest.mark.gpu
def test_cuda() -> None:
    def step() -> torch.Tensor:
        a = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        b = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
        del a
        return b

    m = measure(step, device="cuda")
    assert (m.peak_bytes, m.end_bytes) == (3 << 20, 2 << 20)
