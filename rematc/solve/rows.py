"""Memory rows added where a solution breaks the budget: of single ops, and of runs in either pass.

`add_stage` tells more of what is alive while an op runs in a span of many. `add_burst` tells what is alive
while a unit runs again in a span of one stage. Units that run there again do so in forward's order, if
``ordered``: the row then fits the plan exactly, but says nothing of plans with another order. Not
``ordered``, it counts what must be there in any order, and the optimum stays a bound for every plan.
"""

from __future__ import annotations

from rematc.solve.formulate import Formulation, Sized
from rematc.solve.merge import Merged


def add_burst(f: Formulation, merged: Merged, u: int, t: int, *, ordered: bool) -> None:
    """The memory rows of unit u running again in stage t, which is a span of its own.

    before_bytes[t] + sum of size[b] * L[b] + (its own bytes) * R[u, t] <= budget, L[b] from `_in_order`,
    a row for each of the parts that u is merged of, or from `_in_any_order`.
    """
    k = f.spans.of(t)
    assert f.spans.is_single(k)
    if (u, k) not in f.again:
        return
    unit, before = f.core.units[u], f.core.stages[t].before_bytes
    if ordered:
        for inputs, own_bytes in merged.steps(u):
            fixed, terms = _in_order(f, u, t, inputs)
            f.memory_row(before + fixed, [*terms, (f.again[u, k], own_bytes)])
    else:  # a merged unit's parts could run apart: only its lead surely runs here
        fixed, terms = _in_any_order(f, u, t, unit.reads)
        f.memory_row(before + fixed, [*terms, (f.again[u, k], merged.lead_bytes(u))])


def add_stage(f: Formulation, t: int) -> None:
    """The memory row of the op of stage t, which is not alone in its span k.

    op_bytes[t] + what it reads + sum of size[b] * L[b] over other b <= budget. Of those that an op of the
    span reads later, L[b] >= S[b, k] - R[u, k]: what is there when the span begins, and is not made in it,
    stays until it is read. Of the others L[b] is `Formulation.past`.
    """
    core, size, k = f.core, f.core.block_bytes, f.spans.of(t)
    reads = core.stages[t].reads
    later = {b for s in range(t + 1, f.spans[k][-1] + 1) for b in core.stages[s].reads}
    terms = list[Sized]()
    for b in range(len(size)):
        if b in reads or b in core.held:
            continue
        stays = f.stays(b, k) if b in later else None
        x = f.past(b, t) if stays is None else stays
        if x is not None:
            terms.append((x, size[b]))
    f.memory_row(core.stages[t].op_bytes + sum(size[b] for b in reads), terms)


def _in_order(f: Formulation, u: int, t: int, inputs: frozenset[int]) -> tuple[int, list[Sized]]:
    """For b made before u: L[b] = 1 if op t reads b, else L[b] >= S[b, k+1], R[w, k] for each reader w after
    u, and R[u, k] if b is among ``inputs``; for b made by u or after it: L[b] = S[b, k].
    """
    core, size, k = f.core, f.core.block_bytes, f.spans.of(t)
    fixed, terms = 0, list[Sized]()
    for b in range(len(size)):
        if b in core.held or core.born[core.maker[b]] >= t:
            continue
        if core.maker[b] >= u:
            terms += f.at_least(size[b], [f.kept.get((b, k))])
        elif b in core.stages[t].reads:
            fixed += size[b]
        else:
            later = [f.again.get((w, k)) for w in core.readers[b] if w > u or (w == u and b in inputs)]
            terms += f.at_least(size[b], [f.kept.get((b, k + 1)), *later])
    return fixed, terms


def _in_any_order(f: Formulation, u: int, t: int, inputs: tuple[int, ...]) -> tuple[int, list[Sized]]:
    """L[b] >= R[u, k] if b is among the inputs of u; and b is there from the stage's beginning to its op
    unless its unit runs again too: L[b] >= S[b, k+1] - R[maker(b), k], or 1 - R[maker(b), k] if op t reads b.
    """
    core, size, k = f.core, f.core.block_bytes, f.spans.of(t)
    fixed, terms = 0, []
    for b in range(len(size)):
        m = core.maker[b]
        if b in core.held or m == u or core.born[m] >= t:
            continue
        run, kept, is_read = f.again.get((m, k)), f.kept.get((b, k + 1)), b in core.stages[t].reads
        reader = f.again[u, k] if b in inputs else None
        if is_read and run is None:
            fixed += size[b]
        elif run is None:
            terms += f.at_least(size[b], [kept, reader])
        elif is_read or kept is not None:
            alive = f.model.variable(integer=False)
            f.model.row(
                [*([] if is_read else [(kept or 0, 1.0)]), (run, -1.0), (alive, -1.0)],
                -1.0 if is_read else 0.0,
            )
            if reader is not None:
                f.model.row([(reader, 1.0), (alive, -1.0)], 0.0)
            terms.append((alive, size[b]))
        elif reader is not None:
            terms.append((reader, size[b]))
    return fixed, terms


def add_forward(f: Formulation, merged: Merged, u: int, *, as_one: bool) -> None:
    """The memory row of unit u of the full core running in forward.

    resident + what later units that run read + what is saved + its own <= budget. Of a merged unit that
    forward does not need all parts run there, if ``as_one``. A plan may run its lead there, and the others
    later: not ``as_one``, the optimum stays a bound for those plans, too.
    """
    full = merged.full
    saved = {name: f.kept.get((b, 0)) for b, name in enumerate(merged.full_block)}
    parts = merged.parts if as_one else [(lead,) for lead in merged.lead]
    runs = {part: f.early.get(w) for w, those in enumerate(parts) for part in those}
    fixed, terms = full.base_bytes, list[Sized]()
    for b, size in enumerate(full.block_bytes):
        m = full.maker[b]
        readers = [w for w in full.readers[b] if w >= u]
        if m > u:
            continue
        always = m == u or b in full.held or any(full.units[w].required for w in readers)
        if full.units[m].required and always:
            fixed += size
        else:
            own = [runs.get(u)] if m == u else []
            terms += f.at_least(size, [saved.get(b), *own, *(runs.get(w) for w in readers)])
    workspace = full.units[u].workspace_bytes
    own_run = runs.get(u)
    if own_run is None:
        fixed += workspace
    else:
        terms.append((own_run, workspace))
    f.memory_row(fixed, terms)
