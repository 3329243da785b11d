"""Forward passes whose backward passes are to come: of the step that runs, and held from earlier ones.

A step is over when something runs forward after a backward pass has begun, or once nobody can ask
for any of them. The calls of the last step of each kind, of each sequence of graphs, stay on record. What ran
forward in one step and went back in another, as a GAN's generator does, is a call of that.

In a pipeline (1F1B) one graph runs forward and back in turns, and the call that came first goes back first.
Its steps are as long as the most calls that are open at once.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch

from rematc.meters import give_way
from rematc.storages import Followed, storages, tensors
from rematc.survey import Survey

G = TypeVar("G", bound=Hashable)
Key = tuple[int, tuple[G, ...]]  # of a kind of steps: how many of its calls are carried, and its graphs
LEAST_BYTES = 1024  # of results that are followed once their call is through: not of losses that are logged
COLLECTIONS = 3  # of garbage, to tell it from what somebody has


@dataclass(eq=False)
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
    is_through: bool = False  # its backward pass has begun
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


@dataclass
class Kind(Generic[G]):
    """Steps of the same graphs; ``calls`` are those of the last one.

    The first ``carried`` of them ran forward before the step began, and went back in it. ``in_turns``: it is
    of a pipeline. ``others`` were open when it was over; ``beside_bytes`` is what others take while it runs.
    """

    calls: list[Call[G]]
    carried: int = 0
    in_turns: bool = False
    others: list[Call[G]] = field(default_factory=list)
    beside_bytes: int = 0

    @property
    def first_graph(self) -> G:
        """The one that begins it."""
        return self.calls[self.carried].graph

    def twice_bytes(self, turn: int) -> int:
        """What is counted twice while call number ``turn`` runs, or is not there any more.

        A gradient that one graph hands to another counts as that one's until then, and as the other's once
        that goes back.
        """
        reached = self.calls[turn:]
        return sum(size for call in reached for before, size in call.given if before in reached)

    @property
    def read(self) -> dict[int, int]:
        """The storages that are read, and that none of the calls made."""
        return {key: size for call in self.calls for key, size in call.inputs.items()}


def _key(calls: Sequence[Call[G]], carried: int) -> Key[G]:
    return carried, tuple(call.graph for call in calls)


def kept_beside(read: dict[int, int], calls: Sequence[Call[G]]) -> int:
    """Bytes of what ``calls`` keep or read until their backward passes begin, and is not in ``read``."""
    still = [call for call in calls if call.is_open]
    inputs = {key: size for call in still for key, size in call.inputs.items() if key not in read}
    results = {key for call in still for key in call.results}
    kept = sum(call.kept_bytes for call in still)
    return kept + sum(inputs.values()) - sum(size for key, size in read.items() if key in results)


class Calls(Generic[G]):
    """The ledger of calls.

    ``running``: of the step that runs. ``held``: of earlier steps, not differentiated when this one began,
    and still there. ``left``: those that were, or never can be, and of which somebody has results; if
    ``left_stays``, when the backward pass began too, and not just until the step had results of its own.
    ``kinds``: the steps of several calls, by how many are carried and by their graphs.
    """

    def __init__(self) -> None:
        self.running: list[Call[G]] = []
        self.held: list[Call[G]] = []
        self.left: list[Call[G]] = []
        self.left_stays = False
        self.collections = 0  # of garbage, that might have been left
        self.kinds: dict[Key[G], Kind[G]] = {}
        self.carried: set[G] = set()  # graphs that went back in another step

    def begins(self) -> bool:
        """Does the next call begin a step? Then the last one is put on record."""
        carried, through = ([c for c in calls if c.is_through] for calls in (self.held, self.running))
        if not carried and not through and any(call.is_open for call in self.running):
            return False
        if self._in_turns(len(through)):
            return self._slide(len(through))
        if through:
            own = [c for c in self.running if c.is_through or (c.is_open and c.graph in self.carried)]
            self._record([*carried, *own], len(carried))
        self._leave([*carried, *(call for call in self.running if not call.is_open)])
        self.held = [call for call in (*self.held, *self.running) if call.is_open]
        self.running = []
        self._keep(lambda kind: any(call.has_model for call in kind.calls))
        return True

    def _in_turns(self, through: int) -> bool:
        """Have the first calls gone back, and the others, of the same graph, not yet?"""
        first, rest = self.running[:through], self.running[through:]
        is_one = len({call.graph for call in self.running}) == 1
        return is_one and bool(rest) and all(c.is_through for c in first) and all(c.is_open for c in rest)

    def _slide(self, through: int) -> bool:
        """The step goes on with the calls that are open; is it the first with so many?"""
        is_new = _key(self.running, 0) not in self.kinds
        self._record(self.running, 0, in_turns=True)
        self._leave(self.running[:through])
        self.running = self.running[through:]
        return is_new

    def _record(self, calls: list[Call[G]], carried: int, *, in_turns: bool = False) -> None:
        if len(calls) < 2:
            return
        if new := {call.graph for call in calls[:carried]} - self.carried:
            self.carried |= new  # steps that one was open in were taken for steps without it
            self._keep(lambda kind: new.isdisjoint(call.graph for call in kind.others))
        kind = self.kinds.setdefault(_key(calls, carried), Kind(calls, carried))
        kind.calls, kind.in_turns = calls, kind.in_turns or in_turns
        kind.others = [call for call in self.open if call not in calls]
        others_bytes = kept_beside(kind.read, kind.others) + self._staying_bytes(kind)
        kind.beside_bytes = max(kind.beside_bytes, others_bytes)  # or more when it began

    def _keep(self, is_kept: Callable[[Kind[G]], bool]) -> None:
        self.kinds = {key: kind for key, kind in self.kinds.items() if is_kept(kind)}

    def _leave(self, calls: list[Call[G]]) -> None:
        self.left = [call for call in (*self.left, *calls) if call.made.live_bytes()]

    def left_bytes(self, read: dict[int, int]) -> int:
        """Results of earlier calls that went back, as logits in a variable; those in ``read`` aside."""
        return sum(call.made.live_bytes(read) for call in self.left)

    def count_beside(self, graph: G) -> None:
        """A step begins with ``graph``: what others left is beside it."""
        for kind in self.kinds.values():
            if kind.first_graph is graph:
                held = kept_beside(kind.read, self._held_beside(kind))
                kind.beside_bytes = held + self._staying_bytes(kind)

    def _staying_bytes(self, kind: Kind[G]) -> int:
        return self.left_bytes(kind.read) if self.left_stays else 0

    def _held_beside(self, kind: Kind[G]) -> list[Call[G]]:
        """Of the calls that are held, those that are none which a step of ``kind`` carries."""
        held, carried = [], Counter(call.graph for call in kind.calls[: kind.carried])
        for call in self.held:
            if carried[call.graph]:
                carried[call.graph] -= 1
            else:
                held.append(call)
        return held

    def ran(
        self,
        graph: G,
        args: tuple[Any, ...],
        results: Any,
        kept_bytes: int,
        gradients: Mapping[int, int] = MappingProxyType({}),
    ) -> Call[G]:
        """``graph`` ran forward: ``kept_bytes`` are there until its backward pass begins.

        ``gradients``: of inputs, by storage, those that it is going to hand over.
        """
        made = {key: call for call in self.running for key in call.results}
        inputs = {key: size for key, size in storages(args) if key not in made}
        leaves = [weakref.ref(t) for t in tensors(args) if t.is_leaf and t.requires_grad]
        own = Followed(results, {key for key, _ in storages(args)}, LEAST_BYTES)
        given = [(made[key], size) for key, size in gradients.items() if key in made]
        call = Call(graph, kept_bytes, inputs, dict(storages(results)), leaves, own, given=given)
        for node in _python_nodes({t.grad_fn for t in tensors(results)}):
            call.nodes.append(weakref.ref(node, call.node_gone))
            node.register_prehook(partial(self._goes_back, call))
        self.running.append(call)
        return call

    def _is_left_still(self) -> bool:
        """Has somebody results of earlier steps, and not just as garbage, which compiling leaves?"""
        if any(call.made.live_bytes() for call in self.left) and self.collections < COLLECTIONS:
            self.collections += 1
            gc.collect()
        return any(call.made.live_bytes() for call in self.left)

    def _goes_back(self, call: Call[G], gradients: Any) -> None:
        """The backward pass of ``call`` begins; those that are through may have left results to somebody."""
        is_first = not any(other.is_through for other in self.running)
        call.backward_begins(gradients)
        if is_first and not self.left_stays:
            self.left_stays = self._is_left_still()
        for other in self.running:
            if other.is_through and other is not call:
                other.left_bytes = max(other.left_bytes, other.made.live_bytes())

    @property
    def open(self) -> list[Call[G]]:
        """All that keep something now."""
        return [call for call in (*self.held, *self.running) if call.is_open]

    @property
    def graphs(self) -> list[G]:
        """Those that run in steps of several calls, each once, in order."""
        return list(dict.fromkeys(graph for _, graphs in self.kinds for graph in graphs))


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
