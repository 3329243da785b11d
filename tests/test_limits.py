"""What docs/limits.md says is refused is, in those words."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel

import rematc
from tests.small import batch, net

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
]
NO_DOUBLE = "torch.compile with aot_autograd does not currently support double backward"
WRITTEN_OVER = "This backward function was compiled with non-empty donated buffers"
DOCS = (Path(__file__).parent.parent / "docs" / "limits.md").read_text()


def compiled(fn: Callable[..., Tensor], budget: str = "1MB") -> Callable[..., Tensor]:
    return torch.compile(fn, backend=rematc.backend(budget, inner="eager"))


def sparse() -> None:
    words = nn.Embedding(10, 4, sparse=True)
    compiled(lambda i: words(i).sum())(torch.tensor([1, 2])).backward()


def double_backward() -> None:
    x = batch().requires_grad_()
    (first,) = torch.autograd.grad(compiled(net())(x).sum(), x, create_graph=True)
    first.square().sum().backward()


def marked_unbacked() -> None:
    x = batch()
    torch._dynamo.decorators.mark_unbacked(x, 0)
    compiled(net())(x)


@torch.library.custom_op("test_limits::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


def no_shapes() -> None:
    line = nn.Linear(4, 4)
    compiled(lambda x: twice(line(x)).sum())(torch.ones(2, 4)).backward()


def flex_attention_on_a_cpu() -> None:
    q = torch.ones(1, 1, 128, 16, requires_grad=True)
    compiled(lambda q: flex_attention(q, q, q))(q)  # type: ignore[arg-type, return-value]


def too_small() -> None:
    compiled(net(), "1kB")(batch())


def picked_by_data() -> None:
    line = nn.Linear(4, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled(lambda x: line(x)[x > 0].sin().sum())(torch.ones(2, 4))


def sized_by_data() -> None:
    line = nn.Linear(4, 8)

    def first(x: Tensor, count: Tensor) -> Tensor:
        n = count.item()
        torch._check(n <= 8)
        return line(x)[:, :n].sin().sum()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled(first)(torch.ones(2, 4), torch.tensor(5))


SEEN = {
    picked_by_data: ("CaptureError", "the graph has a size that depends on data"),
    sized_by_data: ("CaptureError", "the graph has a size that depends on data"),
    sparse: ("CaptureError", "torch.sparse_coo"),
    double_backward: (
        "RuntimeError",
        "torch.compile with aot_autograd does not currently support double backward",
    ),
    marked_unbacked: ("CaptureError", "the graph has a size that depends on data"),
    no_shapes: ("", "There was no fake impl registered"),
    flex_attention_on_a_cpu: ("NotImplementedError", "FlexAttention does not support backward on CPU"),
    too_small: ("BudgetError", ""),
}


@pytest.mark.parametrize("cause", SEEN, ids=lambda cause: cause.__name__)
def test_what_is_refused_says_what_the_docs_say(cause: Callable[[], None]) -> None:
    kind, words = SEEN[cause]
    assert kind in DOCS and words in DOCS
    with pytest.raises(Exception, match=re.escape(words) or None) as seen:
        cause()
    assert kind in type(seen.value).__name__


def test_a_tensor_made_in_the_model_is_no_limit() -> None:
    line = nn.Linear(4, 4)
    backend = rematc.backend("1MB")  # Inductor's graphs are copied, constants and all
    torch.compile(lambda x: line(x * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum(), backend=backend)(
        torch.ones(2, 4)
    ).backward()
    assert line.weight.grad is not None and len(backend.plans) == 1


def by_grad(loss: Callable[..., Tensor], weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.func.grad(loss)(weights, x)["weight"]


def by_vjp(loss: Callable[..., Tensor], weights: dict[str, Tensor], x: Tensor) -> Tensor:
    value, pull = torch.func.vjp(lambda weights: loss(weights, x), weights)
    return pull(torch.ones_like(value))[0]["weight"]  # type: ignore[no-any-return]


def by_jacrev(loss: Callable[..., Tensor], weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.func.jacrev(loss)(weights, x)["weight"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("by", [by_grad, by_vjp, by_jacrev], ids=lambda by: by.__name__)
def test_gradients_that_a_compiled_function_takes_itself_are_said_to_keep_no_budget(
    by: Callable[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    words = "gradients that a compiled function takes itself"
    model = nn.Linear(32, 1)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    given = {name: p.detach() for name, p in model.named_parameters()}
    with caplog.at_level(logging.WARNING, "rematc"):
        run = compiled(lambda x: by(loss, given, x))
        for rows in (256, 64, 128):  # said once
            torch.testing.assert_close(run(batch(rows)), by_grad(loss, given, batch(rows)))
    assert caplog.text.count(words) == 1 and words in DOCS
    with caplog.at_level(logging.WARNING, "rematc"), torch.no_grad():
        compiled(model)(batch())
    assert caplog.text.count(words) == 1


def test_compiled_autograd_is_said_to_run_backward_in_its_own_way(caplog: pytest.LogCaptureFixture) -> None:
    words = "compiled autograd traces the backward pass again"
    model = net().eval()

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()

    with torch._dynamo.config.patch(compiled_autograd=True), caplog.at_level(logging.WARNING, "rematc"):
        run = torch.compile(step, backend=rematc.backend("1MB", inner="eager"))
        for _ in range(3):
            run(batch())
    assert caplog.text.count(words) == 1 and words in DOCS


def test_compiled_autograd_is_not_spoken_of_where_it_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True), caplog.at_level(logging.WARNING, "rematc"):
        run = compiled(net().eval(), "2MB")
        for _ in range(3):
            run(batch()).square().mean().backward()
    assert not caplog.records


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cell(x)[0])
        return out


@pytest.mark.parametrize("allowed", [False, True])
def test_a_recurrent_net_is_compiled_where_torch_is_told_to(
    allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert "`torch._dynamo.config.allow_rnn = True`" in DOCS
    with torch._dynamo.config.patch(allow_rnn=allowed), caplog.at_level(logging.WARNING, "rematc"):
        backend = rematc.backend("1.5MB", inner="eager")
        torch.compile(Recurrent(), backend=backend)(torch.ones(64, 8, 8)).square().mean().backward()
        plans = len(backend.plans)
        assert plans == 1 if allowed else plans <= 1  # torch 2.15 compiles what is around it
        del backend
        torch._dynamo.reset()
        gc.collect()
    words = "nothing was compiled by rematc.backend(budget='1.5MB')"
    assert any(words in m and "allow_rnn is set" in m for m in caplog.messages) is (plans == 0)


class Wide(nn.Module):
    """Each layer is more than what DDP puts into a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 8192), nn.Linear(8192, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())
        return out


@pytest.mark.usefixtures("alone")
def test_a_budget_that_is_too_small_for_a_part_that_ddp_cuts_is_said_too() -> None:
    words = "the smallest that there is a plan for"
    assert "`BackendCompilerFailed`" in DOCS
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words) as seen:
        compiled(DistributedDataParallel(Wide(), bucket_cap_mb=1), "1kB")(batch())
    assert isinstance(seen.value.inner_exception, rematc.BudgetError)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("inside", [False, True])
def test_torch_s_own_modules_that_ddp_wraps_are_compiled_inside_of_it(
    inside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert "DDP(torch.compile(model, backend=...))" in DOCS
    with caplog.at_level(logging.WARNING, "rematc"):
        backend = rematc.backend("1.25MB", inner="eager")
        model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
        if inside:
            run = DistributedDataParallel(torch.compile(model, backend=backend))
        else:
            run = torch.compile(DistributedDataParallel(model), backend=backend)
        run(batch()).square().mean().backward()
        plans = len(backend.plans)
        assert plans == inside
        del backend, run
        torch._dynamo.reset()
        gc.collect()
    assert ("nothing was compiled by rematc.backend(budget='1.25MB')" in caplog.text) is not inside
