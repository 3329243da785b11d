"""The sweep's rows as one picture: gaps, times, and costs beside the baselines'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sweep import Row, family_of

SHOWN = "llama8"  # whose costs are shown beside the baselines'
NOT_BASELINES = ("rematc", "checkmate", "moccasin")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Three panels in one SVG or PNG: the suffix says which. The same rows give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rematc"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(18, 5.5), layout="constrained")
    ours = [r for r in rows if r["solver"] == "rematc" and "cost_ns" in r]
    _gaps(axes[0], ours)
    _times(axes[1], ours)
    _costs(axes[2], rows)
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7, ncols=2)
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _gaps(axis: Any, ours: Sequence[Row]) -> None:
    for name in dict.fromkeys(r["problem"] for r in ours if "of_floor" in r):
        points = [(r["of_floor"], 100 * min(r["gap"], 10.0)) for r in ours if r["problem"] == name]
        axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=_short(name))
    axis.axhline(1.0, color="grey", linestyle=":")
    axis.set(title="gap", xlabel="budget / smallest budget", ylabel="cost above the bound, %", xscale="log")
    axis.set_yscale("symlog", linthresh=0.1)
    axis.set_ylim(bottom=0)
    _ticks_at(axis, (1, 1.25, 1.5, 2, 3, 5, 9))


def _times(axis: Any, ours: Sequence[Row]) -> None:
    grown = [r for r in ours if r["kind"] == "model" and r["layers"]]
    for family in dict.fromkeys(family_of(r["problem"]) for r in grown):
        for label in dict.fromkeys(r["budget"] for r in grown):
            points = [
                (r["layers"], r["solve_s"])
                for r in grown
                if family_of(r["problem"]) == family and r["budget"] == label
            ]
            if len(points) > 1:
                xs, ys = zip(*sorted(points), strict=True)
                axis.plot(xs, ys, marker="o", markersize=3, label=f"{family} {label}")
    axis.set(title="time to solve", xlabel="layers", ylabel="seconds", xscale="log", yscale="log")
    _ticks_at(axis, sorted({r["layers"] for r in grown}))


def _ticks_at(axis: Any, places: Sequence[float]) -> None:
    axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.set_xticks([], minor=True)


def _costs(axis: Any, rows: Sequence[Row]) -> None:
    own = [r for r in rows if _short(r["problem"]) == SHOWN and "cost_of_forward" in r]
    if not own:
        axis.set_axis_off()
    for solver in dict.fromkeys(r["solver"] for r in own):
        points = sorted(
            (r["peak_bytes"] / 1e6, 100 * r["cost_of_forward"]) for r in own if r["solver"] == solver
        )
        style = {"linestyle": "none", "marker": "x"} if solver not in NOT_BASELINES else {"marker": "o"}
        axis.plot(*zip(*points, strict=True), label=solver, **style)
    axis.set(title=SHOWN, xlabel="peak, MB above resident", ylabel="recomputation, % of forward")


def _short(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".json")
