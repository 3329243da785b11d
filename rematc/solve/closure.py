"""What makes the bound tight: a fraction of a block can't be had for a fraction of its price.

Alone, the rows of `formulate` let the linear relaxation cheat: a unit runs again by a tenth in each of
ten spans, each time on a tenth of its inputs, and in the end its block is there as a whole. But for
whatever is read from span j on, each block is either at hand when j begins or its unit runs again later,
as a whole, and then the same is true of what that unit reads. With

    N[u, j]   unit u runs again in span j or later, 0 to 1

every plan fulfils, for every span j,

    N[u, j] >= 1 - S[b, j]          b is made by u and read by an op in span j or later
    N[u, j] >= N[w, j] - S[b, j]    b is made by u and read by unit w
    sum of R[u, k] over k >= j  >=  N[u, j]

For given S and prices that is a minimum cut, whose linear relaxation is whole by itself. The idea is that
of the (l, S) inequalities of lot sizing (Barany, Van Roy, Wolsey 1984): what is needed later and is not
in stock has to be made.
"""

from __future__ import annotations

from rematc.solve.formulate import Formulation


def add_closures(f: Formulation) -> None:
    """Add the inequalities for every span but the last, where `formulate` says as much."""
    for j in range(len(f.spans) - 1):
        _add_closure(f, j)


def _add_closure(f: Formulation, j: int) -> None:
    core, model = f.core, f.model
    first = f.spans.starts[j]
    old = [core.born[u] < first for u in range(len(core.units))]
    demanded = {b for stage in core.stages[first:] for b in stage.reads if old[core.maker[b]]}
    units = sorted(u for u in core.upstream(demanded) if old[u])
    runs = {u: [x for k in range(j, len(f.spans)) if (x := f.again.get((u, k))) is not None] for u in units}
    needed = {u: model.variable(integer=False) for u in units if runs[u]}
    for u in units:
        here = [(needed[u], -1.0)] if u in needed else []
        for b in core.units[u].makes:
            if b in core.held:
                continue
            there = [*here, *([(f.kept[b, j], -1.0)] if (b, j) in f.kept else [])]
            if b in demanded:
                model.row(there, -1.0)
            for w in core.readers[b]:
                if w in needed:
                    model.row([(needed[w], 1.0), *there], 0.0)
    for u, x in needed.items():
        model.row([(x, 1.0), *((r, -1.0) for r in runs[u])], 0.0)
