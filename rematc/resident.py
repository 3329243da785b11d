"""What is on the device and not of the graphs' making."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.capture import Capture
from rematc.errors import OptionError
from rematc.graph import COLLECTIVES, Graph
from rematc.highest import forget
from rematc.rounding import Rounding, as_cuda, exactly


def resident_bytes(graph: Graph, device: torch.device, others_bytes: int = 0) -> int:
    """Bytes resident before the graph runs: on CUDA as the allocator says, else its inputs and the others."""
    if device.type == "cuda":
        wake_libraries(device)
        return allocated_bytes(device)
    inputs = sum(graph.storage_bytes[s] for s in graph.resident)
    return others_bytes + inputs + _in_flight_bytes(graph)


def allocated_bytes(device: torch.device) -> int:
    """What CUDA's allocator has given out."""
    return int(torch.cuda.memory_allocated(device))


def forget_peak(device: torch.device) -> None:
    """What was measured while compiling is no part of a step, and Inductor tunes by the highest so far."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        forget(device)


_AWAKE: set[tuple[int, torch.device]] = set()  # threads, and devices


def wake_libraries(device: torch.device) -> None:
    """Have cuBLAS take what it keeps for good, 32 MiB on an H200 in each thread that calls it.

    So in this one and in autograd's: it would do so in the first step, after what is resident was read.
    """
    key = threading.get_ident(), device
    if key in _AWAKE or compat.is_in_backward():  # another pass can't be run from within
        return
    _AWAKE.add(key)
    with compat.real_tensors(), torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            a = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            (a @ a).sum().backward()


def _in_flight_bytes(graph: Graph) -> int:
    """On a CPU the two threads of gloo let go of a collective's tensors some time after it was waited for."""
    collectives = [op for op in graph.ops if op.target.partition(".")[0] in COLLECTIVES]
    touched = [{graph.values[v].storage for v in (*op.inputs, *op.outputs)} for op in collectives]
    return sum(sorted(sum(graph.storage_bytes[s] for s in storages) for storages in touched)[-2:])


def epilogue_bytes(joint: fx.GraphModule, captured: Capture, rounded: Rounding = exactly) -> int:
    """Bytes for the copies that autograd makes of gradients once the backward graph is done.

    A gradient becomes ``.grad`` as it is if its strides are its parameter's and nobody shares its
    storage; otherwise it is copied, one after the other. ``rounded``: what the allocator gives for so many.
    """
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
    keys = [_storage(n) for n in captured.gradient_nodes]
    copies = []
    for node, primal, key in zip(captured.gradient_nodes, inputs, keys, strict=False):
        if node is None or key is None:
            continue
        grad, param = node.meta["val"], primal.meta["val"]
        shared = keys.count(key) > 1
        if shared or not _same_layout(grad, param):
            copies.append((rounded(compat.hint(param.numel()) * param.element_size()), shared))
    kept = sum(size for size, shared in copies if shared)
    return kept + max((size for size, shared in copies if not shared), default=0)


def _storage(node: fx.Node | None) -> int | None:
    val = None if node is None else node.meta.get("val")
    return compat.storage_key(val) if isinstance(val, torch.Tensor) else None


def _same_layout(grad: torch.Tensor, param: torch.Tensor) -> bool:
    """Autograd's own rule: the strides agree wherever the size is above one."""
    if not isinstance(param, torch.Tensor) or grad.shape != param.shape:
        return True
    steps = zip(param.shape, grad.stride(), param.stride(), strict=True)
    return all(g == p for size, g, p in steps if compat.hint(size) > 1)


def optimizer_bytes(optimizer: Any, inputs: list[Any]) -> int:
    """Bytes of the state that ``optimizer`` will hold after its first step and does not hold yet.

    ``optimizer`` is an instance, in a wrapper of a framework's or not, or a function that makes one from the
    parameters among ``inputs``. It is run on tensors without memory; yours is not touched. Raises
    `OptionError` if that fails.
    """
    if optimizer is None:
        return 0
    optimizer = _unwrapped(optimizer)
    is_made = hasattr(optimizer, "param_groups")
    held = _state_bytes(optimizer) if is_made and _on_cuda(optimizer) else 0
    with compat.fake_tensors():
        try:
            twin = _twin(optimizer) if is_made else optimizer([_parameter(p) for p in _parameters(inputs)])
            if not hasattr(twin, "state"):
                raise TypeError(f"{twin!r} is no optimizer")
        except Exception as e:
            raise OptionError(
                f"optimizer={optimizer!r}: its state can't be worked out ({type(e).__name__}: {e}); "
                'give reserve="2GB" with the bytes of its state instead'
            ) from e
        try:
            twin.step()
        except Exception:
            # Some optimizers read a number off a tensor once their state is there: that is all we need.
            if not twin.state:
                raise OptionError(
                    f"optimizer={optimizer!r} can't be tried on tensors without memory; "
                    'give reserve="2GB" with the bytes of its state instead'
                ) from None
        return max(0, _state_bytes(twin) - held)


def gradient_bytes(inputs: Iterable[Any], accumulate: bool | None) -> int:
    """Bytes of gradients that are there, beside the new ones, while a step accumulates into them.

    ``accumulate=None``: those that exist now. On CUDA these are in what the allocator says, not counted here.
    """
    kept = [p for p in inputs if isinstance(p, torch.Tensor) and p.requires_grad and p.is_leaf]
    return bytes_beside_new(kept, accumulate)


def bytes_beside_new(leaves: Iterable[torch.Tensor], accumulate: bool | None) -> int:
    """`gradient_bytes` of what keeps its gradients; asked in each step."""
    if accumulate is False:
        return 0
    there = [p for p in leaves if accumulate or p.grad is not None]
    counted = {id(p): _given_bytes(p) for p in there if p.grad is None or not p.is_cuda}
    return sum(counted.values())


def _unwrapped(optimizer: Any) -> Any:
    """Frameworks (Accelerate, Lightning) put an optimizer into one of theirs, which can't be made anew."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _twin(optimizer: Any) -> Any:
    groups = [{**g, "params": [_parameter(p) for p in g["params"]]} for g in optimizer.param_groups]
    return type(optimizer)(groups)


def _parameter(like: torch.Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device=like.device))
    made.grad = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return made


def _parameters(inputs: list[Any]) -> list[torch.Tensor]:
    return [t for t in inputs if isinstance(t, torch.nn.Parameter) and t.requires_grad]


def _state_bytes(optimizer: Any) -> int:
    held = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum(map(_given_bytes, held))


def _given_bytes(tensor: torch.Tensor) -> int:
    """For one of such a size, by the allocator of its device."""
    size = tensor.numel() * tensor.element_size()
    return as_cuda(size) if tensor.is_cuda else size


def _on_cuda(optimizer: Any) -> bool:
    return any(p.device.type == "cuda" for g in optimizer.param_groups for p in g["params"])
