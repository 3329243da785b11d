"""A model and a batch -> the problem that its training step poses, and the plan for it. No step is run."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn

from rematc import compat
from rematc.capture import Capture
from rematc.errors import CaptureError
from rematc.options import Options
from rematc.partition import partition
from rematc.passes import mark_static
from rematc.plan import Plan
from rematc.pose import pose
from rematc.problem import Problem
from rematc.resident import training
from rematc.versions import check_torch

T = TypeVar("T")
NO_LIMIT = Options(budget=None)
OWN, TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)
NOT_BOUND = re.compile(r"TypeError\(.(missing|too many|got an unexpected) .*argument")  # as 2.15 says it
BY_HAND = "what to try: one step without rematc, model(...) and loss.backward(), and mend what fails there"


def pose_model(
    model: Callable[..., Any],
    inputs: Any,
    loss_fn: Callable[[Any], Any] | None = None,
    options: Options = NO_LIMIT,
) -> tuple[Problem, Capture]:
    """Trace a training step of ``model`` and return its problem, and where its parts stand in the graph.

    ``inputs``: a tuple or list of positional arguments, a dict of keyword arguments, or one tensor. With
    ``loss_fn`` the graph is that of ``loss_fn(model(...))``; without, that of the model alone, as
    ``torch.compile(model)`` gets it: every tensor that it returns and that requires grad is a root.

    The trace works on tensors without memory: parameters, buffers, gradients and random number
    generators stay as they are, and the model's mode (train or eval) is the one it is given in.
    Raises `CaptureError` for what can't be traced as one graph, raises itself, or has nothing to
    differentiate, and `OptionError` for a budget that can't be read.

    >>> problem, capture = pose_model(nn.Linear(8, 1), torch.ones(4, 8), loss_fn=torch.sum)
    >>> problem.budget_bytes is None, problem.resident_bytes
    (True, 164)
    """
    captured, problem = _traced(model, inputs, loss_fn, options, pose)
    return problem, captured


def plan_model(
    model: Any,
    inputs: Any,
    loss_fn: Callable[[Any], Any] | None = None,
    options: Options = NO_LIMIT,
) -> tuple[Problem, Plan]:
    """Trace a training step as `pose_model` does, and plan it as the backend would; nothing is compiled.

    Under ``inner="inductor"`` Inductor writes its code for the plan, and the plan's peak is that of the
    code. Raises what `pose_model` does, and `BudgetError` where no plan fits.

    >>> problem, plan = plan_model(nn.Linear(8, 1), torch.ones(4, 8), torch.sum, Options("1kB", "eager"))
    >>> plan.peak_bytes <= 1000
    True
    """
    done = _traced(model, inputs, loss_fn, options, partial(partition, planned=True))
    return done.problem, done.plan


def without_memory() -> AbstractContextManager[Any]:
    """Inside, tensors have shapes and no memory: a model is built, and planned for, that fits nowhere here.

    >>> with without_memory():
    ...     large, x = nn.Linear(100_000, 100_000), torch.ones(8, 100_000)
    ...     problem, _ = plan_model(large, x, torch.sum, Options("80%", costs="h200"))
    >>> problem.resident_bytes > 40_000_000_000
    True
    """
    return compat.without_memory()


def _traced(
    model: Any, inputs: Any, loss_fn: Callable[[Any], Any] | None, options: Options, action: Callable[..., T]
) -> T:
    """What ``action`` makes of the joint graph."""
    check_torch()
    args, kwargs = arguments(inputs)
    tracer = _Tracer(options, action)
    step, args = step_of(model, loss_fn, args)
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=cuda), torch.enable_grad(), compat.quiet_fake_tensors():
        try:
            # dynamic=False: the sizes of this batch, whatever was compiled before.
            torch.compile(step, backend=tracer, fullgraph=True, dynamic=False)(*args, **kwargs)
        except _Stop:
            pass
        except Exception as e:
            raise _refusal(e) from e
    if tracer.error is not None:
        raise tracer.error
    if tracer.made is None:
        raise CaptureError(_nothing_to_differentiate(model))
    return tracer.made


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``inputs`` as positional and keyword arguments; `CaptureError` for what is neither.

    >>> arguments({"x": 1}), arguments([1, 2])
    (((), {'x': 1}), ((1, 2), {}))
    """
    match inputs:
        case torch.Tensor():
            return (inputs,), {}
        case Mapping():
            return (), dict(inputs)
        case tuple() | list():
            return tuple(inputs), {}
    raise CaptureError(
        f"the inputs are of type {type(inputs).__name__}: give a tuple (positional arguments), "
        "a dict (keyword arguments), or one tensor"
    )


def place(frames: list[traceback.FrameSummary]) -> str:
    """The innermost of ``frames`` that is not torch's own: file, line and code; "" if there is none."""
    if not frames:
        return ""
    last = next((f for f in reversed(frames) if not f.filename.startswith(TORCH)), frames[-1])
    return f"\n  at {last.filename}:{last.lineno}, in {last.name}: {(last.line or '').strip()}"


class _Stop(BaseException):
    """Ends the trace. No `Exception`: Dynamo may swallow those and run the step after all."""


class _Tracer(Generic[T]):
    """A backend that keeps what ``action`` makes of the joint graph, and stops."""

    def __init__(self, options: Options, action: Callable[..., T]) -> None:
        self.options, self.action = options, action
        self.made: T | None = None
        self.error: Exception | None = None

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        def partition_fn(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **told: Any) -> Any:
            mark_static(joint, told)
            # Kept, not raised: Dynamo would wrap it in words of its own.
            try:
                beside = training(self.options, inputs)
                self.made = self.action(joint, num_fwd_outputs, self.options, beside)
            except Exception as e:
                self.error = e
            raise _Stop

        trace_joint(gm, inputs, inductor_ops=self.options.inner == "inductor", partition_fn=partition_fn)
        raise _Stop


def trace_joint(gm: fx.GraphModule, inputs: Any, *, inductor_ops: bool, partition_fn: Any) -> None:
    """Run AOTAutograd up to the joint graph and hand that to ``partition_fn``, which must raise.

    ``inductor_ops``: the joint graph as Inductor sees it, decomposed, else in ATen's own ops. A graph in
    which nothing requires a gradient has no joint graph: the trace ends, and nobody is called.
    """
    if not inductor_ops:
        compat.aot_eager(gm, inputs, partition_fn=partition_fn, compiler=_stop)
        return
    base: Any = compat.partitioner_base()

    class Partitioner(base):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return partition_fn(*args, **kwargs)

        def uuid(self) -> str:
            return "rematc-trace"

    compat.inductor(gm, inputs, partitioner=Partitioner(), compiler=_stop)


def _stop(*_: Any, **__: Any) -> Any:
    raise _Stop


def step_of(
    model: Callable[..., Any], loss_fn: Callable[[Any], Any] | None, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step as one function, and its positional arguments.

    Its first argument is called ``self`` for the sake of module paths: Dynamo names modules by where it found
    them, so "layers.0" is "layers.0" with a loss and without.
    """
    if loss_fn is None:
        return model, args

    def step(self: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return loss_fn(self(*args, **kwargs))

    return step, (model, *args)


def _refusal(error: Exception) -> CaptureError:
    """The same in one message: what happened, where in the user's code, and the way out."""
    frames = [f for f in _traced_frames(error) if not f.filename.startswith(OWN)]
    at, text = place(frames), str(error)
    raised = _user_exception(error)
    if "Argument mismatch" in text or (raised and NOT_BOUND.match(raised)):
        function = re.search(r"trace function `?([\w.<>]+)", text)
        name = function[1].strip(".") if function else "a function"
        return CaptureError(
            f"{name!r} is called with arguments that it does not take{at}\n  what to try: a loss_fn "
            "gets what the model returns and nothing else: give lambda out: loss(out, target)"
        )
    if raised:
        return CaptureError(f"the model or its loss raises {raised}{at}\n  {BY_HAND}")
    if (inner := compat.inner_exception(error)) is not None:
        return CaptureError(f"torch can't derive the backward pass: {_named(inner)}{at}\n  {BY_HAND}")
    if not _traced_frames(error):
        at = place(frames_outside_of_torch(error))
        return CaptureError(f"calling the model with its inputs raises {_named(error)}{at}\n  {BY_HAND}")
    said = f"{text.splitlines()[0].strip()}. {_field(text, 'Explanation')}"
    return CaptureError(
        f"the model is not one graph, and explain plans one (rematc.backend takes several): {said}{at}\n"
        f"  what to try: {_hint(text)}take that line out of the forward pass, or skip it there with "
        "`if not torch.compiler.is_compiling():`"
    )


def frames_outside_of_torch(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of ``error`` that are neither torch's nor rematc's nor the import system's."""
    ours = (TORCH, OWN, "<frozen")
    return [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]


def _nothing_to_differentiate(model: Any) -> str:
    head = (
        "nothing to differentiate: no result requires a gradient, so there is no backward pass to plan.\n  "
    )
    look = "look for .detach(), .item(), torch.no_grad(), or a forward pass or loss that returns no tensor"
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    trained = sum(p.requires_grad for p in parameters)
    if parameters and not trained:
        return (
            f"{head}None of the {len(parameters)} parameters requires grad: requires_grad_() those to train"
        )
    if trained:
        return f"{head}{trained} parameters require grad, and no result depends on them: {look}"
    return f"{head}The model has no parameters, and no input that requires grad reaches a result: {look}"


def _user_exception(error: BaseException) -> str | None:
    """What the traced code raised itself, as in "ValueError('bad')"; None for anything else.

    Dynamo reports it as a graph break of a kind of its own, the exception in the words of its message.
    """
    text = str(error)
    if m := re.search(r"Developer debug context: raised exception (.+)", text):
        return re.sub(r"\[ConstantVariable\(\w+: (.+)\)\]", r"\1", m[1])  # as torch 2.11 says it
    m = re.search(r"with fake tensors: .*?: got (\w+\(.*\))$", text, re.MULTILINE)
    return m[1] if m else None


def _traced_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where the trace stood in the user's code, outermost first; empty for what Dynamo did not raise."""
    return list(getattr(error, "real_stack", None) or ())


def _hint(text: str) -> str:
    """The first sentence of Dynamo's first hint, unless it says no more than that something is wrong."""
    hint = re.split(r"(?<!e\.g)\. ", _field(text, "Hint"))[0].rstrip(".")
    useless = ("Your code may", "Please report", "This is likely", "It may be possible")
    return "" if not hint or hint.startswith(useless) else f"{hint}; or "


def _field(text: str, name: str) -> str:
    """The first line of a field of Dynamo's messages; "" if it is not there."""
    found = [line.strip() for line in text.splitlines() if line.strip().startswith(f"{name}:")]
    return found[0].removeprefix(f"{name}:").strip() if found else ""


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "(no message)"
