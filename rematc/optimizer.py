"""What an optimizer keeps, and what its step takes beside that: found by steps on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rematc import compat
from rematc.errors import OptionError, format_bytes
from rematc.rounding import as_cuda, given_bytes
from rematc.storages import tensors

NUMBER = 1000.5  # stands for what is read off a tensor, as the number of the step: some begin otherwise
STEP = (
    "the optimizer's step needs %s, which is above the budget of %s: it makes %s for a while. No plan "
    "changes that. What to try: fused=True where the optimizer is made, if it has that, or on a GPU "
    "foreach=False; or a larger budget"
)


class Needs(NamedTuple):
    """``state_bytes`` are held after the first step, of which ``there_bytes`` are counted as there by now.

    A later step makes ``step_bytes``, at the most, that it lets go of; 0 where that can't be found out.
    """

    state_bytes: int = 0
    there_bytes: int = 0
    step_bytes: int = 0

    @property
    def to_come_bytes(self) -> int:
        """Of the state."""
        return max(0, self.state_bytes - self.there_bytes)


def optimizer_needs(optimizer: Any, inputs: Iterable[Any], *, for_card: bool = False) -> Needs:
    """What ``optimizer`` needs beside parameters and gradients.

    It is an instance, in a wrapper of a framework's or not, or a function that makes one from the
    parameters among ``inputs``; None needs nothing. What is run is a twin of it, on tensors without memory,
    and ``for_card`` in the way that torch chooses on a GPU. Raises `OptionError` if that fails.

    >>> w = torch.nn.Parameter(torch.ones(4))
    >>> optimizer_needs(torch.optim.Adam([w]), [])
    Needs(state_bytes=36, there_bytes=0, step_bytes=32)
    """
    if optimizer is None:
        return Needs()
    optimizer = _unwrapped(optimizer)
    with compat.fake_tensors(), compat.optimizers_as_ever(for_card):
        twin = _twin(optimizer, inputs)
        with compat.watched(lambda *_: None, NUMBER):
            try:
                twin.step()
            except Exception:
                if not twin.state:  # else it failed once its state was there, and will again
                    raise OptionError(
                        f"optimizer={optimizer!r} can't be tried on tensors without memory; "
                        'give reserve="2GB" with the bytes of its state instead'
                    ) from None
        state_bytes, step_bytes, made = _bytes(_state(twin)), 0, _Made(_known(twin))
        with suppress(Exception), compat.watched(made.by, NUMBER):
            twin.step()
            step_bytes = made.peak_bytes
    return Needs(state_bytes, _there_bytes(optimizer), step_bytes)


def said_of_step(there_bytes: int, needs: Needs, budget_bytes: int | None) -> str:
    """Where the step needs more than the budget, with so much there beside the state; else nothing.

    >>> said_of_step(8, Needs(2, 0, 8), 18), said_of_step(8, Needs(2, 0, 9), 18)[:33]
    ('', "the optimizer's step needs 19 B, ")
    """
    needed = there_bytes + needs.state_bytes + needs.step_bytes
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
            key, size = compat.storage_of(t)
            if key not in self.known:
                self.alive[key] = StorageWeakRef(t.untyped_storage()), as_cuda(size) if t.is_cuda else size
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.alive.values()))


def _unwrapped(optimizer: Any) -> Any:
    """Frameworks (Accelerate, Lightning) put an optimizer into one of theirs, which can't be made anew."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _twin(optimizer: Any, inputs: Iterable[Any]) -> Any:
    try:
        if hasattr(optimizer, "param_groups"):
            groups = [
                {**g, "params": [_parameter(p, p in optimizer.state) for p in g["params"]]}
                for g in optimizer.param_groups
            ]
            return type(optimizer)(groups)
        made = optimizer([_parameter(p) for p in inputs if _is_trained(p)])
        if not (hasattr(made, "state") and hasattr(made, "param_groups")):
            raise TypeError(f"{made!r} is no optimizer")
    except Exception as e:
        raise OptionError(
            f"optimizer={optimizer!r}: its state can't be worked out ({type(e).__name__}: {e}); "
            'give reserve="2GB" with the bytes of its state instead'
        ) from e
    return made


def _parameter(like: torch.Tensor, has_state: bool = False) -> torch.nn.Parameter:
    """One that is frozen has no gradient, and gets no state."""
    shape = local(like).shape
    empty = torch.empty(shape, dtype=like.dtype, device=like.device)
    made = torch.nn.Parameter(empty, requires_grad=like.requires_grad)
    made.grad = torch.empty_like(empty) if like.requires_grad or has_state or like.grad is not None else None
    return made


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor, what is on this rank."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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
    return sum(given_bytes(local(t)) for t in held)


def _is_on_cuda(groups: Iterable[dict[str, Any]]) -> bool:
    return any(p.device.type == "cuda" for group in groups for p in group["params"])
