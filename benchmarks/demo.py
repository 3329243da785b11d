"""`python -m benchmarks.demo`: a small GPT trained under budgets that it does not fit without rematc."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import rematc
from benchmarks.machine import seconds_of_each, write_results
from benchmarks.models import GPT, GPTConfig, Variant, batch, largest_difference, resident_bytes

CONFIG, BATCH = GPTConfig(layers=4), 16
STEPS = 8
SHARES = (0.75, 0.5)
NEAR_FLOOR = 1.05  # of what is above resident: at the floor itself nothing is left to choose
TOO_LITTLE = "1kB"
TIME_LIMIT_S = 10.0
REFERENCE = "compiled"


@dataclass
class Row:
    """A way to run the step, and what was measured of it; bytes with what is resident."""

    name: str
    budget_bytes: int | None
    predicted_bytes: int | None
    measured_bytes: int
    time: float = math.nan  # of the reference's
    difference: float = 0.0
    loss: float = math.nan


class Demo:
    """One model for each row, all with the same weights, on the same batches, with the same dropout."""

    def __init__(self, config: GPTConfig = CONFIG, size: int = BATCH) -> None:
        self.config, self.size = config, size
        self.data = batch(size, config.length)
        self.every = max(1, round(math.sqrt(config.layers)))
        torch.manual_seed(0)
        self.first = GPT(config)
        self.resident_bytes = resident_bytes(self.first, self.data)
        self.seed = 0
        self.variants: list[Variant] = []
        self.rows: list[Row] = []

    def add(self, name: str, backend: Any = None, checkpoint_every: int = 0) -> Row:
        """Build a variant, compile it with a first step that does not count, and measure its peak."""
        variant = self.variant(name, backend, checkpoint_every)
        variant.step()
        peak = self.resident_bytes + variant.measured_bytes()
        row = Row(name, variant.budget_bytes, variant.predicted_bytes, peak)
        self.variants.append(variant)
        self.rows.append(row)
        return row

    def variant(self, name: str, backend: Any = None, checkpoint_every: int = 0) -> Variant:
        """A copy of the first model, with the same weights; ``backend`` None is eager."""
        model = GPT(self.config, checkpoint_every)
        model.load_state_dict(self.first.state_dict())
        run: Any = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)

        def loss() -> torch.Tensor:
            torch.manual_seed(self.seed)  # the same dropout for all
            out: torch.Tensor = run(*self.data)
            return out

        return Variant(name, model, loss, backend if isinstance(backend, rematc.Backend) else None)

    def smallest_budget(self) -> tuple[int, int]:
        """The smallest budget that rematc accepts, and what of it is resident: its answer to too little."""
        try:
            self.variant("", rematc.backend(TOO_LITTLE, inner="eager")).step()
        except rematc.BudgetError as e:
            return e.minimum_bytes, e.resident_bytes
        raise SystemExit(f"FAILED: rematc accepted a budget of {TOO_LITTLE}, which no step can keep")

    def train(self, steps: int) -> tuple[float, float]:
        """Train every row's own model; times, losses and differences into the rows; first and last loss.

        Weights stay the same in all rows for as long as gradients do, so each step compares like with like:
        a row whose gradients once differed is compared no more.
        """
        optimizers = [torch.optim.AdamW(v.model.parameters(), lr=3e-3) for v in self.variants]
        ratios: list[list[float]] = [[] for _ in self.rows]
        losses = [math.nan]
        for self.seed in range(1, steps + 1):
            self.data = batch(self.size, self.config.length, self.seed)
            seconds = self._one_step()
            base = next(s for s, row in zip(seconds, self.rows, strict=True) if row.name == REFERENCE)
            for taken, s in zip(ratios, seconds, strict=True):
                taken.append(s / base)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(self.rows[0].loss)
        for row, taken in zip(self.rows, ratios, strict=True):
            row.time = statistics.median(taken)
        return losses[1], losses[-1]

    def _one_step(self) -> list[float]:
        timed = [_Kept(v) for v in self.variants]
        seconds = seconds_of_each({str(i): t for i, t in enumerate(timed)}, rounds=1, turn=self.seed)
        reference = next(t for t in timed if t.variant.name == REFERENCE)
        for row, t in zip(self.rows, timed, strict=True):
            row.loss = t.loss
            if row.difference == 0:
                row.difference = largest_difference(t.variant.gradients(), reference.variant.gradients())
        return [taken[0] for taken in seconds.values()]


class _Kept:
    """A variant whose gradients outlive the clock: they are compared, and then trained with."""

    def __init__(self, variant: Variant) -> None:
        self.variant, self.loss = variant, math.nan
        variant.clear()

    def clear(self) -> None:
        pass

    def step(self) -> None:
        self.loss = self.variant.step().item()


def budgets(without_bytes: int, minimum_bytes: int, resident: int) -> list[str]:
    """Two shares of the peak without recomputation, and close to the smallest accepted; each once.

    >>> budgets(200_000_000, 60_000_000, 20_000_000)
    ['150.00MB', '100.00MB', '62.00MB']
    """
    low = resident + NEAR_FLOOR * (minimum_bytes - resident)
    wanted = [max(low, share * without_bytes) for share in SHARES]
    return list(dict.fromkeys(f"{math.ceil(b / 1e4) / 100:.2f}MB" for b in [*wanted, low]))


def faults(rows: Sequence[Row]) -> list[str]:
    """What is not as rematc promises, one line for each; only rows with a budget promise anything."""
    found = []
    for row in rows:
        if row.budget_bytes is None:
            continue
        if row.measured_bytes > row.budget_bytes:
            over = row.measured_bytes - row.budget_bytes
            found.append(f"{row.name}: a step took {over} bytes more than the budget of {row.budget_bytes}")
        if row.difference != 0:
            found.append(f"{row.name}: a gradient differs from the {REFERENCE} step's by {row.difference:g}")
    return found


def table(rows: Sequence[Row]) -> str:
    """The rows for people; MB are 10^6 bytes."""
    head = ("", "budget", "predicted", "measured", "time", "gradients off by", f"loss after {STEPS}")
    cells = [
        (
            row.name,
            _mb(row.budget_bytes),
            _mb(row.predicted_bytes),
            _mb(row.measured_bytes),
            f"{row.time:.2f}x",
            f"{row.difference:.1g}",
            f"{row.loss:.6f}",
        )
        for row in rows
    ]
    align = ("left", *("right",) * 6)
    return tabulate(cells, headers=head, colalign=align, disable_numparse=True)


def _mb(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.2f} MB"


def run(demo: Demo, steps: int = STEPS, say: Callable[[str], None] = print) -> list[Row]:
    """All rows of the demo, measured and trained."""
    count = sum(p.numel() for p in demo.first.parameters())
    say(f"A GPT of {demo.config.layers} blocks and {count:,} parameters learns sums such as 7+5=12.")
    say(f"Every row: the same weights, dropout, and {steps} batches of {demo.size} x {demo.config.length}.")
    demo.add("eager")
    without = demo.add(REFERENCE, "aot_eager").measured_bytes
    demo.add(f"sqrt(L): every {demo.every} blocks", "aot_eager", checkpoint_every=demo.every)
    minimum, resident = demo.smallest_budget()
    say(f"For {TOO_LITTLE} rematc refuses: the least is {_mb(minimum)}, {_mb(resident)} of it resident.")
    for budget in budgets(without, minimum, resident):
        backend = rematc.backend(budget, inner="eager", time_limit_s=TIME_LIMIT_S)
        demo.add(f"rematc {budget}", backend)
    before, after = demo.train(steps)
    say(f"The loss fell from {before:.3f} to {after:.3f}.")
    return demo.rows


def verdict(rows: Sequence[Row]) -> str:
    """One line in plain words."""
    without = next(row for row in rows if row.name == REFERENCE)
    least = min((row for row in rows if row.budget_bytes), key=lambda row: row.measured_bytes)
    return (
        f"In plain words: {least.measured_bytes / without.measured_bytes:.0%} of the memory for "
        f"{least.time:.2f}x the time, no budget exceeded, and not one bit of a gradient changed."
    )


EXPLANATION = f"""
Peaks are those of a whole step as the allocator counted them: forward, backward, and what is resident
(parameters, inputs); the optimizer runs afterwards. Time is that of a step over that of the row
"{REFERENCE}", op by op without recomputation, median of {STEPS} rounds. sqrt(L) is compiled likewise.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 1 if a budget was exceeded or a gradient differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    args = parser.parse_args(argv)
    rows = run(Demo(), say=lambda text: print(text, flush=True))
    print(f"{EXPLANATION}\n{table(rows)}\n")
    found = faults(rows)
    if args.json is not None:
        write_results(args.json, "demo", {"rows": [asdict(row) for row in rows], "claims": claims(rows)})
    print("\n".join(f"FAILED: {line}" for line in found) or verdict(rows))
    return 1 if found else 0


def claims(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the rows show of what is promised: in words, measured, the goal, and whether it holds."""
    ours = [row for row in rows if row.budget_bytes]
    share = max(row.measured_bytes / (row.budget_bytes or 1) for row in ours)
    off = max(row.difference for row in ours)
    return [
        {"claim": "largest share of a budget used", "measured": share, "goal": 1.0, "holds": share <= 1},
        {"claim": "largest difference of a gradient", "measured": off, "goal": 0.0, "holds": off == 0},
    ]


if __name__ == "__main__":
    sys.exit(main())
