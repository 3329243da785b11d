"""Graphics cards that a plan can be made for without one: their rates and their memory, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from rematc.errors import OptionError


@dataclass(frozen=True)
class Card:
    """A card's peaks: bytes and FLOP per second, the latter by dtype.

    ``reached`` says what share of them kernels of each kind reach: assumed, not measured. "tf32" is float32
    by the matrix units, which torch uses if it is allowed to.
    """

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops: Mapping[str, float]
    reached: Mapping[str, float]


@cache
def cards() -> Mapping[str, Card]:
    """The cards by the names that `costs` and ``--device`` take.

    >>> list(cards())
    ['h200', 'h100', 'a100', 'l40s', 'l4', 'rtx4090']
    """
    data = json.loads(files("rematc").joinpath("cards.json").read_text())
    return {key: Card(**card, reached=data["reached"]) for key, card in data["cards"].items()}


def card(name: str) -> Card:
    """The card of that name, in any spelling; `OptionError` if there is none.

    >>> card("RTX 4090").memory_bytes
    24000000000
    """
    plain = (
        "".join(c for c in str(name).lower() if c.isalnum()).removeprefix("nvidia").removeprefix("geforce")
    )
    if plain not in cards():
        raise OptionError(
            f"no card is called {name!r}: give {', '.join(cards())}; "
            'costs= takes "auto", "measured" and "roofline" too'
        )
    return cards()[plain]
