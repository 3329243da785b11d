"""What lowering told is kept for the next process: nothing is lowered twice, or taken for what it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import rematc
from rematc import compat
from rematc.inductor import _read_kernels, inputs_of, order_of
from rematc.lowerings import Lowered, told_once
from rematc.passes.replay import STEP, Place
from rematc.peak import _four_sizes
from tests.damaged import BY_BYTES, Damage, read_damaged, saying
from tests.small import batch, gradients, net
from tests.test_fuse import gated, joint_of, leaf

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The modules that are lowered, to be read or rehearsed."""
    found, lower = list[fx.GraphModule](), compat.lowered

    def watched(module: fx.GraphModule, *args: Any, **settings: Any) -> Any:
        found.append(module)
        return lower(module, *args, **settings)

    monkeypatch.setattr(compat, "lowered", watched)
    return found


def compiled(budget: int | None) -> tuple[rematc.Backend, list[Tensor]]:
    """As another process would."""
    torch._dynamo.reset()
    backend, model = rematc.backend(budget, costs="roofline"), net()
    return backend, gradients(model, torch.compile(model, backend=backend))


def test_a_second_process_lowers_nothing_to_plan(folder: Path, lowered: list[fx.GraphModule]) -> None:
    (free,) = compiled(None)[0].plans
    n_free, budget = len(lowered), int(0.95 * free.peak_bytes)
    first, theirs = compiled(budget)
    assert n_free == 4  # two to read what is fused, and two to rehearse the plan
    assert first.plans[0].cost_ns > 0
    assert len(lowered) > n_free and all(any(STEP in n.meta for n in m.graph.nodes) for m in lowered[n_free:])
    lowered.clear()
    second, ours = compiled(budget)
    assert not lowered
    assert second.plans[0].peak_bytes == first.plans[0].peak_bytes <= budget
    assert second.plans[0].backward == first.plans[0].backward
    assert all(map(torch.equal, ours, theirs))


@torch.library.custom_op("test_lowerings::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x + 1


unknown.register_fake(torch.empty_like)
unknown.register_autograd(lambda ctx, grad: grad)


def test_where_it_is_not_known_what_an_op_takes_each_process_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        caplog.clear()
        model = net()
        torch.compile(lambda: unknown(model(batch())).sum(), backend=rematc.backend(None))().backward()  # noqa: B023
        assert "leave reserve=" in caplog.text


def joint(rows: int = 32, dtype: torch.dtype = torch.float32) -> Lowered:
    x, w = (leaf(*size).detach().to(dtype).requires_grad_() for size in ((rows, 16), (16, 16)))
    module, _ = joint_of(lambda x, w: (x @ w).sin().sum(), x, w)
    return Lowered(module, inputs_of(module), False)


def name_of(lowered: Lowered) -> str | None:
    return compat.graph_name(lowered.module, lowered.inputs, is_backward=lowered.is_backward)


def test_graphs_inputs_and_settings_have_names_of_their_own() -> None:
    names = [name_of(joint()), name_of(joint(33)), name_of(joint(dtype=torch.float64))]
    names += [name_of(joint()._replace(is_backward=True)), name_of(other())]
    with torch._inductor.config.patch(epilogue_fusion=False):
        names.append(name_of(joint()))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        names.append(name_of(joint()))
    finally:
        torch.set_num_threads(threads)
    assert None not in names and len({*names}) == len(names)
    assert name_of(joint()) == names[0]


def test_where_torch_keeps_nothing_nothing_is_kept() -> None:
    traced = joint()
    with torch.compiler.config.patch(force_disable_caches=True):
        assert name_of(traced) is None


def other() -> Lowered:
    module, _ = joint_of(gated, *(leaf(*size) for size in ((32, 16), (16, 16))))
    return Lowered(module, inputs_of(module), False)


def test_what_the_plan_asks_for_has_a_name_of_its_own() -> None:
    """Of that Inductor's name says nothing: it stands at the nodes."""
    module = joint().module
    orders = [order_of(module)]
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    node.meta[STEP] = Place(1, 1, 0)
    orders.append(order_of(module))
    node.meta[STEP] = Place(1, 2, 0)
    orders.append(order_of(module))
    compat.write_out(node)
    orders.append(order_of(module))
    assert len({*orders}) == 4


def test_what_has_no_name_is_found_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "graph_name", lambda *_, **__: None)
    assert found_in(tmp_path, (1, 2, 3, 4)) and found_in(tmp_path, (1, 2, 3, 4))
    assert not list(tmp_path.iterdir())


def test_what_else_decides_is_told_apart(tmp_path: Path) -> None:
    assert found_in(tmp_path, (1, 2, 3, 4)) and not found_in(tmp_path, (1, 2, 3, 4))
    assert found_in(tmp_path, (5, 6, 7, 8), "more")
    assert found_in(None, (1, 2, 3, 4))


def found_in(folder: Path | None, told: tuple[int, int, int, int], *decides: object) -> bool:
    """Was it to be found, or was it told before?"""
    calls = []
    assert told_once([joint()], decides, folder, lambda: calls.append(1) or told, _four_sizes) == told
    return bool(calls)


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a number less": lambda data: data["told"].pop(),
    "below zero": lambda data: data.update(told=[-1, 2, 3, 4]),
    "a text": lambda data: data.update(told="1234"),
    "none": lambda data: data.pop("told"),
    "a number": lambda data: data.update(told=4),
}


@pytest.mark.parametrize(
    "damage", [*BY_BYTES.values(), *map(saying, WRONG.values())], ids=[*BY_BYTES, *WRONG]
)
def test_what_is_damaged_is_found_anew(
    damage: Damage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert found_in(tmp_path, (1, 2, 3, 4))
    (path,) = (tmp_path / "lowerings").iterdir()
    assert read_damaged(path, damage, lambda: found_in(tmp_path, (1, 2, 3, 4)), caplog)
    assert not found_in(tmp_path, (1, 2, 3, 4))


@pytest.mark.parametrize("told", [3, "ab", ["ab"], [[["a"], 1]], [[[1], True]], [[["a"], True, 2]], None])
def test_what_are_no_kernels_is_not_read(told: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        _read_kernels(told)
    assert _read_kernels([[["a", "b"], True], [["c"], False]]) == ((("a", "b"), True), (("c",), False))
