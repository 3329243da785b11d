"""The cost of each op: measured where it was, else by roofline. Equal ops (target, shapes, dtypes, strides)
cost the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from rematc.costs.call import Call
from rematc.costs.rates import Rates
from rematc.costs.roofline import flops, is_free, kernel_ns, runtime_ns
from rematc.costs.table import Table
from rematc.costs.workspace import Taken
from rematc.problem import OpCost


@dataclass(frozen=True)
class Prices:
    """What ops cost on a device of those ``rates``; what was measured is by the key of a call.

    >>> rates = Rates(1e10, 5e9, 2e9, 6e9, 4e9, 1e9, 1e11, 8e10, 6e10, 5000)
    >>> Prices(rates).of(fx.Graph().output(None)).runtime_ns
    0
    """

    rates: Rates
    measured_ns: Mapping[Hashable, int] = field(default_factory=dict)
    taken: Mapping[Hashable, Taken] = field(default_factory=dict)

    def of(self, node: fx.Node) -> OpCost:
        """The cost of one op, run alone."""
        if is_free(node):
            return OpCost(0)
        return OpCost(self.runtime_ns(node), self._taken(node).workspace_bytes)

    def result_bytes(self, node: fx.Node) -> int:
        """What results of one op take; 0 where that was not measured."""
        return 0 if is_free(node) else self._taken(node).result_bytes

    def _taken(self, node: fx.Node) -> Taken:
        return self.taken.get(Call.of(node).key, Taken(0, 0)) if self.taken else Taken(0, 0)

    def kernel(self, nodes: Sequence[fx.Node], values: Sequence[fx.Node | None]) -> OpCost:
        """The cost of one kernel that computes ``nodes``, and reads and writes ``values`` alone.

        Its workspace is not there: that depends on strides that only the code knows.
        """
        return OpCost(kernel_ns(nodes, values, self.rates, self.runtime_ns))

    def runtime_ns(self, node: fx.Node) -> int:
        """Nanoseconds of one op, run alone."""
        measured = self.measured_ns.get(Call.of(node).key) if self.measured_ns and not is_free(node) else None
        return runtime_ns(node, self.rates) if measured is None else measured


def time_ops(nodes: Iterable[fx.Node], rates: Rates, table: Table, limit_s: float) -> dict[Hashable, int]:
    """Time each distinct op of ``nodes`` once, for ``limit_s`` seconds at most: first those that matter.

    They matter by the time that all runs together are expected to take, so what is left to
    the roofline when time is up is cheap.
    """
    calls = [(Call.of(node), runtime_ns(node, rates)) for node in nodes if not is_free(node)]
    total: Counter[Hashable] = Counter()
    for call, expected_ns in calls:
        total[call.key] += expected_ns
    first = {call.key: (call, expected_ns) for call, expected_ns in reversed(calls)}
    return table.times(sorted(first.values(), key=lambda c: -total[c[0].key]), limit_s)


def find_taken(nodes: Iterable[fx.Node], table: Table) -> dict[Hashable, Taken]:
    """Bytes that each distinct op of ``nodes`` takes."""
    return table.taken(Call.of(node) for node in nodes if not is_free(node))


def is_ready_made(node: fx.Node) -> bool:
    """Is it a product, a convolution, attention: what compilers call a library for, and fuse nothing into?"""
    return not is_free(node) and flops(node) > 0
