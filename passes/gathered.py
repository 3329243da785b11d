"""Parameters that ranks share are gathered again for the backward pass, not kept for it, as FSDP does.

Where they are gathered inside the graph (compiled collectives, as with parametrized DTensors) a plan would
save whole parameters, which no rank is to have for longer than it computes with them. To gather each twice
is the price, asked for by sharding (Rajbhandari et al. 2020, ZeRO stage 3). It is the same for each plan:
ranks that don't plan alike would wait for each other forever if plans could gather. So forward ops that read
what is gathered have a pin, and run once; unless the user vouches for ranks that plan alike, and leaves it
to the plan (`rematc.regather`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from rematc import compat
from rematc.capture import COLLECTIVE, REGATHERED, must_run, pin_of

STATIC = "rematc_static"  # meta key of inputs that are the same tensors in every step
GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")
WAIT = "wait_tensor"


def mark_static(joint: fx.GraphModule, told: Mapping[str, Any]) -> None:
    """Mark parameters and buffers: what AOTAutograd, by what a partitioner is ``told``, knows to be static.

    It counts the inputs before it takes tensor subclasses apart, and says what each input is taken from.
    """
    static = set(told.get("static_lifetime_input_indices") or ())
    for n, node in enumerate(joint.graph.find_nodes(op="placeholder")):
        if _index_before(node, n) in static:
            node.meta[STATIC] = True


def gathered(joint: fx.GraphModule) -> set[fx.Node]:
    """Ops that gather static inputs, and those that compute from what they gather alone."""
    found, local = set[fx.Node](), set(joint.graph.find_nodes(op="placeholder"))
    local = {n for n in local if n.meta.get(STATIC)}
    for node in joint.graph.nodes:
        sources = set(node.all_input_nodes)
        if node.op != "call_function" or not sources or not sources <= local | found:
            continue
        if _is(node, *GATHERS) or (sources <= found and (_is(node, WAIT) or not must_run(node))):
            found.add(node)
        elif sources <= local and not pin_of(node):
            local.add(node)
    return found


def leave_to_plan(joint: fx.GraphModule) -> None:
    """What ranks share may be gathered, by plans, as often as they like."""
    for node in gathered(joint):
        node.meta[REGATHERED] = True


def groups(joint: fx.GraphModule) -> list[str]:
    """Names of the process groups in which plans gather, in order."""
    collectives = (n for n in joint.graph.nodes if REGATHERED in n.meta and compat.is_overload(n.target))
    return sorted({n.args[-1] for n in collectives if n.target.overloadpacket.__name__ in GATHERS})


def _is(node: fx.Node, *names: str) -> bool:
    return pin_of(node) == COLLECTIVE and node.target.overloadpacket.__name__ in names  # type: ignore[union-attr]


def _index_before(node: fx.Node, default: int) -> int:
    description: Any = node.meta.get("desc")
    while hasattr(description, "base"):
        description = description.base
    return getattr(description, "idx", default)
