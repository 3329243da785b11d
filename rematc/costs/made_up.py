"""Made-up data to run an op on: what it takes to run one alone, on tensors like those of the trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.capture import is_symbolic
from rematc.costs.call import Call
from rematc.pure import is_declared

# So begin names of memory that another kernel of a library laid out, as of a recurrent net.
LAID_OUT = ("workspace", "reserve")
DROPOUT, DRAWN_FROM = "dropout_p", ("philox", "rng_state")


def may_run(call: Call) -> bool:
    """Has the op no effect beyond its results, as far as its namespace says, or who wrote it?

    Nor does it take made-up data for what it is not: kernels read without a look what others left them.
    """
    if not call.is_of_torch:
        return is_declared(call.target)
    return not any(argument.name.startswith(LAID_OUT) for argument in compat.schema(call.target).arguments)


def check_room(call: Call, times: int = 2) -> None:
    """Raise `MemoryError` where so many times its arguments would not fit in free memory: those, and results
    of the same size.
    """
    sizes = {t.device: 0 for t in call.tensors()}
    for t in call.tensors():
        sizes[t.device] += compat.hint(t.numel()) * t.element_size()
    for device, size in sizes.items():
        if times * size > _free_bytes(device):
            raise MemoryError(f"its arguments take {size / 1e9:.1f} GB on {device}")


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # a system that does not say
        return math.inf
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), math.inf)


def arguments(call: Call) -> tuple[Any, Any]:
    """Positional ones and keywords, made up.

    Attention's backward pass draws its dropout anew from where a generator stood, a number that some kernels
    read in the CPU's memory and others in the GPU's: a wrong one is no error but the end of the process. So
    none is drawn.
    """
    is_drawn_again = any(name.startswith(DRAWN_FROM) for name in _names(call))
    return undrawn(call) if is_drawn_again else made_up((call.args, call.kwargs))


def undrawn(call: Call) -> tuple[Any, Any]:
    """The same, and attention without its dropout."""
    args, kwargs = made_up((call.args, call.kwargs))
    names = _names(call) or [""] * len(args)
    args = tuple(0.0 if name == DROPOUT else arg for name, arg in zip(names, args, strict=False))
    return args, kwargs | dict.fromkeys(kwargs.keys() & {DROPOUT}, 0.0)


def _names(call: Call) -> list[str]:
    return [a.name for a in compat.schema(call.target).arguments] if call.is_of_torch else []


def made_up(vals: Any) -> Any:
    """``vals``, tensors and collections of them, as real ones: ones, or zeros where they may be indices.

    Of a mask one place is chosen: kernels stop early where none is, and fail where too many are.
    """
    return fx.node.map_aggregate(vals, _one)


def _one(val: Any) -> Any:
    if is_symbolic(val):
        return compat.hint(val)
    if not isinstance(val, torch.Tensor):
        return val
    size, stride = ([compat.hint(x) for x in xs] for xs in (val.shape, val.stride()))
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    fill = torch.ones if val.dtype.is_floating_point or val.dtype.is_complex else torch.zeros
    memory = fill(span, dtype=val.dtype, device=val.device)
    if val.dtype == torch.bool:
        memory[:1] = True
    return torch.as_strided(memory, size, stride)
