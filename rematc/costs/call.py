"""One call of an op: what its cost depends on."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.capture import PURE_NAMESPACES
from rematc.storages import tensors


@dataclass(frozen=True)
class Call:
    """An op and its arguments, tensors (fake or real) where it takes tensors.

    >>> x = torch.ones(2, 3)
    >>> Call(torch.ops.aten.sin.default, (x,), {}).key == Call(torch.ops.aten.sin.default, (x + 1,), {}).key
    True
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(node: fx.Node) -> Call:
        """The call that an FX node stands for, on the values of the trace."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        return Call(node.target, args, kwargs)

    @property
    def key(self) -> Hashable:
        """Equal for equal calls: the target, and each argument's shape, dtype, strides and device."""
        return (str(self.target), _key(self.args), _key(self.kwargs))

    @property
    def is_of_torch(self) -> bool:
        """Is the op one of torch's own, which compute what their schema says?"""
        return compat.is_overload(self.target) and self.target.namespace in PURE_NAMESPACES

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors among its arguments."""
        return tensors((self.args, self.kwargs))


def _key(arg: Any) -> Hashable:
    if isinstance(arg, torch.Tensor):
        sizes = tuple(compat.hint(s) for s in (*arg.shape, *arg.stride()))
        return ("tensor", sizes, str(arg.dtype), str(arg.device))
    if isinstance(arg, tuple | list):
        return tuple(map(_key, arg))
    if isinstance(arg, dict):
        return tuple((k, _key(v)) for k, v in arg.items())
    return str(arg)
