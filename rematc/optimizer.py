"""What an optimizer keeps, and what its step takes beside that: found by steps on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rematc import compat
from rematc.errors import OptionError, format_bytes
from rematc.rounding import given_bytes
from rematc.storages import tensors

NUMBER = 0.5  # stands for what is read off a tensor, as the number of the step: no power of a beta is 1 then
STEP = (
    "the optimizer's step needs %s, which is above the budget of %s: it makes %s for a while. No plan "
    "changes that. What to try: fused=True, or foreach=False, where the optimizer is made; or a larger budget"
)


class Needs(NamedTuple):
    """``state_bytes`` will be held after the first step that are not yet; a later one makes ``step_bytes``,
    at the most, that it lets go of; 0 where that can't be found out.
    """

    state_bytes: int = 0
    step_bytes: int = 0


def optimizer_needs(optimizer: Any, inputs: Iterable[Any], *, on_cuda: bool = False) -> Needs:
    """What ``optimizer`` needs beside parameters and gradients.

    It is an instance, in a wrapper of a framework's or not, or a function that makes one from the
    parameters among ``inputs``; None needs nothing. What is run is a twin of it, on tensors without memory,
    as if these were ``on_cuda`` if that is asked for.
    Raises `OptionError` if that fails.

    >>> w = torch.nn.Parameter(torch.ones(4))
    >>> optimizer_needs(torch.optim.Adam([w]), [])
    Needs(state_bytes=36, step_bytes=32)
    """
    if optimizer is None:
        return Needs()
    optimizer = _unwrapped(optimizer)
    with compat.fake_tensors():
        twin = _twin(optimizer, inputs)
        _step_all_at_once(twin, on_cuda)
        with _told(lambda *_: None):
            try:
                twin.step()
            except Exception:
                if not twin.state:  # else it failed once its state was there, and will again
                    raise OptionError(
                        f"optimizer={optimizer!r} can't be tried on tensors without memory; "
                        'give reserve="2GB" with the bytes of its state instead'
                    ) from None
        state_bytes, step_bytes, made = _bytes(_state(twin)) - _there_bytes(optimizer), 0, _Made(_known(twin))
        with suppress(Exception), _told(made.by):
            twin.step()
            step_bytes = made.peak_bytes
    return Needs(max(0, state_bytes), step_bytes)


def said_of_step(there_bytes: int, needs: Needs, budget_bytes: int | None) -> str:
    """Where the step needs more than the budget, with so much there when it begins; else nothing.

    >>> said_of_step(10, Needs(step_bytes=8), 18), said_of_step(10, Needs(step_bytes=9), 18)[:33]
    ('', "the optimizer's step needs 19 B, ")
    """
    needed = there_bytes + needs.step_bytes
    if budget_bytes is None or needed <= budget_bytes or not needs.step_bytes:
        return ""
    return STEP % tuple(map(format_bytes, (needed, budget_bytes, needs.step_bytes)))


class _Made:
    """Storages that ops make, beside those ``known``, and the most bytes of them that were there at once."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self.known = set(map(compat.storage_key, known))
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def by(self, _op: Any, _args: Any, _kwargs: Any, results: Any) -> None:
        """An op has made ``results``."""
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        for t in tensors(results):
            if (key := compat.storage_key(t)) not in self.known:
                self.alive[key] = StorageWeakRef(t.untyped_storage()), given_bytes(t)
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.alive.values()))


@contextmanager
def _told(on_call: Callable[..., object]) -> Iterator[None]:
    """Inside, ops are told to ``on_call``, and tensors without memory have numbers.

    Torch's optimizers step otherwise while something is compiled, as it is when this is asked.
    """
    as_ever = mock.patch.object(torch.compiler, "is_compiling", return_value=False)
    with as_ever, compat.watched(on_call, NUMBER):
        yield


def _unwrapped(optimizer: Any) -> Any:
    """Frameworks (Accelerate, Lightning) put an optimizer into one of theirs, which can't be made anew."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _twin(optimizer: Any, inputs: Iterable[Any]) -> Any:
    try:
        if hasattr(optimizer, "param_groups"):
            groups = [{**g, "params": [_parameter(p) for p in g["params"]]} for g in optimizer.param_groups]
            return type(optimizer)(groups)
        made = optimizer([_parameter(p) for p in inputs if _is_trained(p)])
        if not hasattr(made, "state"):
            raise TypeError(f"{made!r} is no optimizer")
    except Exception as e:
        raise OptionError(
            f"optimizer={optimizer!r}: its state can't be worked out ({type(e).__name__}: {e}); "
            'give reserve="2GB" with the bytes of its state instead'
        ) from e
    return made


def _step_all_at_once(optimizer: Any, on_cuda: bool) -> None:
    """So torch's optimizers do with parameters on CUDA, unless they are told how; but not with fake ones."""
    for group in optimizer.param_groups:
        is_open = group.get("foreach", False) is None and not group.get("fused")
        if is_open and (on_cuda or _is_on_cuda([group])):
            group["foreach"] = True


def _parameter(like: torch.Tensor) -> torch.nn.Parameter:
    """One that is frozen has no gradient, and then no state."""
    made = torch.nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device=like.device))
    made.grad = torch.empty_like(made) if like.requires_grad else None
    return made


def _is_trained(x: Any) -> bool:
    return isinstance(x, torch.nn.Parameter) and x.requires_grad


def _known(optimizer: Any) -> list[torch.Tensor]:
    """Parameters, gradients and state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [*parameters, *(p.grad for p in parameters if p.grad is not None), *_state(optimizer)]


def _state(optimizer: Any) -> list[torch.Tensor]:
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def _there_bytes(optimizer: Any) -> int:
    """Of its state, what is among what CUDA's allocator says is there."""
    is_there = hasattr(optimizer, "param_groups") and _is_on_cuda(optimizer.param_groups)
    return _bytes(_state(optimizer)) if is_there else 0


def _bytes(held: Iterable[torch.Tensor]) -> int:
    return sum(map(given_bytes, held))


def _is_on_cuda(groups: Iterable[dict[str, Any]]) -> bool:
    return any(p.device.type == "cuda" for group in groups for p in group["params"])
