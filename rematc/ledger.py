"""Forward passes whose backward passes are to come: of the step that runs, and held from earlier ones.

A step is over when something runs forward after a backward pass has begun, or once nobody can ask
for any of them. The calls of the last step of each kind, of each sequence of graphs, stay on record. What ran
forward in one step and went back in another, as a GAN's generator does, is a call of that.

In a pipeline (1F1B) one graph runs forward and back in turns, and the call that came first goes back first.
Its steps are as long as the most calls that are open at once.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch

from rematc import compat
from rematc.arguments import Arguments
from rematc.calls import Call, python_nodes
from rematc.kinds import Key, Kind, kept_beside, key_of
from rematc.share import FOLLOWED_BYTES
from rematc.storages import Followed, storages, tensors

G = TypeVar("G", bound=Hashable)
NOTHING = Followed(())
COLLECTIONS = 3  # of the garbage of a compiler, to tell it from what somebody has


class Ledger(Generic[G]):
    """The ledger of calls.

    ``running``: of the step that runs. ``held``: of earlier steps, not differentiated when this one began,
    and still there. ``left``: those that were, or never can be, and of which somebody has results; if
    ``left_stays``, when the backward pass began too, and not just until the step had results of its own.
    ``kinds``: the steps of several calls. ``is_retraced``: compiled autograd has made graphs of its own of
    backward passes.
    """

    def __init__(self) -> None:
        self.running: list[Call[G]] = []
        self.held: list[Call[G]] = []
        self.left: list[Call[G]] = []
        self.left_stays = False
        self.collections = 0  # of garbage that there may still be, and that may hold results
        self.passes = 0  # backward passes that have begun
        self.kinds: dict[Key[G], Kind[G]] = {}
        self.is_retraced = False
        self.carried: set[G] = set()  # graphs that went back in another step

    def begins(self) -> bool:
        """Does the next call begin a step? Then the last one is put on record."""
        carried = [call for call in self.held if call.is_through]
        through = [call for call in self.running if call.is_through]
        if not carried and not through and any(call.is_open for call in self.running):
            return False
        if len(through) < len(self.running) and self._in_turns(len(through)):
            return self._slide(len(through))
        if through:
            own = [c for c in self.running if c.is_through or (c.is_open and c.graph in self.carried)]
            self._record([*carried, *own], len(carried))
        self._leave([*carried, *(call for call in self.running if not call.is_open)])
        self.held = [call for call in (*self.held, *self.running) if call.is_open]
        self.running = []
        if self.kinds:
            self._keep(lambda kind: any(call.has_model for call in kind.calls))
        return True

    def repeats(self, graph: G) -> bool:
        """Does the next call begin a step like the last one, of ``graph`` alone, which left nothing?

        Then that is over, and has not to be put on record.
        """
        if self.held or self.left or self.kinds or self.is_retraced or len(self.running) != 1:
            return False
        (last,) = self.running
        if last.graph is not graph or not last.is_through or last.made.live_bytes():
            return False
        self.running = []
        return True

    def _in_turns(self, through: int) -> bool:
        """Have the first calls gone back, and the others, of the same graph, not yet?"""
        first, rest = self.running[:through], self.running[through:]
        is_one = len({call.graph for call in self.running}) == 1
        return is_one and bool(rest) and all(c.is_through for c in first) and all(c.is_open for c in rest)

    def _slide(self, through: int) -> bool:
        """The step goes on with the calls that are open; is it the first with so many?"""
        is_new = key_of(self.running, 0) not in self.kinds
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
        kind = self.kinds.setdefault(key_of(calls, carried), Kind(calls, carried))
        kind.calls, kind.in_turns = calls, kind.in_turns or in_turns
        kind.others = [call for call in self.open if call not in calls]
        if in_turns:
            kind.staying_bytes = max(kind.staying_bytes, self._staying_bytes(kind))
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
                kind.beside_bytes = held + max(kind.staying_bytes, self._staying_bytes(kind))

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
        args: Arguments,
        results: Any,
        kept_bytes: int,
        gradients: Mapping[int, int] = MappingProxyType({}),
    ) -> Call[G]:
        """``graph`` ran forward: ``kept_bytes`` are there until its backward pass begins.

        ``gradients``: of inputs, by storage, those that it is going to hand over.
        """
        made, inputs = {key: call for call in self.running for key in call.results}, args.storages
        if made:
            inputs = {key: size for key, size in inputs.items() if key not in made}
        sizes = dict(storages(results))
        is_small = max(sizes.values(), default=0) < FOLLOWED_BYTES
        own = NOTHING if is_small else Followed(results, args.storages, FOLLOWED_BYTES)
        given = [(made[key], size) for key, size in gradients.items() if key in made]
        call = Call(graph, kept_bytes, inputs, sizes, args.refs, own, given=given)
        for node in python_nodes({t.grad_fn for t in tensors(results)}):
            call.nodes.append(weakref.ref(node))
            node.register_prehook(partial(self._goes_back, call))
        self.running.append(call)
        return call

    def compiled(self) -> None:
        """Something was compiled: that leaves garbage."""
        self.collections = COLLECTIONS

    def _is_left_still(self, is_left: Callable[[], bool]) -> bool:
        """Has somebody results, and not just garbage?"""
        if is_left() and self.collections:
            self.collections -= 1
            gc.collect()
        return is_left()

    @torch.compiler.disable  # or Dynamo compiles it, where a function that it compiled calls autograd
    def _goes_back(self, call: Call[G], gradients: Any) -> None:
        """The backward pass of ``call`` begins; those that are through may have left results to somebody."""
        through = [other for other in self.running if other.is_through and other is not call]
        self.passes += 1
        self.is_retraced |= compat.is_autograd_compiled()
        call.backward_begins(gradients, self.passes)
        if not through and not self.left:  # as in most steps
            return
        if not through and not self.left_stays:
            self.left_stays = self._is_left_still(lambda: any(old.made.live_bytes() for old in self.left))
        if self._is_left_still(lambda: any(other.made.live_bytes() > other.left_bytes for other in through)):
            for other in through:
                other.left_bytes = max(other.left_bytes, other.made.live_bytes())

    @property
    def open(self) -> list[Call[G]]:
        """All that keep something now."""
        return [call for call in (*self.held, *self.running) if call.is_open]

    @property
    def graphs(self) -> list[G]:
        """Those that run in steps of several calls, each once, in order."""
        return list(dict.fromkeys(itertools.chain.from_iterable(key.forward for key in self.kinds)))
