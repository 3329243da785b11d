"""A device's own rates, measured once in about a second and kept in a file."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rematc import compat

log = logging.getLogger(__name__)
FORMAT = "rematc.rates/1"


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a device works: bytes and FLOP per second, and nanoseconds to start one op.

    ``stream`` are elementwise ops on contiguous tensors, ``strided`` copies that change the layout,
    ``special`` elementwise exp, erf, tanh and the like, ``reduce`` sums, norms and softmax, ``gather``
    reads by index (all bytes per second, read and written together); ``matmul``, ``conv`` and
    ``attention`` are FLOP per second in fp32; ``half`` is how much faster a matmul in bf16 is.

    >>> Rates(1e10, 5e9, 2e9, 6e9, 4e9, 1e11, 8e10, 6e10, 1.0, 5000).matmul
    100000000000.0
    """

    stream: float
    strided: float
    special: float
    reduce: float
    gather: float
    matmul: float
    conv: float
    attention: float
    half: float
    overhead_ns: int


def rates_of(device: torch.device, folder: Path | None) -> Rates:
    """The rates of ``device``: read from ``folder`` if they are there, else measured and kept.

    A file that can't be read is measured anew; a folder that can't be written is passed over with a
    warning. ``folder=None`` keeps nothing.
    """
    path = None if folder is None else folder / f"rates-{_name(device)}.json"
    if path is not None and (kept := _load(path)) is not None:
        return kept
    rates = calibrate(device)
    if path is not None:
        _keep(path, rates)
    return rates


def calibrate(device: torch.device) -> Rates:
    """Measure the rates of ``device``: each from the fastest of several short runs."""
    with compat.real_tensors():
        n = 1 << (20 if device.type == "cpu" else 26)
        a, b = torch.ones(n, device=device), torch.ones(n, device=device)
        square = a[: 1 << 20].view(1024, 1024)
        index = torch.zeros(n // 64, dtype=torch.long, device=device)
        m = torch.ones(512 if device.type == "cpu" else 4096, device=device).diag()
        image = torch.ones(8, 32, 32, 32, device=device)
        kernel = torch.ones(32, 32, 3, 3, device=device)
        q = torch.ones(2, 4, 256, 64, device=device)
        tiny = torch.ones(1, device=device)
        nbytes, mm = 4 * n, 2 * m.shape[0] ** 3

        def per_s(amount: float, run: Callable[[], object]) -> float:
            return amount / _seconds(run, device)

        matmul = per_s(mm, lambda: m @ m)
        h = m.bfloat16()
        return Rates(
            stream=per_s(3 * nbytes, lambda: a + b),
            strided=per_s(2 * 4 * square.numel(), lambda: square.t().contiguous()),
            special=per_s(2 * nbytes, lambda: torch.erf(a)),
            reduce=per_s(2 * nbytes, lambda: torch.softmax(a.view(-1, 256), 1)),
            gather=per_s(2 * nbytes, lambda: a.view(-1, 64)[index]),
            matmul=matmul,
            conv=per_s(
                2 * 9 * 32 * image.numel(), lambda: torch.nn.functional.conv2d(image, kernel, padding=1)
            ),
            attention=per_s(
                4 * 2 * 4 * 256 * 256 * 64,
                lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
            ),
            half=per_s(mm, lambda: h @ h) / matmul,
            overhead_ns=int(_seconds(lambda: tiny + tiny, device) * 1e9),
        )


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """The shortest of several runs, the first thrown away: what else the machine does only adds."""

    def once() -> float:
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        return time.perf_counter() - start

    return min([once() for _ in range(repeats + 1)][1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu-{torch.get_num_threads()}"
    return re.sub(r"[^a-zA-Z0-9.]+", "-", f"{model}-torch{torch.__version__}").lower()


def _load(path: Path) -> Rates | None:
    try:
        data = json.loads(path.read_text())
        rates = Rates(**data["rates"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as e:
        log.warning("%s can't be read (%s); measuring the device again", path, e)
        return None
    if data.get("format") != FORMAT or not all(_positive(x) for x in asdict(rates).values()):
        log.warning("%s is damaged or of another version; measuring the device again", path)
        return None
    return rates


def _positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf


def _keep(path: Path, rates: Rates) -> None:
    """Write beside the file, then rename: another process sees the old file or the new one."""
    beside: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
            beside = Path(f.name)
            json.dump({"format": FORMAT, "rates": asdict(rates)}, f)
        os.replace(beside, path)
    except OSError as e:
        log.warning("can't keep the device's rates in %s (%s)", path, e)
        if beside is not None:
            beside.unlink(missing_ok=True)
