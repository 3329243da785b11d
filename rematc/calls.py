"""One forward pass of a compiled graph, whose backward pass may come: what it keeps, made and reads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from rematc.meters import give_way
from rematc.storages import Followed
from rematc.survey import Survey

G = TypeVar("G", bound=Hashable)


@dataclass(eq=False, slots=True)
class Call(Generic[G]):
    """One forward pass of a graph: the storages of its inputs and results, and the leaves among its inputs.

    ``kept_bytes``: by the plan that it ran by. ``given``: bytes of the gradients that it hands to calls whose
    results it reads. ``left_bytes``: of its results, those that somebody still has while an earlier call goes
    back. ``survey``: of the step that it runs in, if one is made; there it is number ``place``.
    """

    graph: G
    kept_bytes: int
    inputs: dict[int, int]
    results: dict[int, int]
    leaves: Sequence[Callable[[], Any]]
    made: Followed
    nodes: list[Callable[[], Any]] = field(default_factory=list)  # autograd's, of the results
    given: list[tuple[Call[G], int]] = field(default_factory=list)
    went_back: int = 0  # its backward pass has begun: the number of that, by time
    left_bytes: int = 0
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
        self.nodes = [weakref.ref(node, self.node_gone) for node in nodes]
        for then, _ in (following for node in nodes for following in node.next_functions):
            is_leaf = hasattr(then, "variable")  # it accumulates a gradient: the last there is
            if then is not None and not is_leaf and not _is_ours(then):
                then.register_prehook(self.backward_ends)

    def backward_begins(self, gradients: Any, number: int) -> None:
        """As autograd says, once for each time that it does; only the first counts."""
        if self.survey and not self.is_through:
            self.survey.backward_begins(self.place, gradients)
        self.went_back = self.went_back or number

    @torch.compiler.disable  # or Dynamo compiles it, where a function that it compiled calls autograd
    def backward_ends(self, results: Any) -> None:
        """The same; ``results`` are among what it returned."""
        if self.survey:
            survey, self.survey = self.survey, None
            survey.backward_ends(self.place, results)

    def node_gone(self, _: Any) -> None:
        """Its results are gone, and with them what autograd kept."""
        if self.survey and not self.is_through:
            give_way()

    @property
    def is_through(self) -> bool:
        """Has its backward pass begun?"""
        return self.went_back > 0

    @property
    def is_open(self) -> bool:
        """Is what it keeps still there? Not once backward has begun, or nobody can ask for that any more."""
        return not self.is_through and any(node() is not None for node in self.nodes)

    @property
    def is_dropped(self) -> bool:
        """Did its results go, with what it kept, before anybody went back?"""
        return not self.is_through and not self.is_open

    @property
    def has_model(self) -> bool:
        """Is any parameter of its model still there?"""
        return not self.leaves or any(leaf() is not None for leaf in self.leaves)


def python_nodes(nodes: Iterable[Any]) -> set[Any]:
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
