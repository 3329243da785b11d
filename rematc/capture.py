"""Joint FX graph -> `Graph`: which ops there are, which memory their values stand in, what is pinned.

An op of the `Graph` is a `call_function` node together with the `getitem` nodes that take its
outputs apart. A value is one tensor; which storage it stands in is read off the fake tensors of the
trace, so views (also those that no schema admits to, as `_unsafe_view`) are found.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from rematc import compat
from rematc.errors import CaptureError
from rematc.graph import COLLECTIVES, Graph, Op, Phase, Value
from rematc.pure import is_declared
from rematc.regather import READS_SHARED
from rematc.rounding import Rounding, exactly
from rematc.versions import holds_tangents

SNAPSHOT = "rematc_snapshot"  # meta key of a clone that keeps an input's old value
IN_BACKWARD = "rematc_in_backward"  # meta key of what runs in the backward pass though no tangent reaches it
CHECKPOINTED = "recompute"  # torch's meta key of what stands in `torch.utils.checkpoint`, and its policy
# Ops of these namespaces compute what their schema says and nothing else; others may have effects.
PURE_NAMESPACES = frozenset({"aten", "prims", "prim", "inductor_prims"})
VIEWS = ("slice", "select", "diagonal", "as_strided")
# These copy all of the memory that their first argument stands in; the trace may not know.
WITH_ALL_MEMORY = frozenset(f"aten.{op}" for op in ("copy", *(f"{v}_scatter" for v in VIEWS)))
WAIT = "_c10d_functional.wait_tensor"
COLLECTIVE = "collective"  # the pin of the ops of these namespaces
READS_WHOLE = "rematc_reads_whole"  # meta key of forward ops that read what ranks share
REGATHERED = "rematc_regathered"  # meta key of collectives that a plan may run wherever it likes


@dataclass(frozen=True)
class Capture:
    """A `Graph`, and where its parts stand in the joint graph.

    ``nodes[i]`` are the nodes that op i stands for, in an order in which they can run (a node and the
    getitems that take its outputs apart, or all that a kernel computes), ``value_nodes[v]`` the node
    of value v (None: an output that nobody takes). ``kernels[i]`` is equal for ops that one kernel computes.
    """

    graph: Graph
    nodes: tuple[tuple[fx.Node, ...], ...]
    value_nodes: tuple[fx.Node | None, ...]
    gradient_nodes: tuple[fx.Node | None, ...]
    kernels: tuple[Hashable, ...] = ()


def capture(joint: fx.GraphModule, num_fwd_outputs: int, rounded: Rounding = exactly) -> Capture:
    """Read the joint graph of a training step.

    ``num_fwd_outputs`` of its outputs are the forward pass's, the others gradients.
    ``rounded``: what the allocator gives for so many bytes.
    Raises `CaptureError` for a graph that can't be read.
    """
    check_layouts(joint)
    return _Reader(joint, num_fwd_outputs, rounded).read()


def check_layouts(joint: fx.GraphModule) -> None:
    """Raise `CaptureError` for values of which it is not known what they take, as sparse ones."""
    for node in joint.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.layout != torch.strided:
            raise CaptureError(
                f"op {node.name!r} makes a tensor of layout {val.layout}, and bytes are known of "
                "dense ones alone\n  what to try: dense gradients, as in nn.Embedding(..., sparse=False)"
            )


class _Reader:
    def __init__(self, joint: fx.GraphModule, num_fwd_outputs: int, rounded: Rounding) -> None:
        self.nodes = list(joint.graph.nodes)
        self.rounded = rounded
        (output,) = (n for n in self.nodes if n.op == "output")
        flat = list(output.args[0])
        self.forward_outputs = [n for n in flat[:num_fwd_outputs] if isinstance(n, fx.Node)]
        self.gradient_nodes = [n if isinstance(n, fx.Node) else None for n in flat[num_fwd_outputs:]]
        self.values: list[Value] = []
        self.value_nodes: list[fx.Node | None] = []
        self.index: dict[fx.Node, int] = {}
        self.storage_bytes: list[int] = []
        self.storages: dict[int, int] = {}

    def read(self) -> Capture:
        inputs: list[int] = []
        tangents: list[int] = []
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                (tangents if self._is_tangent(node) else inputs).append(self._value(node))
        ops, nodes = [], []
        for node, phase in self._in_order():
            takers = _takers(node)
            ops.append(self._op(node, takers, phase))
            nodes.append((node, *takers.values()))
        graph = Graph(
            storage_bytes=tuple(self.storage_bytes),
            values=tuple(self.values),
            ops=tuple(ops),
            inputs=tuple(inputs),
            tangents=tuple(tangents),
            outputs=tuple(dict.fromkeys(self.index[n] for n in self.forward_outputs)),
            gradients=tuple(dict.fromkeys(self.index[n] for n in self.gradient_nodes if n is not None)),
            held=tuple(v for v in tangents if self._is_held(v)),
        )
        return Capture(graph, tuple(nodes), tuple(self.value_nodes), tuple(self.gradient_nodes))

    def _is_tangent(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and compat.is_tangent(node)

    def _is_held(self, tangent: int) -> bool:
        """`loss.backward()` holds the gradient of the loss itself; others go once read, if they are."""
        node = self.value_nodes[tangent]
        if node is None or not node.users or holds_tangents():
            return True
        val = node.meta.get("val")
        return isinstance(val, torch.Tensor) and val.dim() == 0

    def _in_order(self) -> Iterator[tuple[fx.Node, Phase]]:
        """Forward ops, then backward ops: those that a tangent reaches.

        What the trace puts behind the first of those and no tangent reaches (a mask for the backward
        pass, the `copy_` into a buffer) could run in forward as well: whether it does, a plan says.
        Only effects of the backward pass itself stay there, and what a policy says is recomputed there.
        """
        calls = [n for n in self.nodes if n.op == "call_function" and not _is_taker(n)]
        reached: set[fx.Node] = {n for n in self.nodes if self._is_tangent(n)}
        for node in self.nodes:
            effect = must_run(node) and "backward" in node.meta.get("partitioner_tag", "")
            if effect or IN_BACKWARD in node.meta or any(i in reached for i in node.all_input_nodes):
                reached.add(node)
        early = {n for n in calls if n not in reached}
        yield from ((n, "forward") for n in calls if n in early)
        yield from ((n, "backward") for n in calls if n not in early)

    def _op(self, node: fx.Node, takers: dict[object, fx.Node], phase: Phase) -> Op:
        reads = [self.index[n] for n in node.all_input_nodes if n in self.index]
        if len(reads) != len(node.all_input_nodes):
            raise CaptureError(f"op {node.name!r} reads a tuple as a whole; rematc can't follow that")
        val = node.meta.get("val")
        if str(node.target).startswith(WAIT):  # it returns what it was given, which the trace does not know
            assert isinstance(val, torch.Tensor)
            self.storages.setdefault(compat.storage_key(val), self.values[reads[0]].storage)
        if (parts := _parts(val)) is not None:
            outputs = [self._value(takers.get(key), v, f"{node.name}#{key}") for key, v in parts.items()]
        else:
            outputs = [self._value(node)]
        if copies_all_memory(node.target):
            self._grow(outputs[0], reads[0])
        pin, needed = pin_of(node), must_run(node)
        return Op(
            name=node.name,
            target=str(node.target),
            inputs=tuple(reads),
            outputs=tuple(outputs),
            phase=phase,
            pin=needed or pin or (READS_SHARED if READS_WHOLE in node.meta else policy_of(node)),
            needed=needed,
            module=module_path(node),
        )

    def _grow(self, value: int, source: int) -> None:
        """The memory of ``value`` is as large as that of ``source``, at least."""
        made, of = (self.values[v].storage for v in (value, source))
        self.storage_bytes[made] = max(self.storage_bytes[made], self.storage_bytes[of])

    def _value(self, node: fx.Node | None, val: Any = None, name: str = "") -> int:
        val = node.meta.get("val") if node is not None and val is None else val
        self.values.append(Value(node.name if node is not None else name, self._storage(val)))
        self.value_nodes.append(node)
        if node is not None:
            self.index[node] = len(self.values) - 1
        return len(self.values) - 1

    def _storage(self, val: object) -> int:
        """Index of the storage that ``val`` stands in; what is no tensor has one of its own, empty."""
        if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
            self.storage_bytes.append(0)
            return len(self.storage_bytes) - 1
        key = compat.storage_key(val)
        if key not in self.storages:
            self.storages[key] = len(self.storage_bytes)
            size = compat.hint(val.untyped_storage().nbytes())
            self.storage_bytes.append(self.rounded(size))
        return self.storages[key]


def pin_of(node: fx.Node) -> str | None:
    """Why the op of this node may not run a second time, in words, or None."""
    target = node.target
    if kernel := compat.started_kernel(target, node.kwargs):
        return (
            None if is_declared(kernel) else "effect: a Triton kernel, which may do anything: see rematc.pure"
        )
    if compat.is_higher_order(target):
        return "effect: a higher-order op, its body is not looked into"
    if not compat.is_overload(target):
        return None  # operator.*, math.*, sizes: pure Python
    namespace = target.namespace  # type: ignore[union-attr]
    if is_collective(target):
        return None if REGATHERED in node.meta else COLLECTIVE
    if is_random(node):
        return "random"
    if compat.schema(target).is_mutable:
        return "mutates"
    if namespace not in PURE_NAMESPACES and not is_declared(target):
        return f"effect: custom op of {namespace!r}, which may do more than its result shows: see rematc.pure"
    return "effect" if node.is_impure(impure_random=False) else None


def copies_all_memory(target: Any) -> bool:
    """Does the op copy all that its first argument stands in, of which that may be a part?

    >>> copies_all_memory(torch.ops.aten.slice_scatter.default)
    True
    """
    return str(target).rpartition(".")[0] in WITH_ALL_MEMORY


def is_collective(overload: Any) -> bool:
    """Does it talk to other processes?"""
    return overload.namespace in COLLECTIVES


def policy_of(node: fx.Node) -> str | None:
    """What a policy of selective checkpointing in the model asks for, if that is to save the result."""
    is_saved = node.meta.get(CHECKPOINTED) is CheckpointPolicy.MUST_SAVE
    return "saved: a checkpoint policy in the model says so" if is_saved else None


def must_run(node: fx.Node) -> str | None:
    """Why the op must run even if nobody reads its result, in words, or None."""
    if node.meta.get(SNAPSHOT):
        return "mutates: keeps the old value of an input that forward overwrites"
    if compat.is_overload(node.target):
        if compat.schema(node.target).is_mutable:
            return "mutates"
        if is_random(node):
            return "random"  # the generator has to move on, for those that draw after it
    return pin_of(node)


def is_random(node: fx.Node) -> bool:
    """Does the op draw random numbers? Attention and dropout with probability zero do not."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = compat.schema(target).arguments
    names = [a.name for a in arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    defaults = {a.name: a.default_value for a in arguments}
    if "dropout_p" in names:
        return given.get("dropout_p", defaults["dropout_p"]) != 0.0
    return True


def is_symbolic(value: object) -> bool:
    """Is this a size that only the run knows (SymInt, SymFloat, SymBool)?"""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def module_path(node: fx.Node) -> str:
    """Path of the module that the op comes from, as in "model.layers.3.mlp"; "" where unknown.

    Dynamo starts it at a variable: L['self'] or L['fn'] for what is compiled itself, which goes without
    saying, and otherwise the name that the user gave, which stays.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^[LG]\['(\w+)'\]", lambda m: "" if m[1] in ("self", "fn") else m[1], path)
    path = path.replace("_modules['", "").replace("['", ".").replace("']", "")
    return path.replace("[", ".").replace("]", "").strip(".")


def _parts(val: object) -> dict[object, Any] | None:
    """What the op of that result returns, by what takes it out: an index, or a user's kernel a name."""
    if isinstance(val, tuple | list):
        return dict(enumerate(val))
    return val if isinstance(val, dict) else None


def _is_taker(node: fx.Node) -> bool:
    """Is this the getitem that takes one output out of a multi-output op?"""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and _parts(source.meta.get("val")) is not None


def _takers(node: fx.Node) -> dict[object, fx.Node]:
    if _parts(node.meta.get("val")) is None:
        return {}
    return {user.args[1]: user for user in node.users if _is_taker(user)}
