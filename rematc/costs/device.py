"""What a device is called: costs are kept by that name, and are those of another machine no more."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """A name for files: the processor or the card, the number of threads, and torch's version.

    >>> device_name(torch.device("cpu")).startswith("cpu-")
    True
    """
    if device.type == "cuda":
        model = torch.cuda.get_device_name(device)
    else:
        model = f"cpu-{processor() or 'unknown'}-{torch.get_num_threads()}"
    return re.sub(r"[^a-zA-Z0-9.]+", "-", f"{model}-torch{torch.__version__}").lower()


def processor() -> str | None:
    """The processor's model, as the system names it; None if it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or None
