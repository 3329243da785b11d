"""`python -m benchmarks`: run again what the README claims, and keep the results beside the code."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

FILES = {
    "demo": "demo-cpu.json",
    "llama": "llama8-cpu.json",
    "inductor": "inductor-cpu.json",
    "overhead": "overhead-cpu.json",
    "rival": "rival-cpu.json",
    "solver": "solver-cpu.json",
}
RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks in turn; 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(FILES)}; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in FILES]:
        parser.error(f"unknown benchmark {unknown[0]!r}: give one of {', '.join(FILES)}")
    rows, failed = [], False
    for name in args.names or list(FILES):
        status, seconds = run(name, args.results / FILES[name])
        failed |= status != 0
        rows += lines(name, status, seconds, args.results / FILES[name])
    print(
        "\n" + tabulate(rows, headers=("benchmark", "claim", "measured", "goal", ""), disable_numparse=True)
    )
    return 1 if failed else 0


def run(name: str, file: Path) -> tuple[int, float]:
    """Exit status and seconds of one benchmark, in a process of its own: nothing compiled, nothing warm."""
    print(f"== {name}", flush=True)
    file.unlink(missing_ok=True)  # an old result must not pass for this one's
    started = time.perf_counter()
    status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--json", str(file)]).returncode
    return status, time.perf_counter() - started


def lines(name: str, status: int, seconds: float, file: Path) -> list[tuple[str, ...]]:
    """What the benchmark shows of each claim, and how it ended."""
    found: list[dict[str, Any]] = json.loads(file.read_text())["claims"] if file.exists() else []
    rows = [
        (
            name,
            c["claim"],
            f"{c['measured']:.3g}",
            f"at most {c['goal']:g}",
            "holds" if c["holds"] else "MISSED",
        )
        for c in found
    ]
    end = "done" if status == 0 else f"FAILED, exit status {status}"
    return [*rows, (name, f"{end}, {seconds:.0f} s", "", "", "")]


if __name__ == "__main__":
    sys.exit(main())
