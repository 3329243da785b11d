"""Every private torch name that rematc uses, and the torch versions it was checked on.

Nothing else in rematc or rematc.passes, but `rematc.compat_inductor` for Inductor, reaches below torch's
public surface. A name that moves in
a new torch is mended here.
"""

from __future__ import annotations

import functools
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx

from rematc.errors import RematcError

log = logging.getLogger(__name__)

OLDEST = (2, 11)
NEWEST = (2, 15)
TESTED = ((2, 13),)


class TorchVersionError(RematcError, ImportError):
    """This torch is too old for rematc."""


def torch_version(text: str = torch.__version__) -> tuple[int, int]:
    """Major and minor version.

    >>> torch_version("2.13.0+cpu")
    (2, 13)
    """
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


@functools.cache
def check_torch(version: tuple[int, int] | None = None) -> None:
    """Raise `TorchVersionError` for a torch below 2.11; warn once for one that no test has run on.

    >>> check_torch((2, 4))
    Traceback (most recent call last):
    rematc.compat.TorchVersionError: ...
    """
    version = version or torch_version()
    have = ".".join(map(str, version))
    if version < OLDEST:
        raise TorchVersionError(
            f"rematc needs torch {OLDEST[0]}.{OLDEST[1]} or newer, and this is torch {have}: "
            "upgrade with pip install -U torch"
        )
    if version not in TESTED:
        tested = ", ".join(f"{a}.{b}" for a, b in TESTED)
        log.warning("torch %s is untested with rematc (tested: %s)", have, tested)


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

    Torch drops a saved value that no backward op reads when every op runs once. A plan may read it
    all the same, so for the time of the call each is a result of the backward pass as well.
    """
    from torch._functorch.partitioners import _extract_fwd_bwd_modules
    from torch.utils._ordered_set import OrderedSet

    (output,) = joint.graph.find_nodes(op="output")
    results, descriptions = output.args[0], output.meta["desc"]
    output.args = ((*results, *saved),)
    output.meta["desc"] = [*descriptions, *(None for _ in saved)]
    try:
        forward, backward = _extract_fwd_bwd_modules(
            joint,
            list(saved),
            saved_sym_nodes=saved_syms,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_nodes=OrderedSet(),
        )
    finally:
        output.args, output.meta["desc"] = (results,), descriptions
    (ends,) = backward.graph.find_nodes(op="output")
    gradients = len(results) - num_fwd_outputs
    ends.args = (ends.args[0][:gradients],)
    ends.meta["desc"] = ends.meta["desc"][:gradients]
    return forward, backward


def common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """The graph with equal pure ops merged, as torch's own partitioner does first."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(graph)


def is_tangent(node: fx.Node) -> bool:
    """Is this joint-graph input a gradient that arrives with the backward pass?"""
    from torch._functorch.partitioners import _is_tangent

    return bool(_is_tangent(node))


def is_symbolic(value: object) -> bool:
    """Is this a size that only the run knows (SymInt, SymFloat, SymBool)?"""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


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


def overload_packet(target: Any) -> Any:
    """The op that an overload belongs to, the key of torch's FLOP formulas."""
    return target.overloadpacket


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


def fake_mode_of(tensors: Iterable[Any]) -> AbstractContextManager[Any]:
    """The mode that made the first fake tensor among ``tensors``, or one in which tensors have no memory."""
    modes = (getattr(t, "fake_mode", None) for t in tensors)
    return next((m for m in modes if m is not None), None) or fake_tensors()


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


def is_impure(node: fx.Node) -> bool:
    """Must the node run even if nobody reads it? Random ops aside."""
    return bool(node.is_impure(impure_random=False))


def holds_tangents() -> bool:
    """Does AOTAutograd keep the incoming gradients to the end of the backward pass?

    Since torch 2.13 it hands them over in a list that the backward graph empties.
    """
    return torch_version() < (2, 13)


def profiler_is_active() -> bool:
    """Does a torch profiler run in this thread? There can't be a second one."""
    return bool(torch.autograd._profiler_enabled())


def trace_joint(
    gm: fx.GraphModule, inputs: Any, *, inductor_ops: bool, partition_fn: Any, no_backward: Any
) -> None:
    """Run AOTAutograd up to the joint graph and hand that to ``partition_fn``, which must raise.

    ``inductor_ops``: the joint graph as Inductor sees it, decomposed, else in ATen's own ops. A graph in
    which nothing requires a gradient has no joint graph: then ``no_backward`` is called, and must raise.
    """
    if not inductor_ops:
        aot_eager(gm, inputs, partition_fn=partition_fn, compiler=no_backward)
        return
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    from rematc.compat_inductor import partitioner_base

    base: Any = partitioner_base()

    class Partitioner(base):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return partition_fn(*args, **kwargs)

        def uuid(self) -> str:
            return "rematc-trace"

    patches = {"custom_partitioner_fn": Partitioner()}
    with functorch_config.patch(enable_autograd_cache=False):
        compile_fx(gm, inputs, inner_compile=no_backward, config_patches=patches)


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


def user_exception(error: BaseException) -> str | None:
    """What the traced code raised itself, as in "ValueError('bad')"; None for anything else.

    Dynamo reports it as a graph break of a kind of its own, the exception in the words of its message.
    """
    text = str(error)
    if m := re.search(r"Developer debug context: raised exception (.+)", text):
        return m[1]
    m = re.search(r"with fake tensors: .*?: got (\w+\(.*\))$", text, re.MULTILINE)
    return m[1] if m else None


def traced_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where the trace stood in the user's code, outermost first; empty for what Dynamo did not raise."""
    return list(getattr(error, "real_stack", None) or ())


def inner_exception(error: BaseException) -> BaseException | None:
    """What a backend raised, where Dynamo has wrapped it."""
    from torch._dynamo.exc import BackendCompilerFailed

    return error.inner_exception if isinstance(error, BackendCompilerFailed) else None
