"""Every private torch name that rematc uses, as it is in the torch versions of `rematc.versions`.

Nothing else in rematc or rematc.passes reaches below torch's public surface: a name that moves in a new torch
is mended in this package. Here is what traces and runs graphs; `inductor` and `profiler` have a file each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx


def aot_eager(gm: fx.GraphModule, inputs: Any, *, partition_fn: Any, compiler: Any) -> Callable[..., Any]:
    """AOTAutograd with ``compiler`` for both graphs; buffers are mutated inside the forward graph."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        partition_fn=partition_fn,
        keep_inference_input_mutations=True,
    )
    return backend(gm, inputs)


def extract_modules(
    joint: fx.GraphModule, saved: list[fx.Node], saved_syms: list[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules in AOTAutograd's calling convention, ``saved`` between them.

    A saved value that no backward op reads is dropped.
    """
    from torch._functorch.partitioners import _extract_fwd_bwd_modules
    from torch.utils._ordered_set import OrderedSet

    syms: Any = {"saved_sym_nodes": saved_syms, "static_lifetime_input_nodes": OrderedSet()}
    return _extract_fwd_bwd_modules(joint, list(saved), num_fwd_outputs=num_fwd_outputs, **syms)


def common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """The graph with equal pure ops merged, as torch's own partitioner does first."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(graph)


def is_tangent(node: fx.Node) -> bool:
    """Is this joint-graph input a gradient that arrives with the backward pass?"""
    from torch._functorch.partitioners import _is_tangent

    return bool(_is_tangent(node))


def hint(size: int | torch.SymInt) -> int:
    """A whole number for a size: the size itself, or the one that the trace saw."""
    if isinstance(size, int):
        return size
    seen = size.node.maybe_as_int()
    return int(seen if seen is not None else size.node.hint)


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones included."""
    return int(tensor.untyped_storage()._cdata)


def is_higher_order(target: object) -> bool:
    """Is the target an op that carries graphs of its own (cond, scan, flex attention, ...)?"""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_overload(target: object) -> bool:
    """Is the target one overload of a registered torch op?"""
    return isinstance(target, torch._ops.OpOverload)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Leave the tracing modes for a moment: what runs inside makes real tensors."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        yield


def fake_tensors() -> AbstractContextManager[Any]:
    """A mode in which tensors have shapes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, tensors have shapes and no memory, and modules made of them can be moved and cast."""
    mode, swap = fake_tensors(), torch.utils.swap_tensors

    def swap_unknown(a: torch.Tensor, b: torch.Tensor) -> None:
        # The mode knows its tensors by weak references, and what is so referred to can't be swapped.
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()  # type: ignore[attr-defined]
        swap(a, b)

    with mode, mock.patch.object(torch.utils, "swap_tensors", swap_unknown):
        yield


def fake_mode_of(tensors: Iterable[Any]) -> AbstractContextManager[Any]:
    """The mode that made the first fake tensor among ``tensors``, or one in which tensors have no memory."""
    modes = (getattr(t, "fake_mode", None) for t in tensors)
    return next((m for m in modes if m is not None), None) or fake_tensors()


def is_in_backward() -> bool:
    """Does autograd run a backward pass right now, in this thread?"""
    return bool(torch._C._current_graph_task_id() != -1)


def is_traced() -> bool:
    """Do modes watch what runs? Then it may be for show, or end up in a graph."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode() is not None


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any] | None:
    """The graph as Python code that takes one list and empties it; None if this torch writes no such code."""
    codegen = getattr(fx.graph, "_BoxedCodeGen", None)
    if codegen is None:
        return None
    module.graph.set_codegen(codegen())
    module.recompile()
    return module.forward


def is_fake(tensor: torch.Tensor) -> bool:
    """Has the tensor no memory?"""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


@contextmanager
def watched(on_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], object]) -> Iterator[None]:
    """Report each call of an op of torch: op, arguments, keywords."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            on_call(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Watch():
        yield


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep torch from logging a traceback for an op that fails in the trace: the error says it too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def rank_store() -> Any:
    """The key-value store of the processes that train together; None where there is one alone."""
    import torch.distributed as dist

    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.distributed_c10d._get_default_store() if has_others else None


def inner_exception(error: BaseException) -> BaseException | None:
    """What a backend raised, where Dynamo has wrapped it."""
    from torch._dynamo.exc import BackendCompilerFailed

    return error.inner_exception if isinstance(error, BackendCompilerFailed) else None


VERSIONS = "torch._dynamo.config.recompile_limit"
RECURRENT = "torch._dynamo.config.allow_rnn"


def versions_left() -> int | None:
    """Of the function that is compiled right now: so many more are compiled before it is run eagerly.

    None outside of Dynamo. The limit is a setting, `VERSIONS`.
    """
    from torch._guards import CompileContext

    compiled = CompileContext.current_compile_id()
    if compiled is None or compiled.frame_compile_id is None:
        return None
    return int(torch._dynamo.config.recompile_limit - compiled.frame_compile_id - 1)
