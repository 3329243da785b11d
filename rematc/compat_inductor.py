"""The private names of Inductor that rematc uses: how it is called, and what is asked of its scheduler.

Like `rematc.compat`, whose versions hold here too. Nothing of Inductor is loaded before it is needed.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar
from unittest import mock

from torch import fx

T = TypeVar("T")
STEP = "rematc_step"  # meta key: the number of a node's step in the plan, and of the kernel that it is in


def inductor(gm: fx.GraphModule, inputs: Any, *, partitioner: Any) -> Callable[..., Any]:
    """Inductor with ``partitioner`` as its custom partitioner.

    AOTAutograd's own cache is passed over: on a hit no partitioner runs, and no plan would be shown.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        is_planned = any(STEP in n.meta for n in module.graph.nodes)  # a graph without gradients is not
        with as_planned(module) if is_planned else nullcontext():
            return compile_fx_inner(module, *args, **kwargs)

    patches = {"custom_partitioner_fn": partitioner}
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


@contextmanager
def as_planned(module: fx.GraphModule) -> Iterator[None]:
    """Have Inductor keep to the plan: what is fused, and the order, follow the steps of the nodes.

    Steps are in the meta data of the nodes of ``module`` (`STEP`). What is in
    different kernels there is not fused: that would keep alive what the plan lets go of. A buffer is not
    kept for a later one of its size: it would be alive for nothing.
    """
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse(scheduler: Any, a: Any, b: Any, score: Any) -> bool:
            return _place(a)[1] == _place(b)[1] and InductorChoices.can_fuse(scheduler, a, b, score)

    places = repr([n.meta.get(STEP) for n in module.graph.nodes])
    patches = {
        "_post_fusion_custom_pass": in_order_of_steps(hashlib.sha256(places.encode()).hexdigest()),
        "reorder_for_peak_memory": False,
        "allow_buffer_reuse": False,
    }
    with config.patch(patches), V.set_choices_handler(Choices()):
        yield


def in_order_of_steps(name: str) -> Any:
    """A pass for Inductor's scheduler: kernels by the steps of the plan, as far as their inputs allow.

    ``name`` tells plans apart whose graphs have the same code, for Inductor's cache.
    """
    from torch._inductor.custom_graph_pass import CustomSchedulerPass

    class InOrder(CustomSchedulerPass):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            ordered = sorted(nodes, key=_place)
            return list(nodes[0].scheduler.topological_sort_schedule(ordered)) if nodes else nodes

        def uuid(self) -> str:
            return f"rematc-in-order-{name}"

        def __reduce__(self) -> tuple[Any, ...]:  # Inductor pickles its settings to name what it caches
            return (in_order_of_steps, (name,))

    return InOrder()


def write_out(node: fx.Node) -> None:
    """Have Inductor write the value of an FX node, not compute it anew in each kernel that reads it."""
    node.meta["inductor_realize_to_strides"] = True


def _place(node: Any) -> tuple[int, int]:
    """The last step of the plan that a scheduled node computes something of, and that step's kernel."""
    parts = [n.node for n in node.get_nodes() if n.node is not None]
    return max((_place_of(origin) for part in parts for origin in part.origins), default=(-1, -1))


def _place_of(node: fx.Node) -> tuple[int, int]:
    """The place of an FX node; one that Inductor put in for others waits for all that it reads."""
    if STEP not in node.meta:
        node.meta[STEP] = max(map(_place_of, node.all_input_nodes), default=(-1, -1))
    place: tuple[int, int] = node.meta[STEP]
    return place


def kernels_of(
    module: fx.GraphModule, inputs: Sequence[Any], *, backward: bool
) -> tuple[tuple[str, ...], ...]:
    """For each kernel that Inductor makes of ``module``, in order: names of the FX nodes that it computes."""

    def read(graph: Any) -> tuple[tuple[str, ...], ...]:
        graph.init_wrapper_code()
        graph._update_scheduler()
        return tuple(map(_computed_by, graph.scheduler.nodes))

    return _lowered(module, inputs, backward, read)


def code_of(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    backward: bool,
    planned: bool,
    donated: Iterable[int] = (),
) -> str:
    """The Python code that Inductor writes for ``module``.

    ``planned``: it keeps to the plan (`as_planned`), else it does what it would without us. ``donated``:
    positions of the inputs whose memory is the graph's to write into.
    """
    known = mock.patch("torch._inductor.graph.get_donated_idxs", return_value=list(donated))
    with known, as_planned(module) if planned else nullcontext():
        return _lowered(module, inputs, backward, lambda graph: str(graph.codegen()[0].value))


def _lowered(module: fx.GraphModule, inputs: Sequence[Any], backward: bool, read: Callable[[Any], T]) -> T:
    """What ``read`` makes of Inductor's `GraphLowering` of a copy of ``module``; nothing is compiled or run.

    ``inputs`` are fake tensors with the strides that there will be. Stops Inductor at the one place between
    its code and the compiler.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    found: list[T] = []

    class Stop(BaseException):
        pass

    def stop(graph: Any) -> None:
        found.append(read(graph))
        raise Stop

    twin = copy.deepcopy(module)
    (output,) = twin.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = []
    try:
        with config.patch(fx_graph_cache=False), mock.patch.object(GraphLowering, "compile_to_module", stop):
            compile_fx_inner(twin, list(inputs), static_input_idxs=[], is_backward=backward)
    except Stop:
        pass
    return found[0]


def _computed_by(node: Any) -> tuple[str, ...]:
    """Names of the FX nodes whose values a scheduled (fused) node computes.

    A call of a ready-made kernel carries the origins of what it reads as well: there only its own counts.
    """
    names: dict[str, None] = {}
    for part in (n.node for n in node.get_nodes() if n.node is not None):
        ready_made = type(part).__name__ != "ComputedBuffer"
        own = [part.origin_node] if ready_made and part.origin_node is not None else part.origins
        names.update(dict.fromkeys(origin.name for origin in own))
    return tuple(names)


def partitioner_base() -> type:
    """The class that Inductor wants a custom partitioner to derive from."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn
