"""Values lie in memory as ops really return them, which a trace does not always say.

A trace has an op's strides from a rule that stands beside its kernel, and some rules are wrong: that of
`mse_loss_backward` keeps the strides of its input, the kernel may return those of the target; that of `view`
gives dimensions of size 1 strides of its own. What an op takes while it runs depends on the strides that it
gets, and a view may have none of what it gets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.capture import PURE_NAMESPACES, is_symbolic
from rematc.costs import Call, Layouts, Taken, computes_the_same, is_free
from rematc.passes.strided import AS_STRIDED, PERMUTE, SCATTER, made, order_of
from rematc.storages import fake_mode_of, lie_alike, tensors

log = logging.getLogger(__name__)

CLONE, CONTIGUOUS = torch.ops.aten.clone.default, torch.contiguous_format
TakenBy = Callable[[Iterable[Call]], Mapping[Hashable, Taken]]
Same = Callable[[Call, Call], bool]


def lay_out(joint: fx.GraphModule, taken: TakenBy) -> None:
    """Give values the strides that ops were seen to return, and what is computed from them theirs.

    ``taken`` runs ops. Where an op is there for the strides of the trace alone (a view that can't be had of
    what is really there, a kernel that computes something else of that, code that torch does not know), it
    gets a copy that has them.
    """
    calls = {n: Call.of(n) for n in joint.graph.nodes if n.op == "call_function" and not is_free(n)}
    seen, same = dict(taken(calls.values())), _remembered(computes_the_same)
    traced: dict[fx.Node, Any] = {}  # values as the trace had them, where they are others now
    for node in list(joint.graph.nodes):
        before = node.meta.get("val")
        given = {n: traced[n] for n in node.all_input_nodes if n in traced}
        if given and node.op == "call_function":
            _read_anew(node, given, calls.get(node), same)
            if node in calls and (call := Call.of(node)).key not in seen:
                seen |= taken([call])
        if node in calls and (found := seen.get(Call.of(node).key)):
            node.meta["val"] = _relaid(node.meta["val"], found.layouts)
        if node.op == "call_function" and node not in calls:
            node.meta["val"] = _viewed(node)
        if node.meta.get("val") is not before:
            traced[node] = before


def _remembered(same: Same) -> Same:
    """Layers that are alike have the same calls."""
    found: dict[tuple[Hashable, Hashable], bool] = {}

    def remembered(call: Call, other: Call) -> bool:
        keys = call.key, other.key
        if keys not in found:
            found[keys] = same(call, other)
        return found[keys]

    return remembered


def _read_anew(node: fx.Node, given: Mapping[fx.Node, Any], traced: Call | None, same: Same) -> None:
    """Have ``node`` read values that lie otherwise than those that the trace has, ``given``, or copies.

    ``traced`` is the call in the trace, None of a view. The own value of ``node`` is another if it is a view,
    or lies otherwise itself; a size is the same.
    """
    if _is_for_strides(node):
        _read_copies(node, {n: was for n, was in given.items() if _moved(n.meta["val"], was)})
        val = None if traced else _tried(node)
    elif not _layouts(node.meta.get("val")) or (traced and Call.of(node).key == traced.key):
        return  # a copy is another value, and may lie as the trace has it
    else:
        val = None if traced and not same(traced, Call.of(node)) else _tried(node)
        if val is None:
            _read_copies(node, given)
            val = None if traced else _tried(node)
    if val is not None and (not traced or _layouts(val) != _layouts(node.meta["val"])):
        node.meta["val"] = val


def _moved(val: Any, was: Any) -> bool:
    """Is there a number in another place?"""
    return not all(map(lie_alike, tensors(val), tensors(was)))


def _tried(node: fx.Node) -> Any:
    """What ``node`` makes of what it reads; None where it makes nothing of that."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    try:
        with fake_mode_of(tensors((args, kwargs))), torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as e:  # rules raise what they like, and users write some
        log.info("%s can't be had of what it reads as that lies in memory: %s", node, e)
        return None


def _is_for_strides(node: fx.Node) -> bool:
    """Does it read memory by the strides of the trace, or may it, for all that torch knows?"""
    if not compat.is_overload(node.target):
        return compat.is_higher_order(node.target)
    return node.target in (AS_STRIDED, SCATTER) or node.target.namespace not in PURE_NAMESPACES  # type: ignore


def _read_copies(node: fx.Node, given: Mapping[fx.Node, Any]) -> None:
    """Have ``node`` read copies that lie in memory as what the trace has for those ``given``."""
    for source, was in given.items():
        order = order_of(was)
        with node.graph.inserting_before(node):
            turned = made(PERMUTE, source, order, like=node)
            copy = made(CLONE, turned, like=node, memory_format=CONTIGUOUS)
            back = made(PERMUTE, copy, [order.index(d) for d in range(len(order))], like=node)
        node.replace_input_with(source, back)


def _viewed(node: fx.Node) -> Any:
    """The value of a view, with the strides that its kernel gives dimensions of size 1."""
    val, call = node.meta.get("val"), Call.of(node)
    if not isinstance(val, torch.Tensor) or not call.is_of_torch or 1 not in _layout(val)[0]:
        return val
    try:
        with compat.kernels():
            args, kwargs = fx.node.map_aggregate((call.args, call.kwargs), _without_memory)
            real = call.target(*args, **kwargs)
    except Exception as e:  # as above
        log.info("the strides of %s are those of the trace: %s", node, e)
        return val
    if _layout(real) == _layout(val):
        return val
    strides = [r if n == 1 else s for n, r, s in zip(real.shape, real.stride(), val.stride(), strict=True)]
    with fake_mode_of([val]), torch.no_grad():
        return val.as_strided(val.shape, strides)


def _without_memory(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(*_layout(x), dtype=x.dtype, device="meta")
    return compat.hint(x) if is_symbolic(x) else x


def _layouts(val: Any) -> Layouts:
    return tuple(map(_layout, tensors(val)))


def _layout(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(compat.hint, x.shape)), tuple(map(compat.hint, x.stride()))


def _relaid(val: Any, seen: Layouts) -> Any:
    """The same values laid out as ``seen``, if what was seen has their shapes; itself if they are so."""
    now = _layouts(val)
    if now == seen or [shape for shape, _ in now] != [shape for shape, _ in seen]:
        return val
    strides = iter(seen)

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or _layout(x) == (layout := next(strides)):
            return x
        with fake_mode_of([x]):
            return torch.empty_strided(x.shape, layout[1], dtype=x.dtype, device=x.device)

    return fx.node.map_aggregate(val, one)
