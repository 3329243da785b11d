"""What a benchmark that goes over the test zoo is asked on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tests.zoo import ZOO


def zoo_arguments(
    name: str, doc: str | None, argv: Sequence[str] | None, rounds: int | None = None
) -> argparse.Namespace:
    """Those of ``python -m benchmarks.<name>``: ``json``, ``names``, and ``rounds`` where there is a default.

    >>> zoo_arguments("rival", "Who is faster?", ["--names", "mlp"], rounds=31)
    Namespace(json=None, names=['mlp'], rounds=31)
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    parser.add_argument("--names", nargs="*", default=list(ZOO), choices=list(ZOO), help="which models")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of timing (default {rounds})")
    return parser.parse_args(argv)
