"""`pose_model`: the problem that the backend would pose, nothing touched, and refusals with the way out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from rematc import trace
from rematc.errors import CaptureError, OptionError
from rematc.options import Inner, Options
from rematc.trace import pose_model
from tests.zoo import ZOO, step

EAGER = Options(None, "eager")


class Odd(nn.Module):
    """A linear layer, and then whatever ``after`` does."""

    def __init__(self, after: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(4, 4), after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.linear(x))


def refusal(after: Callable[[Tensor], Any] = lambda y: y, inputs: Any = None, **given: Any) -> str:
    with pytest.raises(CaptureError) as e:
        pose_model(Odd(after), torch.ones(2, 4) if inputs is None else inputs, options=EAGER, **given)
    return str(e.value)


@pytest.mark.parametrize("name", ["mlp", "unet", "gpt2"])
def test_it_is_the_problem_that_the_backend_poses(name: str) -> None:
    torch._dynamo.reset()
    case = ZOO[name]()
    problem, captured = pose_model(case.model, case.inputs, options=EAGER)
    backend = rematc.backend(None, inner="eager")
    step(case, torch.compile(case.model, backend=backend, fullgraph=True))
    assert captured.graph == problem.graph == backend.problems[0].graph


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_no_step_is_run(inner: Inner) -> None:
    case = ZOO["unet"]()
    before, rng = copy.deepcopy(case.model.state_dict()), torch.get_rng_state()
    assert any("num_batches_tracked" in name for name in before)
    problem, _ = pose_model(case.model, case.inputs, case.loss, Options(None, inner))
    assert problem.graph.backward_steps
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(before[name], now) for name, now in case.model.state_dict().items())
    assert all(p.grad is None for p in case.model.parameters())
    assert case.model.training


def test_the_mode_of_the_model_is_as_given() -> None:
    case = ZOO["unet"]()
    training, _ = pose_model(case.model, case.inputs, options=EAGER)
    case.model.eval()
    resting, _ = pose_model(case.model, case.inputs, options=EAGER)
    assert any(op.pin == "random" for op in training.graph.ops)
    assert not any(op.pin == "random" for op in resting.graph.ops)


def test_inputs_by_position_by_name_and_alone_are_the_same() -> None:
    x = torch.ones(2, 4)
    model = Odd(torch.relu)
    problems = [pose_model(model, inputs, options=EAGER)[0] for inputs in (x, (x,), [x], {"x": x})]
    assert len({p.digest for p in problems}) == 1


def test_the_loss_is_in_the_graph_and_modules_keep_their_paths() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    problem, _ = pose_model(model, torch.ones(2, 4), lambda y: y.exp().sum(), EAGER)
    assert {"aten.exp.default", "aten.sum.default"} <= {op.target for op in problem.graph.ops}
    assert {op.module for op in problem.graph.ops} >= {"0", "1", "2"}
    assert len(problem.graph.outputs) == 1


def test_a_second_batch_of_another_size_has_its_own_sizes() -> None:
    model = Odd(torch.relu)
    small, large = (pose_model(model, torch.ones(n, 4), options=EAGER)[0] for n in (2, 8))
    assert 2 * 4 * 4 in small.graph.storage_bytes
    assert 8 * 4 * 4 in large.graph.storage_bytes


def test_under_no_grad_the_step_is_still_one_of_training() -> None:
    with torch.no_grad():
        problem, _ = pose_model(Odd(torch.relu), torch.ones(2, 4), options=EAGER)
    assert problem.graph.backward_steps


def test_nothing_differentiable_says_where_to_look() -> None:
    frozen = Odd(torch.relu).requires_grad_(False)
    for inner in ("eager", "inductor"):
        with pytest.raises(CaptureError, match=r"None of the 2 parameters requires grad"):
            pose_model(frozen, torch.ones(2, 4), options=Options(None, inner))  # type: ignore[arg-type]
    assert "2 parameters require grad, and no result depends on them: look for .detach()" in refusal(
        lambda y: y.detach()
    )
    assert "nothing to differentiate" in refusal(lambda y: 3)
    with pytest.raises(CaptureError, match="no parameters"):
        pose_model(lambda x: x, torch.ones(2), options=EAGER)


def test_an_error_in_the_user_s_code_is_named_with_its_line() -> None:
    def fails(y: Tensor) -> Tensor:
        raise ValueError("no such thing")  # the line

    message = refusal(fails)
    assert "ValueError('no such thing')" in message
    assert f"{__file__}:" in message and "# the line" in message
    assert "what to try" in message


def test_shapes_that_do_not_fit_are_named_and_torch_logs_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        message = refusal(lambda y: y @ torch.ones(7, 7))
    assert "[2, 4] X [7, 7]" in message and "torch.ones(7, 7)" in message
    assert not caplog.records


@pytest.mark.parametrize("said", ["ValueError('bad')", "ValueError([ConstantVariable(str: 'bad')])"])
def test_what_the_user_s_code_raised_is_read_of_every_torch(said: str) -> None:
    error = RuntimeError(f"Developer debug context: raised exception {said}")
    assert "raises ValueError('bad')" in str(trace._refusal(error))


def test_arguments_that_do_not_fit_are_named() -> None:
    assert "takes 2 positional arguments but 3 were given" in refusal(inputs=(torch.ones(2, 4), 1))
    assert "lambda out: loss(out, target)" in refusal(loss_fn=nn.MSELoss())
    assert "type int: give a tuple" in refusal(inputs=3)


@pytest.mark.parametrize(
    "said",
    [
        "Explanation: Argument mismatch when attempting to trace function forward.",
        "Developer debug context: raised exception TypeError('missing required positional argument: target')",
    ],
)
def test_that_arguments_do_not_fit_is_read_of_every_torch(said: str) -> None:
    assert "lambda out: loss(out, target)" in str(trace._refusal(RuntimeError(said)))


def test_a_graph_break_names_the_line_and_what_to_try() -> None:
    def speaks(y: Tensor) -> Tensor:
        print("a graph break")
        return y

    message = refusal(speaks)
    assert "not one graph" in message and 'print("a graph break")' in message
    assert "is_compiling" in message
    assert "internal stack trace" not in message


def test_a_budget_in_percent_needs_a_device_with_memory_of_its_own() -> None:
    with pytest.raises(OptionError, match="on the CPU"):
        pose_model(Odd(torch.relu), torch.ones(2, 4), options=Options("80%", "eager"))


def test_the_state_of_the_optimizer_counts_as_resident() -> None:
    model = Odd(torch.relu)
    plain, adam = (
        pose_model(model, torch.ones(2, 4), options=Options(None, "eager", 0, optimizer))[0].resident_bytes
        for optimizer in (None, torch.optim.AdamW)
    )
    assert adam >= plain + 2 * 4 * sum(p.numel() for p in model.parameters())
