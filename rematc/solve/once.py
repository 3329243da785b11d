"""The cheapest plan of a chain in which each segment asks for what enters it once, by all sets of blocks.

The tables are those of `prefix`, without what is there for a bound alone. Where segments have many blocks the
smallest are taken to be kept, and where that is not enough fewer levels of bytes are told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rematc.problem import Problem
from rematc.solve.cutting import chain_of, single_chain_of
from rematc.solve.deadline import Deadline
from rematc.solve.expand import Written, expand, restated
from rematc.solve.merge import Merged
from rematc.solve.prefix import LEVELS, Prefixes, with_more_small
from rematc.solve.reduce import Core
from rematc.solve.segments import Chain

SHARE = 0.36  # of the time left
TRIES = 4  # what is rounded, and what a prefix takes while it is asked, can break the budget by a little


class _Tables(NamedTuple):
    """How to look at all sets: of a core, as a chain that counts what is always kept, by so many levels."""

    core: Merged
    counted: Merged
    chain: Chain
    n_levels: int

    def within(self, budget_bytes: int) -> Prefixes:
        return Prefixes(self.counted, self.chain, budget_bytes, self.n_levels, for_plan=True)


def asked_once(problem: Problem, merged: Merged, deadline: Deadline) -> Written | None:
    """That plan, as one for ``merged`` if it fits as such.

    None if there is none within the budget, if single blocks cross hardly any cuts, or if to look at all sets
    would take too long.
    """
    assert problem.budget_bytes is not None
    budget, limit = problem.budget_bytes, Deadline.after(SHARE * deadline.left())
    tables = next(_tables(problem, merged, limit), None)
    if tables is None:
        return None
    for _ in range(TRIES):
        prefixes = tables.within(budget)
        prefixes.least_ns(limit)
        draft = next(prefixes.drafts(), None)
        if draft is None:
            break
        found = expand(problem, tables.core, draft)
        if found.plan.peak_bytes <= problem.budget_bytes:
            same = restated(problem, merged, found)
            return same if same.plan.peak_bytes <= problem.budget_bytes else found
        budget -= found.plan.peak_bytes - problem.budget_bytes
    return None


def _tables(problem: Problem, merged: Merged, limit: Deadline) -> Iterator[_Tables]:
    """Those for which there is time, the closest first."""
    assert problem.budget_bytes is not None
    for core in with_more_small(merged, problem.budget_bytes):
        chain = _single_chain(core.core, problem.budget_bytes)
        if chain is None:
            continue
        counted = _counted(core, chain)
        for n_levels in LEVELS:
            found = _Tables(core, counted, replace(chain, core=counted.core), n_levels)
            prefixes = found.within(problem.budget_bytes)
            if prefixes.are_few and prefixes.work_s <= limit.left():
                yield found


def _single_chain(core: Core, budget_bytes: int) -> Chain | None:
    """That which needs least of those that single blocks cross."""
    chain = chain_of(core, budget_bytes)
    is_single = chain and all(len(segment.enters) <= 1 for segment in chain.segments)
    return chain if is_single else single_chain_of(core, budget_bytes)


def _counted(merged: Merged, chain: Chain) -> Merged:
    """``merged``, but stages count what is small, and what the chain always keeps."""
    always = chain.always_bytes
    stages = (
        replace(stage, before_bytes=stage.before_bytes + more, op_bytes=stage.op_bytes + more)
        for stage, more in zip(merged.counted(at_most=True).core.stages, always, strict=True)
    )
    return replace(merged, core=replace(merged.core, stages=tuple(stages)))
