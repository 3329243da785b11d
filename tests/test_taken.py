"""What kernels take beside their results and for them: some leave a number in memory of millions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rematc.costs import Call
from rematc.costs.made_up import arguments
from rematc.costs.workspace import Taken, taken
from rematc.measure import measure
from tests.cases import Case, assert_as_without

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

aten = torch.ops.aten
SIDE = 16


def folded(x: Tensor) -> Tensor:
    image = x[:16].view(2, 1, SIDE, SIDE)
    return F.fold(F.unfold(image, 3, padding=1), (SIDE, SIDE), 3, padding=1).mean()


def scattered(x: Tensor) -> Tensor:
    """As images' features are put among those of text: the mask is the same along each."""
    x = x[:32]
    mask = (torch.arange(len(x)) % 4 == 0)[:, None].expand_as(x)
    return x.cos().masked_scatter(mask, x[: len(x) // 4]).mean()


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x[:64], torch.zeros_like(x[:64]), reduction="sum"),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x[:64], torch.ones_like(x[:64])),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "col2im": folded,
    "masked_scatter": scattered,
}


class Weighed(nn.Module):
    """What a kernel returns is there while what comes after it runs, and runs again."""

    def __init__(self, kernel: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.kernel, self.line = kernel, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.line(x).tanh() * (1 + self.kernel(self.line(x).sin()))).exp().sin().mean()
        return out


@pytest.mark.parametrize("name", KERNELS)
def test_results_that_keep_the_memory_of_what_they_are_made_of_are_in_the_bound(name: str) -> None:
    assert_as_without(Case(partial(Weighed, KERNELS[name]), name))


def test_the_mean_of_losses_is_in_the_memory_of_the_losses() -> None:
    x = torch.ones(1000)
    call = Call(aten.mse_loss.default, (x, x), {})
    assert taken([call])[call.key].result_bytes == x.nbytes
    assert aten.mse_loss(x, x).untyped_storage().nbytes() == x.nbytes  # torch's own doing


def test_of_a_mask_something_is_chosen() -> None:
    """Or kernels would end before they have what they take, but for the numbers that were chosen."""
    grad, mask = torch.ones(100, 32), (torch.arange(100) % 4 == 0)[:, None].expand(100, 32)
    call = Call(aten.masked_scatter_backward.default, (grad, mask, [25, 32]), {})
    measured = measure(lambda: call.target(*call.args), device="cpu", warmup=2)
    assert taken([call])[call.key].workspace_bytes > measured.peak_bytes - 2 * measured.end_bytes


def test_what_reads_memory_that_another_kernel_laid_out_is_not_run_on_made_up_data() -> None:
    """An LSTM's backward pass crashed the process."""
    with mock.patch("rematc.costs.workspace._run") as run:
        assert taken([Call(aten.mkldnn_rnn_layer_backward.default, (torch.ones(2),), {})]) == {}
    assert not run.called


def test_on_cuda_it_is_what_an_op_asks_of_the_allocator() -> None:
    """In whole units; what the allocator has in larger blocks depends on what is free at the time."""
    x = torch.ones(8)
    call = Call(aten.exp.default, (x,), {})
    counts = [{"requested_bytes.all.current": 1000}]
    counts += [{"requested_bytes.all.peak": 1700}, {"requested_bytes.all.current": 1100}]
    with (
        mock.patch("rematc.costs.workspace._cuda_device", return_value=torch.device("cuda", 0)),
        mock.patch.object(torch.random, "fork_rng"),
        mock.patch.object(torch.cuda, "max_memory_allocated", return_value=0),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats") as reset,
        mock.patch.object(torch.cuda, "memory_stats", side_effect=counts),
    ):
        assert taken([call]) == {call.key: Taken(1024, 512, (((8,), (1,)),))}
    assert reset.call_count == 1


def test_attention_s_backward_pass_draws_no_dropout_on_made_up_data() -> None:
    q, row = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4)
    state = (torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long))
    op = aten._scaled_dot_product_efficient_attention_backward.default
    args, _ = arguments(Call(op, (q, q, q, q, None, q, row, *state, 0.1, [True] * 4, True), {}))
    assert args[9] == 0.0 and args[11] is True
    forward = aten._scaled_dot_product_efficient_attention.default
    assert arguments(Call(forward, (q, q, q, None, True, 0.1), {}))[0][5] == 0.1


@pytest.mark.gpu
def test_attention_s_backward_pass_on_a_gpu() -> None:
    q = torch.ones(1, 2, 128, 64, device="cuda")
    state = (torch.zeros((), dtype=torch.long, device="cuda"),) * 2
    op = aten._scaled_dot_product_efficient_attention_backward.default
    call = Call(op, (q, q, q, q, None, q, q[..., 0], *state, 0.1, [True, True, True, False], True), {})
    assert taken([call])[call.key].result_bytes >= 3 * q.nbytes


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    x = torch.ones(1000, 1000, device="cuda")
    calls = [Call(aten.exp.default, (x,), {}), Call(aten.mse_loss.default, (x, x), {})]
    found = taken(calls)
    alone, mean = (found[call.key] for call in calls)
    whole = -(-x.nbytes // 512) * 512
    assert alone == Taken(0, whole, (((1000, 1000), (1000, 1)),))
    assert mean.workspace_bytes + mean.result_bytes >= whole
