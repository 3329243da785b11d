"""JSON files that are kept from one process to the next: whole or absent, checked when read, never needed.

Several processes may share a folder. Whoever writes replaces a file at once; a reader sees the old one or
the new one. A file that is damaged is passed over with a warning and written anew. A folder that can't be
used is passed over too, and each process says so once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from rematc.files import replace_whole

log = logging.getLogger(__name__)
LARGEST_BYTES = 64 << 20
UNUSABLE = (
    "%s can't be used as a cache (%s): training goes on, and nothing is kept for the next time there. Have "
    "REMATC_CACHE_DIR name a folder that can be written"
)
_said: dict[tuple[Path, str], object] = {}  # of what can't be used, by this process


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

    >>> load(Path("no such file"), "rematc.rates/4") is None
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
    except OSError as e:
        _unusable(path, e)
        return None
    except (ValueError, RecursionError) as e:
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
    text = json.dumps({**data, "check": _check(data)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, text)
    except OSError as e:
        _unusable(path, e)


def _unusable(path: Path, error: OSError) -> None:
    """Say why nothing can be read or written in the folder of ``path``, once in a process."""
    what, why = path, "a folder, where a file should be"
    if not os.path.isdir(path):
        what = next(folder for folder in path.parents if os.path.lexists(folder))
        why = error.strerror or str(error) if os.path.isdir(what) else "no folder, but a file"
    mine = object()
    if _said.setdefault((what, why), mine) is mine:
        log.warning(UNUSABLE, what, why)
