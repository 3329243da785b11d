"""The torch versions that rematc runs on, and those that it was tested with."""

from __future__ import annotations

import functools
import logging
import re

import torch

from rematc.errors import RematcError

log = logging.getLogger(__name__)

OLDEST = (2, 11)
NEWEST = (2, 15)
TESTED = ((2, 11), (2, 13), (2, 15))


class TorchVersionError(RematcError, ImportError):
    """This torch is too old for rematc."""


def torch_version(text: str = torch.__version__) -> tuple[int, int]:
    """Major and minor version.

    >>> torch_version("2.13.0+cpu")
    (2, 13)
    """
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


def holds_tangents() -> bool:
    """Does AOTAutograd keep what enters the backward pass to its end? Since 2.13 the graph is handed it."""
    return torch_version() < (2, 13)


@functools.cache
def check_torch(version: tuple[int, int] | None = None) -> None:
    """Raise `TorchVersionError` for a torch below 2.11; warn once for one that no test has run on.

    >>> check_torch((2, 4))
    Traceback (most recent call last):
    rematc.versions.TorchVersionError: ...
    """
    version = version or torch_version()
    have = ".".join(map(str, version))
    if version < OLDEST:
        raise TorchVersionError(
            f"rematc needs torch {OLDEST[0]}.{OLDEST[1]} or newer, and this is torch {have}: "
            "upgrade with pip install -U torch"
        )
    if version not in TESTED:
        tested = ", ".join(f"{a}.{b}" for a, b in TESTED)
        log.warning("torch %s is untested with rematc (tested: %s)", have, tested)
