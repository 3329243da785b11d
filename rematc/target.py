"""The device that a plan is for: its speed, its memory, its allocator. At hand, or a card from a list."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from rematc import compat
from rematc.cards import card
from rematc.compiled import ALONE, Given
from rematc.costs import (
    Call,
    Prices,
    Rates,
    Table,
    Taken,
    find_taken,
    is_ready_made,
    rates_of,
    rates_of_card,
    time_ops,
)
from rematc.errors import CaptureError
from rematc.options import Options, parse_budget
from rematc.rounding import Rounding, as_cuda, exactly, in_units
from rematc.storages import storages, tensors


@dataclass(frozen=True)
class Target:
    """What a plan must know of a device.

    ``table``: what is measured on it; None for a card that is not at hand. ``memory_bytes``: its own memory,
    None for a CPU's. ``rounded``: what its allocator gives for so many bytes. ``time_s``: ops are timed
    for this long at most (None: not, and what was timed before is not used). ``note``: what a plan made for
    it has to say. ``cache_bytes``: of the card's cache (`rematc.tuning`).
    """

    rates: Rates
    table: Table | None
    memory_bytes: int | None
    rounded: Rounding
    time_s: float | None
    note: str = ""
    cache_bytes: int = 0

    def prices(self, nodes: Iterable[fx.Node], again: Iterable[fx.Node], *, op_by_op: bool) -> Prices:
        """What ``nodes`` cost. ``again`` are those that may be recomputed: they alone are timed.

        Not ``op_by_op``: of those the ready-made kernels alone, and not what they take.
        """
        if self.table is None:
            return Prices(self.rates)
        timed = [node for node in again if op_by_op or is_ready_made(node)]
        times = {} if self.time_s is None else time_ops(timed, self.rates, self.table, self.time_s)
        return Prices(self.rates, times, find_taken(nodes, self.table) if op_by_op else {})

    def taken(self, calls: Iterable[Call]) -> dict[Hashable, Taken]:
        """What calls take and return, by their keys; of none, if the device is not at hand."""
        return {} if self.table is None else self.table.taken(calls)


def target_of(joint: fx.GraphModule, options: Options, folder: Path, given: Given = ALONE) -> Target:
    """The target that ``options`` name, or the device that the graph's values are on.

    What is measured of it is kept in ``folder``; to measure it takes no more than ``given`` leaves.

    Raises `CaptureError` for a graph on several CUDA devices, `OptionError` for a card that isn't known.
    """
    if options.costs not in ("auto", "measured", "roofline"):
        model = card(options.costs)
        note = (
            f"times are estimates for {model.name} from its data sheet; the workspace of its kernels is not "
            "known: leave some reserve"
        )
        return Target(rates_of_card(model), None, model.memory_bytes, as_cuda, None, note)
    device = device_of(joint)
    is_cuda = device.type == "cuda"
    memory_bytes = int(torch.cuda.get_device_properties(device).total_memory) if is_cuda else None
    return Target(
        rates=rates_of(device, folder, _room(joint, options, given, memory_bytes)),
        table=Table(device, folder),
        memory_bytes=memory_bytes,
        rounded=_rounding(device),
        time_s=None if options.costs == "roofline" else options.measure_s,
        cache_bytes=int(torch.cuda.get_device_properties(device).L2_cache_size) if is_cuda else 0,
    )


def _room(joint: fx.GraphModule, options: Options, given: Given, memory_bytes: int | None) -> float:
    """Bytes of the budget beside the graph's inputs and other graphs', and on a GPU no more than are free."""
    budget = given.budget_bytes or parse_budget(options.budget, memory_bytes)
    free = math.inf if memory_bytes is None else torch.cuda.mem_get_info(device_of(joint))[0]
    if budget is None:
        return free
    resident = given.resident_bytes  # the reserve included
    if resident is None:
        vals = [
            n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder") if not compat.is_tangent(n)
        ]
        inputs = dict(storages([t for t in tensors(vals) if t.layout == torch.strided]))
        resident = options.reserve_bytes + given.others_bytes + sum(map(compat.hint, inputs.values()))
    return min(free, budget - resident - given.outside.held_bytes)


def _rounding(device: torch.device) -> Rounding:
    if device.type != "cuda":
        return exactly
    return in_units if compat.has_expandable_segments() else as_cuda


def device_of(joint: fx.GraphModule) -> torch.device:
    """The device of the step: the CUDA device that a value is on, else the CPU."""
    vals = [n.meta.get("val") for n in joint.graph.nodes]
    devices = {v.device for v in vals if isinstance(v, torch.Tensor)}
    accelerators = sorted((d for d in devices if d.type == "cuda"), key=str)
    if len(accelerators) > 1:
        raise CaptureError(f"one graph on several devices ({accelerators}): compile the parts one by one")
    return accelerators[0] if accelerators else torch.device("cpu")
