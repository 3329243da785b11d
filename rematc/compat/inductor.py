"""Inductor's private names. Nothing of Inductor is loaded before it is asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from unittest import mock

from torch import fx

T = TypeVar("T")


def inductor(gm: fx.GraphModule, inputs: Any, *, partitioner: Any, compiler: Any) -> Callable[..., Any]:
    """Inductor with ``partitioner`` as its custom partitioner, and ``compiler`` in place of `compile_graph`.

    AOTAutograd's own cache is passed over: on a hit no partitioner runs, and no plan would be shown.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    patches = {"custom_partitioner_fn": partitioner}
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(gm, inputs, inner_compile=compiler, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def partitioner_base() -> type:
    """The class that Inductor wants a custom partitioner to derive from."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


def compile_graph(module: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    """What Inductor compiles one graph with."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(module, inputs, **settings)


def write_out(node: fx.Node) -> None:
    """Have Inductor write the value of an FX node, not compute it anew in each kernel that reads it."""
    node.meta["inductor_realize_to_strides"] = True


@contextmanager
def scheduling(place: Callable[[list[fx.Node]], tuple[int, int]], name: str) -> Iterator[None]:
    """Have Inductor run kernels in order of their places, and fuse where the second numbers are equal.

    ``place`` gets the FX nodes that a kernel computes something of. Nothing is moved, nor is a buffer kept
    for a later one of its size. ``name`` tells the orders of equal code apart, for Inductor's cache.
    """
    from torch._inductor import config, custom_graph_pass
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    def place_of(kernel: Any) -> tuple[int, int]:
        return place([o for n in kernel.get_nodes() if n.node is not None for o in n.node.origins])

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
    with config.patch({**patches, "allow_buffer_reuse": False}), V.set_choices_handler(Choices()):
        yield


def lowered(
    module: fx.GraphModule, inputs: Any, donated: Any, read: Callable[[Any], T], **settings: Any
) -> T:
    """What ``read`` makes of Inductor's lowering of a copy of ``module``; nothing is compiled or run.

    ``inputs`` are fake tensors; Inductor may write into the memory of those at the positions ``donated``.
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
    with suppress(Stop), config.patch(fx_graph_cache=False), known, stopped:
        compile_graph(twin, list(inputs), static_input_idxs=[], **settings)
    return found[0]


def code(lowering: Any) -> str:
    """The Python code that Inductor writes, for `lowered`."""
    return str(lowering.codegen()[0].value)


def kernels(lowering: Any) -> tuple[tuple[tuple[str, ...], bool], ...]:
    """For `lowered`: the FX nodes of each kernel, in order (if it is ready-made, its own), and is it that?"""
    lowering.init_wrapper_code()
    lowering._update_scheduler()

    def ready_made(part: Any) -> bool:
        return type(part).__name__ != "ComputedBuffer" and part.origin_node is not None

    parts = [[n.node for n in k.get_nodes() if n.node is not None] for k in lowering.scheduler.nodes]
    nodes = ([o.name for p in k for o in ([p.origin_node] if ready_made(p) else p.origins)] for k in parts)
    return tuple(
        (tuple(dict.fromkeys(n)), any(map(ready_made, k))) for n, k in zip(nodes, parts, strict=True)
    )
