"""Forward passes whose backward passes are to come: of the step that runs, and held from earlier ones.

A step is over when something runs forward after one of its backward passes has begun, or once nobody can ask
for any of them. The calls of the last step of each kind, of each sequence of graphs, stay on record.

In a pipeline (1F1B) one graph runs forward and back in turns, and the call that came first goes back first.
Its steps are as long as the most calls that are open at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from rematc.meters import give_way
from rematc.storages import storages, tensors
from rematc.survey import Survey

G = TypeVar("G", bound=Hashable)


@dataclass
class Call(Generic[G]):
    """One forward pass of a graph: the storages of its inputs and results, and the leaves among its inputs.

    ``kept_bytes``: by the plan that it ran by. ``survey``: of the step that it runs in, if one is made; there
    it is number ``place``.
    """

    graph: G
    kept_bytes: int
    inputs: dict[int, int]
    results: dict[int, int]
    leaves: Sequence[Callable[[], Any]]
    nodes: list[Callable[[], Any]] = field(default_factory=list)  # autograd's, of the results
    is_through: bool = False  # its backward pass has begun
    survey: Survey | None = None
    place: int = 0

    def watched(self, survey: Survey) -> None:
        """``survey`` follows it; its forward pass has just ended.

        What eager autograd runs next tells when its backward pass has: a hook after that itself would hold
        its gradients while it runs.
        """
        self.survey, self.place = survey, survey.calls
        survey.forward_ends()
        nodes = [node for ref in self.nodes if (node := ref()) is not None]
        for then, _ in (following for node in nodes for following in node.next_functions):
            is_leaf = hasattr(then, "variable")  # it accumulates a gradient: the last there is
            if then is not None and not is_leaf and not _is_ours(then):
                then.register_prehook(self.backward_ends)

    def backward_begins(self, gradients: Any) -> None:
        """As autograd says, once for each time that it does."""
        if self.survey and not self.is_through:
            self.survey.backward_begins(self.place, gradients)
        self.is_through = True

    def backward_ends(self, results: Any) -> None:
        """The same; ``results`` are among what it returned."""
        if self.survey:
            survey, self.survey = self.survey, None
            survey.backward_ends(results)

    def node_gone(self, _: Any) -> None:
        """Its results are gone, and with them what autograd kept."""
        if self.survey and not self.is_through:
            give_way()

    @property
    def is_open(self) -> bool:
        """Is what it keeps still there? Not once backward has begun, or nobody can ask for that any more."""
        return not self.is_through and any(node() is not None for node in self.nodes)

    @property
    def has_model(self) -> bool:
        """Is any parameter of its model still there?"""
        return not self.leaves or any(leaf() is not None for leaf in self.leaves)


class Calls(Generic[G]):
    """The ledger of calls.

    ``running``: of the step that runs. ``held``: of earlier steps, never differentiated, and still there.
    ``kinds``: the last step of each kind that had several calls; ``pipelined`` are those of pipelines.
    """

    def __init__(self) -> None:
        self.running: list[Call[G]] = []
        self.held: list[Call[G]] = []
        self.kinds: dict[tuple[G, ...], list[Call[G]]] = {}
        self.pipelined: set[tuple[G, ...]] = set()

    def begins(self) -> bool:
        """Does the next call begin a step? Then the last one is put on record."""
        through = [call for call in self.running if call.is_through]
        self.held = [call for call in self.held if call.is_open]
        if not through and any(call.is_open for call in self.running):
            return False
        if self._in_turns(len(through)):
            return self._slide(len(through))
        self.held += [call for call in self.running if call.is_open]
        self.running = []
        if len(through) > 1:
            self.kinds[tuple(call.graph for call in through)] = through
        self.kinds = {key: kind for key, kind in self.kinds.items() if any(call.has_model for call in kind)}
        return True

    def _in_turns(self, through: int) -> bool:
        """Have the first calls gone back, and the others, of the same graph, not yet?"""
        first, rest = self.running[:through], self.running[through:]
        is_one = len({call.graph for call in self.running}) == 1
        return is_one and bool(rest) and all(c.is_through for c in first) and all(c.is_open for c in rest)

    def _slide(self, through: int) -> bool:
        """The step goes on with the calls that are open; is it the first with so many?"""
        kind = tuple(call.graph for call in self.running)
        is_new = kind not in self.kinds
        self.kinds[kind], self.running = self.running, self.running[through:]
        self.pipelined.add(kind)
        return is_new

    def ran(self, graph: G, args: tuple[Any, ...], results: Any, kept_bytes: int) -> Call[G]:
        """``graph`` ran forward: ``kept_bytes`` are there until its backward pass begins."""
        made = {key for call in self.running for key in call.results}
        inputs = {key: size for key, size in storages(args) if key not in made}
        leaves = [weakref.ref(t) for t in tensors(args) if t.is_leaf and t.requires_grad]
        call = Call(graph, kept_bytes, inputs, dict(storages(results)), leaves)
        for node in _python_nodes({t.grad_fn for t in tensors(results)}):
            call.nodes.append(weakref.ref(node, call.node_gone))
            node.register_prehook(call.backward_begins)
        self.running.append(call)
        return call

    @property
    def open(self) -> list[Call[G]]:
        """All that keep something now."""
        return [call for call in (*self.held, *self.running) if call.is_open]

    @property
    def graphs(self) -> list[G]:
        """Those that run in steps of several calls, each once, in order."""
        return list(dict.fromkeys(graph for kind in self.kinds for graph in kind))

    @property
    def steps(self) -> list[list[int]]:
        """The kinds of steps, each as its graphs by number."""
        numbers = {graph: n for n, graph in enumerate(self.graphs)}
        return [[numbers[graph] for graph in kind] for kind in self.kinds]


def _python_nodes(nodes: Iterable[Any]) -> set[Any]:
    """The graph's own nodes among ``nodes``, or before those: a result that is a view has one of torch's.

    Torch's own can't be watched for being gone.
    """
    found, seen, stack = set(), set(), list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _is_ours(node):
            found.add(node)
        else:
            stack.extend(before for before, _ in node.next_functions)
    return found


def _is_ours(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)
