"""A device's own rates, measured once in about a second and kept in a file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rematc import cache, compat
from rematc.cards import Card
from rematc.costs.device import device_name
from rematc.costs.stopwatch import cuda_ns

FORMAT = "rematc.rates/4"
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a device works: bytes and FLOP per second, and nanoseconds to start one op.

    ``stream`` are elementwise ops on contiguous tensors, ``strided`` copies that change the layout,
    ``special`` elementwise exp, erf, tanh and the like, ``reduce`` sums, norms and softmax, ``gather``
    reads by index, ``random`` draws (all bytes per second, read and written together); ``matmul``, ``conv``
    and ``attention`` are FLOP per second in float32; ``faster`` is how much faster a product of another dtype
    is.

    >>> Rates(1e10, 5e9, 2e9, 6e9, 4e9, 1e9, 1e11, 8e10, 6e10, 5000, {"bfloat16": 2.0}).times(torch.bfloat16)
    2.0
    """

    stream: float
    strided: float
    special: float
    reduce: float
    gather: float
    random: float
    matmul: float
    conv: float
    attention: float
    overhead_ns: int
    faster: dict[str, float] = field(default_factory=dict)

    def times(self, dtype: torch.dtype) -> float:
        """How much faster a product of that dtype is than one in float32; 1 where nothing is known."""
        name = str(dtype).removeprefix("torch.")
        return self.faster.get("float8" if name.startswith("float8") else name, 1.0)


def rates_of(device: torch.device, folder: Path | None, room_bytes: float = math.inf) -> Rates:
    """The rates of ``device``: read from ``folder`` if they are there, else measured and kept.

    To measure them takes memory, but not more than ``room_bytes``: where that is too little, they are
    measured on smaller tensors, and kept aside. A file that can't be read is measured anew; a folder that
    can't be written is passed over with a warning. ``folder=None`` keeps nothing. Of several processes that
    begin at once, as ranks do, all use what the first has kept.
    """
    usual, size = _usual(device), _fitting(_usual(device), room_bytes)
    kept = _kept(_path(device, folder, usual, usual))
    return kept or _kept_or_measured(device, _path(device, folder, size, usual), size)


def _path(device: torch.device, folder: Path | None, size: _Size, usual: _Size) -> Path | None:
    aside = "" if size == usual else f"-{size.side}"
    return None if folder is None else folder / f"rates-{device_name(device)}{aside}.json"


def _kept_or_measured(device: torch.device, path: Path | None, size: _Size) -> Rates:
    was_there = path is not None and os.path.exists(path)
    if (kept := _kept(path)) is not None:
        return kept
    rates = calibrate(device, size)
    if path is not None:
        if not was_there and os.path.exists(path):
            return _kept_or_measured(device, path, size)
        cache.keep(path, {"format": FORMAT, "rates": asdict(rates)})
    return rates


def _kept(path: Path | None) -> Rates | None:
    """The rates in a file, if there is one that has some."""
    if path is None or (data := cache.load(path, FORMAT)) is None:
        return None
    if (found := _rates(data)) is None:
        cache.damaged(path, "no rates in it")
    return found


def rates_of_card(card: Card) -> Rates:
    """The rates that a card is assumed to reach: its peaks, times the share that kernels of a kind reach."""
    base = "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    kinds = ("stream", "strided", "special", "reduce", "gather", "random")
    return Rates(
        **{kind: card.reached[kind] * card.bytes_per_s for kind in kinds},
        **{kind: card.reached[kind] * card.flops[base] for kind in ("matmul", "conv", "attention")},
        overhead_ns=int(card.reached["overhead_ns"]),
        faster={dtype: rate / card.flops[base] for dtype, rate in card.flops.items()},
    )


def _rates(data: dict[str, Any]) -> Rates | None:
    """The rates that a file has; None if they are none."""
    try:
        rates = Rates(**data["rates"])
        numbers = [*({**asdict(rates), "faster": 1}).values(), *rates.faster.values()]
    except (TypeError, KeyError, AttributeError):
        return None
    return rates if all(map(_positive, numbers)) else None


def _positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf


class _Size(NamedTuple):
    """What rates are measured on; large enough, if it may be, that to begin is nothing of it."""

    side: int
    product: int
    image: tuple[int, int, int, int]
    heads: tuple[int, int, int, int]

    @property
    def nbytes(self) -> int:
        """About what is there at a time: two of each and a result, and of what attention works on more."""
        return 4 * 3 * (self.side**2 + self.product**2 + math.prod(self.image) + 2 * math.prod(self.heads))

    def half(self) -> _Size:
        """Half as large each way."""
        (images, channels, height, width), (batch, heads, length, depth) = self.image, self.heads
        image, seen = (images, channels, height // 2, width // 2), (batch, heads, length // 2, depth)
        return _Size(self.side // 2, self.product // 2, image, seen)


_ON_A_CPU = _Size(1024, 512, (8, 32, 32, 32), (2, 4, 256, 64))
_ON_A_GPU = _Size(8192, 4096, (32, 128, 64, 64), (4, 16, 2048, 64))
_LEAST = 128  # of a side


def _usual(device: torch.device) -> _Size:
    return _ON_A_CPU if device.type == "cpu" else _ON_A_GPU


def _fitting(size: _Size, room_bytes: float) -> _Size:
    """The largest that takes no more, or the least that says anything."""
    while size.nbytes > room_bytes and size.side > _LEAST:
        size = size.half()
    return size


def calibrate(device: torch.device, size: _Size) -> Rates:
    """Measure the rates of ``device``: each from the fastest of several short runs."""
    with compat.real_tensors():
        n = size.side**2
        a, b = torch.ones(n, device=device), torch.ones(n, device=device)
        square = a.view(size.side, size.side)
        index = torch.zeros(n // 64, dtype=torch.long, device=device)
        m = torch.ones(size.product, device=device).diag()
        image, channels = torch.ones(size.image, device=device), size.image[1]
        kernel = torch.ones(channels, channels, 3, 3, device=device)
        q = torch.ones(size.heads, device=device)
        tiny = torch.ones(1, device=device)
        generator = torch.Generator(device)  # the model draws what it would without this
        nbytes, mm = 4 * n, 2 * m.shape[0] ** 3

        def per_s(amount: float, run: Callable[[], object]) -> float:
            return amount / _seconds(run, device)

        def product(a: torch.Tensor) -> float:
            return per_s(mm, lambda: a @ a)

        matmul = product(m)
        return Rates(
            stream=per_s(3 * nbytes, lambda: a + b),
            strided=per_s(2 * 4 * square.numel(), lambda: square.t().contiguous()),
            special=per_s(2 * nbytes, lambda: torch.erf(a)),
            reduce=per_s(2 * nbytes, lambda: torch.softmax(a.view(-1, 256), 1)),
            gather=per_s(2 * nbytes, lambda: a.view(-1, 64)[index]),
            random=per_s(nbytes, lambda: torch.rand(n, device=device, generator=generator)),
            matmul=matmul,
            conv=per_s(
                2 * 9 * channels * image.numel(), lambda: torch.nn.functional.conv2d(image, kernel, padding=1)
            ),
            attention=per_s(
                4 * q.numel() * q.shape[2],
                lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
            ),
            overhead_ns=int(_seconds(lambda: tiny + tiny, device) * 1e9),
            faster={str(d).removeprefix("torch."): product(m.to(d)) / matmul for d in HALVES},
        )


def _seconds(run: Callable[[], object], device: torch.device, least_s: float = 0.1) -> float:
    """The shortest of 15 runs or more, the first thrown away: what else the machine does only adds.

    They go on for ``least_s``, longer than another process has a core at a time.
    """

    def once() -> float:
        if device.type == "cuda":
            return cuda_ns(run, device) / 1e9
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    once()
    end, found = time.perf_counter() + least_s, list[float]()
    while len(found) < 15 or time.perf_counter() < end:
        found.append(once())
    return min(found)
