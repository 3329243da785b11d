"""Every private torch name that rematc uses, as it is in the torch versions of `rematc.versions`.

No other file reaches below torch's public surface. Nothing of Inductor is loaded before it is asked for.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor  # loaded with torch

from rematc.errors import CaptureError

T = TypeVar("T")
log = logging.getLogger(__name__)
OF_DATA = (
    "the graph has a size that depends on data, as that of x[x > 0], or that is marked as if it did "
    "(mark_unbacked): its bytes are known to the run alone\n"
    "  what to try: leave capture_dynamic_output_shape_ops and capture_scalar_outputs of torch._dynamo."
    "config off, as they are by default: the graph ends there, and the parts share the budget. "
    "What is marked by mark_dynamic has a plan for each size"
)


def aot_eager(gm: fx.GraphModule, inputs: Any, *, partition_fn: Any, compiler: Any) -> Callable[..., Any]:
    """AOTAutograd with ``compiler`` for both graphs; buffers are mutated inside the forward graph."""
    from torch._dynamo.backends.common import aot_autograd

    compilers = dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), compiler)
    backend = aot_autograd(**compilers, partition_fn=partition_fn, keep_inference_input_mutations=True)
    return backend(_without_regions(gm), inputs)


def _without_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """With the calls of each `torch.compiler.nested_compile_region` in line, where torch can: from 2.12 on.

    A region would be split by itself, and what it saves would be saved in every plan.
    """
    region = torch.ops.higher_order.invoke_subgraph
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    if not any(graph.find_nodes(op="call_function", target=region) for graph in graphs):
        return gm
    try:
        from torch._higher_order_ops.passes.inline_invoke_subgraph import inline_invoke_subgraph
    except ImportError:
        return gm
    inlined = inline_invoke_subgraph(gm)
    inlined.recompile()
    return inlined


IN_LINE = "torch._dynamo.config.inline_invoke_subgraph"  # Dynamo's own way to that, from 2.12 on


def is_region(joint: fx.GraphModule) -> bool:
    """Is it the graph of a region alone? Of all others AOTAutograd says what it is that they return."""
    (output,) = joint.graph.find_nodes(op="output")
    return "desc" not in output.meta


def extract_modules(
    joint: fx.GraphModule, saved: list[fx.Node], saved_syms: list[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules in AOTAutograd's calling convention; what of ``saved`` is read between."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules
    from torch.utils._ordered_set import OrderedSet

    syms: Any = {"saved_sym_nodes": saved_syms, "static_lifetime_input_nodes": OrderedSet()}
    return _extract_fwd_bwd_modules(joint, list(saved), num_fwd_outputs=num_fwd_outputs, **syms)


def common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """The graph with equal ops merged, as torch's own partitioner does it."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(graph)


def is_tangent(node: fx.Node) -> bool:
    """Is this joint-graph input a gradient that arrives with the backward pass?"""
    from torch._functorch.partitioners import _is_tangent

    return bool(_is_tangent(node))


def hint(size: int | torch.SymInt) -> int:
    """A whole number for a size: the size itself, or the one that the trace saw.

    Raises `CaptureError` where it saw none, as of ``x[x > 0]``.
    """
    if isinstance(size, int):
        return size
    seen = size.node.maybe_as_int()
    seen = seen if seen is not None else size.node.hint
    if seen is None:
        raise CaptureError(OF_DATA)
    return int(seen)


def unmark(sizes: Iterable[int | torch.SymInt]) -> None:
    """Have torch compile anew for other sizes, where these, which are to be fixed, are marked dynamic.

    The marks of all inputs that were traced with them become those of `maybe_mark_dynamic`. Where a torch
    keeps marks elsewhere they stay as they are, and it refuses them in words of its own.
    """
    nodes = [size.node for size in sizes if isinstance(size, torch.SymInt)]
    found = {id(node.shape_env): node.shape_env for node in nodes if hasattr(node, "shape_env")}
    for tracked in (fake for env in found.values() for fake in getattr(env, "tracked_fakes", None) or ()):
        context = getattr(tracked, "symbolic_context", None)
        for part in (context, *getattr(context, "inner_contexts", {}).values()):
            marks = getattr(part, "constraint_sizes", None)
            if isinstance(marks, list):
                marks[:] = [replace(m, warn_only=True) if hasattr(m, "warn_only") else m for m in marks]


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones included."""
    return int(tensor.untyped_storage()._cdata)


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """`storage_key` and bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, hint(storage.nbytes())


def any_gone(storages: Iterable[int]) -> bool:
    """Is any storage gone of which a `StorageWeakRef` has the number? Asked of parameters in each step."""
    expired: Any = torch.UntypedStorage._expired
    return any(map(expired, storages))


def is_higher_order(target: object) -> bool:
    """Is the target an op that carries graphs of its own (cond, scan, flex attention, ...)?"""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_overload(target: object) -> bool:
    """Is the target one overload of a registered torch op?"""
    return isinstance(target, torch._ops.OpOverload)


def schema(overload: Any) -> Any:
    """What an overload says of its arguments, and whether it writes into any."""
    return overload._schema


def overloads(op: object) -> tuple[Any, ...]:
    """Of torch.ops.namespace.name, or of what `torch.library.custom_op` made; () of anything else."""
    if isinstance(op, torch._ops.OpOverloadPacket):
        return tuple(getattr(op, name) for name in op.overloads())
    overload = getattr(op, "_opoverload", op)
    return (overload,) if is_overload(overload) else ()


def is_triton_op(op: Any) -> bool:
    """Did `torch.library.triton_op` make it? Torch traces what is in it, the kernels among that."""
    from torch._library.triton import triton_ops_to_kernels

    return hasattr(op, "_opoverload") and op._qualname in triton_ops_to_kernels


def triton_kernel(op: object) -> Any:
    """The function that a Triton kernel is made of, within what tunes it; None if that is no kernel."""
    if not type(op).__module__.startswith("triton."):
        return None
    while hasattr(op, "fn"):
        op = op.fn
    return op


def started_kernel(target: object, kwargs: Mapping[str, Any]) -> Any:
    """The function of the Triton kernel that a call in a graph starts; None if that starts none."""
    from torch._higher_order_ops import triton_kernel_wrap as of_torch

    if target not in (of_torch.triton_kernel_wrapper_functional, of_torch.triton_kernel_wrapper_mutation):
        return None
    return triton_kernel(of_torch.kernel_side_table.get_kernel(kwargs["kernel_idx"]))


def tracing_context() -> Any:
    """What Dynamo, and whatever it calls, knows of the graph that it compiles now; None outside of it."""
    from torch._guards import TracingContext

    return TracingContext.try_get()


def traced_in(context: Any) -> AbstractContextManager[Any]:
    """Inside, ``context`` is the `tracing_context`."""
    from torch._guards import tracing

    return tracing(context)


def is_cut() -> bool:
    """Does DDP cut the graph that is compiled now? Of each part it asks what AOTAutograd leaves behind."""
    return getattr(tracing_context(), "ddp_optimizer_ctx", None) is not None


def stand_in(value: Any, context: Any) -> Any:
    """The fake tensor, without memory, that Dynamo has a graph traced with in place of an input."""
    known = context.tensor_to_context.get(value) if isinstance(value, torch.Tensor) else None
    if known is None:
        return value
    source = known.tensor_source
    return context.fake_mode.from_tensor(value, symbolic_context=known, source=source, trace=False)


def may_vary(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Is a number of a graph still open? A float is asked of its tensor in each trace, though it is not."""
    return isinstance(number, torch.SymFloat) or bool(number.node.expr.free_symbols)


def restart() -> type[Exception]:
    """What torch raises for Dynamo to begin anew, with a number that is fixed as a constant."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    return TensorifyScalarRestartAnalysis


@contextmanager
def real_tensors() -> Iterator[None]:
    """Leave the tracing modes for a moment: what runs inside makes real tensors."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        yield


@contextmanager
def kernels() -> Iterator[None]:
    """As `real_tensors`; what runs inside is torch's own code, and no rule in Python that stands for it."""
    from torch._dispatch.python import no_python_dispatcher

    with real_tensors(), no_python_dispatcher():
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


def is_in_backward() -> bool:
    """Does autograd run a backward pass right now, in this thread?"""
    return bool(torch._C._current_graph_task_id() != -1)


def is_autograd_compiled() -> bool:
    """Is what runs now a backward pass that compiled autograd has traced?"""
    traces = sys.modules.get("torch._dynamo.compiled_autograd")  # asked in each step: an import takes longer
    names = ("in_compiled_autograd_region", "compiled_autograd_enabled")
    return any([getattr(traces, name, False) for name in names])


def differentiates(gm: fx.GraphModule) -> bool:
    """Does a graph of Dynamo's take gradients itself, as by `torch.func.grad`?"""
    return any("_grad_increment_nesting" in str(node.target) for node in gm.graph.nodes)


def autocast_off() -> AbstractContextManager[Any]:
    """Inside, no op is cast, whatever autocast is around."""
    return torch._C._DisableAutocast()


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
    return isinstance(tensor, FakeTensor)


def is_any_fake(values: Iterable[Any]) -> bool:
    """Is any of them a tensor without memory? Asked of all parameters in each step."""
    return any(issubclass(kind, FakeTensor) for kind in set(map(type, values)))


@contextmanager
def watched(
    on_call: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object], number: float | None = None
) -> Iterator[None]:
    """Report each call of an op of torch: op, arguments, keywords, result.

    Who reads a number off a tensor gets ``number`` if there is one: without memory a tensor has none.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if number is not None and func is torch.ops.aten._local_scalar_dense.default:
                return number
            result = func(*args, **(kwargs or {}))
            on_call(func, args, kwargs or {}, result)
            return result

    with Watch():
        yield


@contextmanager
def optimizers_as_ever(for_card: bool = False) -> Iterator[None]:
    """Inside, torch's optimizers step fake tensors as they would real ones, also while something is compiled.

    They choose by types and devices whether to step all parameters at once, or each by itself.
    ``for_card``: as on a GPU.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch.optim import optimizer

    types, devices = "_foreach_supported_types", "_get_foreach_kernels_supported_devices"
    with compile_lock, ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.compiler, "_is_compiling_flag", False))
        if hasattr(optimizer, types):
            known = [*getattr(optimizer, types), FakeTensor]
            stack.enter_context(mock.patch.object(optimizer, types, known))
        if for_card and hasattr(optimizer, devices):
            known = [*getattr(optimizer, devices)(), "cpu"]
            stack.enter_context(mock.patch.object(optimizer, devices, return_value=known))
        yield


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep torch from logging a traceback for an op that fails in the trace: the error says it too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with mock.patch.object(logger, "disabled", True):
        yield


def rank_store() -> Any:
    """The key-value store of the processes that train together; None where there is one alone."""
    import torch.distributed as dist

    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.distributed_c10d._get_default_store() if has_others else None


def ranks_of(group: str) -> tuple[int, list[int]]:
    """This process among all, and those of the process group of that name, as a collective is told it."""
    import torch.distributed as dist

    process_group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return dist.get_rank(), dist.get_process_group_ranks(process_group)


def inner_exception(error: BaseException) -> BaseException | None:
    """What a backend raised, where Dynamo has wrapped it."""
    from torch._dynamo.exc import BackendCompilerFailed

    return error.inner_exception if isinstance(error, BackendCompilerFailed) else None


VERSIONS = "torch._dynamo.config.recompile_limit"
RECURRENT = "torch._dynamo.config.allow_rnn"
RETRACING = "torch._dynamo.config.compiled_autograd"
DONATED = "torch._functorch.config.donated_buffer"


def versions_left() -> int | None:
    """Of the function that is compiled now, before it is run eagerly (`VERSIONS`); None outside of Dynamo."""
    from torch._guards import CompileContext

    compiled = CompileContext.current_compile_id()
    if compiled is None or compiled.frame_compile_id is None:
        return None
    return int(torch._dynamo.config.recompile_limit - compiled.frame_compile_id - 1)


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, no other thread compiles: AOTAutograd and Inductor rely on Dynamo's lock.

    Others may run compiled code meanwhile, as under Dynamo: torch refuses it where it just traces.
    """
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock, mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        yield


def inductor(gm: fx.GraphModule, inputs: Any, *, partitioner: Any, compiler: Any) -> Callable[..., Any]:
    """Inductor with ``partitioner`` as its custom partitioner, and ``compiler`` in place of `compile_graph`.

    AOTAutograd's own cache is passed over: on a hit no partitioner runs, and no plan would be shown.
    A CPU has no CUDA graphs; where they are asked for, its code is in parts that keep what they were given.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    patches = {"custom_partitioner_fn": partitioner}
    if all(x.device.type == "cpu" for x in inputs if isinstance(x, torch.Tensor)):
        patches["triton.cudagraphs"] = False
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(
            _without_regions(gm), inputs, inner_compile=compiler, config_patches=patches
        )
    return compiled  # type: ignore[no-any-return]


def partitioner_base() -> type:
    """The class that Inductor wants a custom partitioner to derive from."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


def compile_graph(module: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    """What Inductor compiles one graph with.

    What its cache knows a backward graph by does not tell whether the code may write into what was saved.
    Where it must not, the cache is passed over: code from there wrote, and a second backward pass was wrong.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    may_write = donates() and not is_retained()
    with nullcontext() if may_write else config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        return compile_fx_inner(module, inputs, **settings)


def sizes_become_tensors() -> bool:
    """Is Inductor's wrapper one in C++? What sizes it is given become tensors, of 8 bytes on the CPU."""
    from torch._inductor import config

    return bool(config.cpp_wrapper)


def donates() -> bool:
    """May a compiled backward pass write over what was saved? ``retain_graph=True`` is refused then."""
    import torch._functorch.config as functorch_config

    return bool(functorch_config.donated_buffer)


def is_retained() -> bool:
    """Does a backward pass with ``retain_graph=True`` run now? What was saved must not be written into."""
    runs = torch._C._current_graph_task_id() != -1
    return runs and torch._C._autograd._get_current_graph_task_keep_graph()


WRITTEN_OUT = "rematc_written_out"


def write_out(node: fx.Node) -> None:
    """Have Inductor write the value of an FX node, not compute it anew in each kernel that reads it.

    Its own way to ask for that (``inductor_realize_to_strides``) also turns the value to the strides of the
    trace: twice around each convolution, which Inductor computes with the channels last.
    """
    node.meta[WRITTEN_OUT] = True


def is_written_out(node: fx.Node) -> bool:
    """Was it said by `write_out`? Inductor's cache does not ask."""
    return bool(node.meta.get(WRITTEN_OUT))


def lowering_as_asked() -> AbstractContextManager[object]:
    """What `write_out` said is written, and nothing is copied for the sake of strides that nobody needs."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import TensorBox

    lower = GraphLowering.run_node

    def run_node(lowering: Any, node: fx.Node) -> Any:
        if node.op == "placeholder" and any(user.op == "output" for user in node.users):
            # A weight is handed over as it is, not as a copy with the channels last, kept until backward.
            lowering.nodes_prefer_channels_last.discard(node)
        elif lowering.layout_opt and _is_read_by_convolution_s_backward(node):
            # It is made with the channels last, where one made anew of what has not was to be turned twice.
            node.meta["val"] = node.meta["val"].to(memory_format=torch.channels_last)
        result = lower(lowering, node)
        if is_written_out(node) and isinstance(result, TensorBox):  # what only checks something has none
            result.realize()
        return result

    return mock.patch.object(GraphLowering, "run_node", run_node)


def _is_read_by_convolution_s_backward(node: fx.Node) -> bool:
    val = node.meta.get("val")
    is_image = node.op == "call_function" and isinstance(val, torch.Tensor) and val.dim() == 4
    return is_image and any(u.target is torch.ops.aten.convolution_backward.default for u in node.users)


NEAR_BY = 1  # kernels: a product and what is added to it may become one


@contextmanager
def scheduling(place: Callable[[list[fx.Node]], tuple[int, int, int]], name: str) -> Iterator[None]:
    """Have Inductor run kernels in order of their places, and keep what is at different ones apart.

    ``place`` gets the FX nodes that a kernel computes something of: the numbers of its step, of what is fused
    with it, and of what one function of C++ computes at once. Nothing is moved, nor is a buffer kept for
    a later one of its size, and what `write_out` said is written. ``name`` tells the orders of equal code
    apart, for Inductor's cache.
    """
    from torch._inductor import config, custom_graph_pass
    from torch._inductor.choices import InductorChoices
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    def place_of(kernel: Any) -> tuple[int, int, int]:
        return place([o for n in kernel.get_nodes() if n.node is not None for o in n.node.origins])

    def enter(scheduler: Any, kernel: Any) -> Any:
        group = place_of(kernel)[2]
        if group != getattr(scheduler, "rematc_group", group):
            scheduler.flush()
        scheduler.rematc_group = group
        return enter_context(scheduler, kernel)

    def stays_apart(match: Any) -> bool:
        """A product is not put off until something is added to it: what it reads would be kept till then."""
        kernels = [place([node])[1] for node in match.nodes]
        return max(kernels) - min(kernels) > NEAR_BY or prefers_apart(match)

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse(scheduler: Any, a: Any, b: Any, score: Any) -> bool:
            return place_of(a)[1] == place_of(b)[1] and InductorChoices.can_fuse(scheduler, a, b, score)

    class InOrder(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]  # 2.12 on
        def __call__(self, kernels: list[Any]) -> list[Any]:
            ordered = sorted(kernels, key=place_of)
            return list(kernels[0].scheduler.topological_sort_schedule(ordered)) if kernels else kernels

        def uuid(self) -> str:
            return f"rematc-{name}"

        def __reduce__(self) -> tuple[Any, ...]:  # Inductor pickles its settings to name what it caches
            return (str, (self.uuid(),))

    patches = {"_post_fusion_custom_pass": InOrder(), "reorder_for_peak_memory": False}
    settings = config.patch({**patches, "allow_buffer_reuse": False})
    enter_context, prefers_apart = Scheduler.enter_context, post_grad.should_prefer_unfused_addmm
    flushed = mock.patch.object(Scheduler, "enter_context", enter)
    unfused = mock.patch.object(post_grad, "should_prefer_unfused_addmm", stays_apart)
    with settings, flushed, unfused, V.set_choices_handler(Choices()), lowering_as_asked():
        yield


def lowered(
    module: fx.GraphModule, inputs: Any, donated: Any, read: Callable[[Any], T], **settings: Any
) -> T:
    """What ``read`` makes of Inductor's lowering of a copy of ``module``; nothing is compiled or run.

    ``inputs`` are fake tensors; Inductor may write into the memory of those at the positions ``donated``.
    Kernels in C++ have no vectorised bodies.
    """
    from torch._inductor import config, graph

    found: list[T] = []

    class Stop(BaseException):
        pass

    def stop(lowering: Any) -> None:  # between the code and its compiler
        found.append(read(lowering))
        raise Stop

    twin = fx.GraphModule(module, copy.deepcopy(module.graph))  # not its constants, which are no fake tensors
    twin.meta = dict(module.meta)
    (output,) = twin.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = []
    known = mock.patch.object(graph, "get_donated_idxs", return_value=list(donated))
    stopped = mock.patch.object(graph.GraphLowering, "compile_to_module", stop)
    # CUDA graphs have parts, and call them; for a wrapper in C++ a first pass in Python keeps kernels.
    whole = config.patch({"fx_graph_cache": False, "graph_partition": False, "triton.store_cubin": False})
    with compiling(), suppress(Stop), whole, known, stopped, without_vectors():
        compile_graph(twin, list(inputs), static_input_idxs=[], **settings)
    return found[0]


def without_vectors() -> AbstractContextManager[object]:
    """Inside, Inductor writes the scalar bodies of C++ kernels alone, in this thread: a quarter less work.

    They decide which buffers there are, and what is done in place; the others come after.
    """
    from torch._inductor.codegen import cpp
    from torch._inductor.scheduler import SchedulerNode
    from torch._inductor.virtualized import V

    vectorised, write, mine = getattr(cpp, "CppVecKernel", ()), SchedulerNode.codegen, threading.get_ident()

    def codegen(node: Any, index_vars: Any) -> None:  # what another thread writes meanwhile will run
        if threading.get_ident() != mine or not isinstance(V.kernel, vectorised):
            write(node, index_vars)

    return mock.patch.object(SchedulerNode, "codegen", codegen)


def scheduled(lowering: Any) -> list[Any]:
    """For `lowered`: Inductor's kernels, in order."""
    lowering.init_wrapper_code()
    lowering._update_scheduler()
    return list(lowering.scheduler.nodes)


def origins_of_buffers(lowering: Any) -> dict[str, list[fx.Node]]:
    """For `lowered`, once its code is written: the FX nodes that each buffer is computed from.

    Empty where a torch says that in another way: then it is not known which op needs what.
    """
    with suppress(AttributeError):
        parts = [n for kernel in lowering.scheduler.nodes for n in kernel.get_nodes() if n.node is not None]
        return {name: list(n.node.origins) for n in parts for name in n.get_buffer_names()}
    return {}


@functools.cache  # it tells of each block that there is
def has_expandable_segments() -> bool:
    """Does CUDA's allocator grow its segments, as PYTORCH_CUDA_ALLOC_CONF may ask for?"""
    with suppress(RuntimeError):  # another allocator may tell nothing
        return bool(torch.cuda.memory._snapshot().get("allocator_settings", {}).get("expandable_segments"))
    return False


def profiler_is_active() -> bool:
    """Does a torch profiler run in this thread? There can't be a second one."""
    return bool(torch.autograd._profiler_enabled())


def allocations(step: Callable[[], object]) -> list[int]:
    """Bytes that the CPU's allocator gives out for ``step()``, below zero where it takes them back, in order.

    By the profiler that torch had before Kineto's: it has no clock to share, so it may run in one thread
    while a profile is taken in another, in which nothing is seen of this one's.
    """
    autograd, profiler = torch._C._autograd, torch.autograd
    if not hasattr(autograd, "_enable_profiler_legacy"):
        _say_untold()
        return []
    state = profiler.ProfilerState.CPU
    shapes, memory, stack, flops, modules = False, True, False, False, False
    config = profiler.ProfilerConfig(
        state, shapes, memory, stack, flops, modules, torch._C._profiler._ExperimentalConfig()
    )
    autograd._enable_profiler_legacy(config)
    try:
        result = step()
    finally:
        events = [event for of_thread in autograd._disable_profiler_legacy() for event in of_thread]
    del result  # held until here: what it keeps is given out
    return [event.cpu_memory_usage() for event in events if str(event.kind()) == "memory_alloc"]


@functools.cache
def _say_untold() -> None:
    log.warning("this torch does not say what an op allocates: a step may take more than its plan says")


@contextmanager
def before_profiles(call: Callable[[], object]) -> Iterator[None]:
    """Inside, ``call`` is called before anybody starts a profile."""

    def first(then: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            call()
            return then(*args, **kwargs)

        return called

    module = torch.autograd.profiler
    with ExitStack() as stack:
        for name in ("_prepare_profiler", "_enable_profiler"):
            stack.enter_context(mock.patch.object(module, name, first(getattr(module, name))))
        yield
