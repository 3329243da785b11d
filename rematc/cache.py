"""JSON files that are kept from one process to the next: whole or absent, checked when read, never needed.

Several processes may share a folder. Whoever writes replaces a file at once; a reader sees the old one or
the new one. A file that is damaged is passed over with a warning and written anew, and so is a folder that
can't be written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from rematc.errors import OptionError
from rematc.files import write_whole

log = logging.getLogger(__name__)
LARGEST_BYTES = 64 << 20


def cache_folder() -> Path:
    """Where rematc keeps what it measured: REMATC_CACHE_DIR, or the user's cache folder."""
    if chosen := os.environ.get("REMATC_CACHE_DIR"):
        return Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "rematc"
    try:
        return Path.home() / ".cache" / "rematc"
    except RuntimeError:  # a user without a home, as in containers
        return Path(tempfile.gettempdir()) / "rematc-cache"


def load(path: Path, form: str) -> dict[str, Any] | None:
    """The JSON object in ``path`` whose "format" is ``form``; None, with a warning, for anything else.

    >>> load(Path("no such file"), "rematc.rates/2") is None
    True
    """
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ValueError(f"more than {LARGEST_BYTES} bytes")
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict) or data.get("format") != form:
            raise ValueError(f"not of the format {form}")
        if data.pop("check", None) != _check(data):
            raise ValueError("not what was written")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as e:
        damaged(path, e)
        return None
    return data


def _check(data: dict[str, Any]) -> str:
    """Tells what was written from what was changed since."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def damaged(path: Path, why: object) -> None:
    """Say that what was kept in ``path`` is not used."""
    log.warning("%s is damaged or of another version (%s): not used, and written anew", path, why)


def keep(path: Path, data: dict[str, Any]) -> None:
    """Write ``data`` to ``path``, whole; a warning if that can't be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**data, "check": _check(data)}))
    except (OSError, OptionError) as e:
        log.warning("nothing is kept for the next time in %s (%s)", path, e)
