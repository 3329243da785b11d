"""Is the promise kept, for this model on this machine? A step under the budget, beside one without rematc."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from rematc.backend import Backend, backend
from rematc.errors import CaptureError, format_bytes
from rematc.measure import measure
from rematc.options import Budget
from rematc.plan import Plan
from rematc.threads import Threads
from rematc.trace import arguments, step_of

Gradients = dict[str, Tensor | None]
LOSS = "the loss"
WARMUP = 3  # a first step compiles, and a second may share the budget among several graphs
TIMED, TIMED_S = 5, 10.0  # steps of each, and seconds after which no more begin


@dataclass(frozen=True)
class Verification:
    """Predicted and measured, bytes with everything resident counted in.

    ``difference`` is the largest between a gradient (or the loss) and that of ``reference``, as a share of
    the largest number there; 0 means that all are the same to the bit. A gradient that is zero but for
    rounding (of a bias before a BatchNorm) can be off by many times that: ``of_largest`` is the largest
    difference as a share of the largest number in any gradient. ``slowdown`` is the time of a step,
    to that of a step of eager PyTorch, the median of up to five of each in turn.

    ``reference`` is "eager PyTorch". For a step that draws random numbers under Inductor it is "Inductor
    alone" where that is nearer: dropout draws others there, whoever plans. What torch's own kernels draw
    (``uniform_``) may be turned in order by Inductor alone, and is not by rematc: a step with both kinds may
    be like neither.
    """

    budget_bytes: int | None
    predicted_bytes: int
    measured_bytes: int
    resident_bytes: int
    reference: str
    difference: float
    differs_most: str
    of_largest: float
    slowdown: float
    plans: tuple[Plan, ...]

    @property
    def fits(self) -> bool:
        """Was the measured peak within the budget?"""
        return self.budget_bytes is None or self.measured_bytes <= self.budget_bytes

    def __str__(self) -> str:
        budget = "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        verdict = "" if self.budget_bytes is None else "within" if self.fits else "OVER THE BUDGET"
        same = f"the same to the bit as those of {self.reference}"
        off = (
            f"off by {self.of_largest:.1e} of the largest number of all\n"
            f"{'':10} and {self.difference:.1e} of the largest in {self.differs_most}; to {self.reference}"
        )
        return "\n".join(
            (
                f"budget     {budget:>12}",
                f"predicted  {format_bytes(self.predicted_bytes):>12}",
                f"measured   {format_bytes(self.measured_bytes):>12}  {verdict}".rstrip(),
                f"resident   {format_bytes(self.resident_bytes):>12}  of that, before the step",
                f"step       {self.slowdown:>11.2f}x  of eager PyTorch's time",
                f"gradients  {off if self.difference else same}",
            )
        )


def verify(
    model: Callable[..., Any],
    inputs: Any,
    budget: Budget,
    loss_fn: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> Verification:
    """Run a step without rematc and one under ``budget``: is the peak within, are the gradients the same?

    ``inputs`` and ``loss_fn`` are as for `rematc.explain`; without a loss function the model must return
    the loss, one number. ``settings`` are those of `rematc.backend`. All steps begin with the same random
    numbers and without gradients. Parameters, buffers, gradients and random number generators are left as
    they were; the step without rematc must fit the machine.

    Raises `BudgetError` where no plan fits, `CaptureError` for a step that is no loss to differentiate.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> found = verify(model, torch.ones(32, 64), "100kB", torch.sum, inner="eager")
    >>> found.fits, found.difference
    (True, 0.0)
    """
    made = _Own(backend(budget, **settings))
    args, kwargs = arguments(inputs)
    run, args = step_of(model, loss_fn, args)
    state = _State(model, run, args, kwargs)
    steps = {"eager PyTorch": _step(state, run, args, kwargs)}
    if made.options.inner == "inductor" and steps["eager PyTorch"].is_random:
        steps["Inductor alone"] = _step(state, torch.compile(_fresh(run)), args, kwargs)
    compiled = torch.compile(_fresh(run), backend=made)
    for _ in range(WARMUP):
        _step(state, compiled, args, kwargs)
    found = _step(state, compiled, args, kwargs)
    with state.kept():

        def step() -> None:
            compiled(*args, **kwargs).backward()
            state.clear()

        measured = measure(step)
    if not made.plans:
        raise CaptureError("nothing was compiled with a backward pass: torch ran the step as it is")
    resident = made.resident_bytes
    there = resident if measured.reserved_bytes is None else measured.resident_bytes or 0
    reference, expected = min(steps.items(), key=lambda step: _furthest(found.numbers, step[1].numbers))
    name, difference = _difference(found.numbers, expected.numbers)
    return Verification(
        budget_bytes=made.plans[0].budget_bytes,
        predicted_bytes=max(plan.peak_bytes for plan in made.plans),
        measured_bytes=there + measured.peak_bytes,
        resident_bytes=resident,
        reference=reference,
        difference=difference,
        differs_most=name,
        of_largest=_of_largest(found.numbers, expected.numbers),
        slowdown=_slowdown(*(partial(_step, state, each, args, kwargs) for each in (compiled, run))),
        plans=tuple(made.plans),
    )


class _Own(Backend):
    """Equal to no other: what was compiled before, for an equal backend, is no proof of anything."""

    def __init__(self, asked: Backend) -> None:
        asked.threads.unused.detach()  # this is the one to be used
        super().__init__(asked.options, Threads(asked.options))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _fresh(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` as code of its own: Dynamo compiles only so many models for the same code."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    return FunctionType(step.__code__.replace(), globals(), step.__name__, None, step.__closure__)


@dataclass(frozen=True)
class _Step:
    """The loss and the gradients of one step, its seconds, and whether it drew random numbers."""

    numbers: Gradients
    seconds: float
    is_random: bool


def _step(state: _State, run: Callable[..., Any], args: Any, kwargs: Any) -> _Step:
    """One step; everything is left as it was."""
    with state.kept():
        before = _random_states()
        start = time.perf_counter()
        loss = run(*args, **kwargs)
        loss.backward()
        if loss.is_cuda:
            torch.cuda.synchronize(loss.device)
        seconds = time.perf_counter() - start
        found = {name: _aside(leaf.grad) for name, leaf in state.leaves.items()}
        states = zip(before, _random_states(), strict=True)
        is_random = not all(torch.equal(a, b) for a, b in states)
        # A copy: to hold what a step returned would be a reason to plan for it.
        return _Step({LOSS: _aside(loss.detach().clone()), **found}, seconds, is_random)


def _slowdown(ours: Callable[[], _Step], plain: Callable[[], _Step]) -> float:
    """The time of a step of ours, to that of a plain one right after it."""
    found, end = list[float](), time.perf_counter() + TIMED_S
    while len(found) < TIMED and (not found or time.perf_counter() < end):
        found.append(ours().seconds / plain().seconds)
    return statistics.median(found)


def _aside(gradient: Tensor | None) -> Tensor | None:
    """Where it is in nobody's way: on a GPU it would be resident to the steps that follow."""
    return gradient.cpu() if gradient is not None and gradient.is_cuda else gradient


class _State:
    """All that a step changes: gradients of whatever the loss depends on, buffers, random numbers."""

    def __init__(self, model: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
        self.leaves: dict[str, Tensor] = {}
        with self.kept():
            loss = run(*args, **kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise CaptureError(
                "verify needs a step that ends in a loss, one number that requires grad: "
                "give loss_fn=, a function of what the model returns"
            )
        parameters = model.named_parameters() if isinstance(model, nn.Module) else ()
        names = {id(p): name for name, p in parameters}
        for n, leaf in enumerate(_leaves(loss)):
            self.leaves[names.get(id(leaf), f"tensor {n} of shape {tuple(leaf.shape)}")] = leaf

    def clear(self) -> None:
        """No gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Without gradients inside; afterwards gradients, buffers and random numbers are what they were."""
        gradients = {name: leaf.grad for name, leaf in self.leaves.items()}
        before = [b.clone() for b in self.buffers]
        cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices=cuda):
            self.clear()
            try:
                yield
            finally:
                for name, leaf in self.leaves.items():
                    leaf.grad = gradients[name]
                with torch.no_grad():
                    for buffer, value in zip(self.buffers, before, strict=True):
                        buffer.copy_(value)


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that a backward pass from ``loss`` gives gradients to, each once."""
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        stack.extend(n for n, _ in node.next_functions)


def _random_states() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _difference(found: Gradients, expected: Gradients) -> tuple[str, float]:
    """Where they differ most, and by what share of the largest number expected there."""
    worst = ("", 0.0)
    for name, gradient in expected.items():
        share = _share(_off(found[name], gradient), _largest(gradient))
        worst = max(worst, (name, share), key=lambda w: w[1])
    return worst


def _of_largest(found: Gradients, expected: Gradients) -> float:
    """The largest difference between two gradients, by the largest number expected in any."""
    gradients = {name: gradient for name, gradient in expected.items() if name != LOSS}
    off = max((_off(found[name], gradient) for name, gradient in gradients.items()), default=0.0)
    return _share(off, max(map(_largest, gradients.values()), default=0.0))


def _furthest(found: Gradients, expected: Gradients) -> float:
    """`_of_largest`, or as much for the loss: gradients may be equal though other numbers were drawn."""
    loss = expected[LOSS]
    return max(_of_largest(found, expected), _share(_off(found[LOSS], loss), _largest(loss)))


def _share(off: float, largest: float) -> float:
    share = off / (largest or 1.0)
    return math.inf if math.isnan(share) else share


def _off(found: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference; infinite where only one is there, or a number is none."""
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    if torch.equal(found, expected):
        return 0.0
    off = float((found - expected).abs().max())
    return math.inf if math.isnan(off) else off


def _largest(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None or not gradient.numel() else float(gradient.abs().max())
