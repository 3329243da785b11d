"""What is on the device and not of the graphs' making."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from rematc import compat
from rematc.capture import Capture
from rematc.graph import COLLECTIVES, Graph
from rematc.highest import forget
from rematc.optimizer import Needs, local, optimizer_needs
from rematc.options import COSTS, Options
from rematc.rounding import Rounding, exactly, given_bytes
from rematc.storages import lie_alike


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
        is_param = isinstance(param, torch.Tensor) and grad.shape == param.shape
        if shared or (is_param and not lie_alike(grad, param)):  # autograd's own rule
            copies.append((rounded(compat.hint(param.numel()) * param.element_size()), shared))
    kept = sum(size for size, shared in copies if shared)
    return kept + max((size for size, shared in copies if not shared), default=0)


def _storage(node: fx.Node | None) -> int | None:
    val = None if node is None else node.meta.get("val")
    return compat.storage_key(val) if isinstance(val, torch.Tensor) else None


class Training(NamedTuple):
    """Bytes that training takes beside what is there when a graph is compiled.

    ``needs``: of the optimizer, which finds ``stepped_bytes`` of parameters and gradients when it steps.
    ``accumulated_bytes``: `gradient_bytes`.
    """

    needs: Needs = Needs()
    accumulated_bytes: int = 0
    stepped_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Of these, what is there while the graphs run."""
        return self.needs.to_come_bytes + self.accumulated_bytes


NO_TRAINING = Training()


def training(options: Options, inputs: list[Any]) -> Training:
    """What training as ``options`` say takes, for a graph with these ``inputs``."""
    needs = optimizer_needs(options.optimizer, inputs, for_card=options.costs not in COSTS)
    parameters = {id(p): p for p in inputs if isinstance(p, torch.nn.Parameter)}.values()
    stepped = (given_bytes(local(p)) * (1 + p.requires_grad) for p in parameters)
    return Training(needs, gradient_bytes(inputs, options.accumulate), sum(stepped))


def gradient_bytes(inputs: Iterable[Any], accumulate: bool | None) -> int:
    """Bytes of gradients that are there, beside the new ones, while a step accumulates into them.

    ``accumulate=None``: those that exist now. On CUDA these are in what the allocator says, not counted here.
    """
    return bytes_beside_new(_leaves(inputs), accumulate)


def _leaves(inputs: Iterable[Any]) -> list[torch.Tensor]:
    return [p for p in inputs if isinstance(p, torch.Tensor) and p.requires_grad and p.is_leaf]


def bytes_beside_new(leaves: Iterable[torch.Tensor], accumulate: bool | None) -> int:
    """`gradient_bytes` of what keeps its gradients; asked in each step."""
    if accumulate is False:
        return 0
    there = [p for p in leaves if accumulate or p.grad is not None]
    counted = {id(p): given_bytes(p) for p in there if p.grad is None or not p.is_cuda}
    return sum(counted.values())
