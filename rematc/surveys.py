"""The surveys of a backend: which steps are followed, until it is known what lies outside of their graphs."""

from __future__ import annotations

from collections.abc import Callable

from rematc.arguments import Arguments
from rematc.calls import Call
from rematc.compiled import Compiled
from rematc.meters import survey_of
from rematc.survey import Survey

ENOUGH, TRIES = 3, 12  # steps that one graph begins and that are followed to their end, or not


class Surveys:
    """At most one is under way. ``found_alone`` is called with a graph once its step showed what is outside,
    and ran no other.
    """

    def __init__(self, found_alone: Callable[[Compiled], object]) -> None:
        self.found_alone = found_alone
        self.current: Survey | None = None
        self.followed: list[Call[Compiled]] = []  # by it, in order
        self.begun_by: tuple[Compiled | None, int] = None, 0  # the graph, and which model's
        self.dropped: set[tuple[Compiled | None, int]] = set()  # those whose results went, and with them it

    def begin(self, graph: Compiled, args: Arguments) -> None:
        """A step begins with ``graph``: follow it, if it may show more than is known."""
        if self.current:  # the last step did not come to its end, as a GAN's first does not
            self._end()
        self.followed = []
        self.begun_by = graph, next(map(id, args.leaves), 0)
        if self.begun_by in self.dropped:  # a teacher, say: now it is the turn of what follows
            self.dropped.remove(self.begun_by)
        elif graph.surveys < ENOUGH and graph.tries < TRIES:
            is_missed = not graph.surveys and any(graph.outside)  # there is none of a graph with its loss
            self.current = survey_of(args.tensors, self._pass_ended, is_missed=is_missed)
            graph.tries += self.current is not None

    def is_through(self, graph: Compiled) -> bool:
        """Is none made, and none to be made of steps that ``graph`` begins?"""
        done = graph.surveys >= ENOUGH or graph.tries >= TRIES
        return done and self.current is None and not self.dropped

    def pause(self) -> None:
        """What is not outside begins: a graph, or a compiler."""
        if self.current:
            self.current.pause()

    def follow(self, call: Call[Compiled]) -> None:
        """The forward pass of ``call`` has just ended."""
        if self.current and call.nodes:
            self.followed.append(call)
            call.watched(self.current)

    def _pass_ended(self) -> None:
        """A backward pass is through; what was outside is known once all of the step's are."""
        if self.current and self.current.is_over:
            self._end()
        elif self.current:
            self.current.pass_ends()

    def _end(self) -> None:
        assert self.current is not None
        found, self.current = self.current.close(), None
        for call in self.followed:  # some may go back later: that tells nothing
            call.survey = None
        for call, outside in zip(self.followed, found, strict=False):  # none if it missed some
            call.graph.outside |= outside
        if found:
            self.followed[0].graph.surveys += 1
        elif any(call.is_dropped for call in self.followed):
            self.dropped.add(self.begun_by)
        if len(found) == 1:
            self.found_alone(self.followed[0].graph)
