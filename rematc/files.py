"""Write a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rematc.errors import OptionError


def check_target(path: Path) -> Path:
    """The file that ``path`` names, links followed; `OptionError` if it can't be written.

    Asked before the work is done, so that an hour of it is not lost for a misspelled folder.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise OptionError(f"can't write {path}: it is a folder; give the name of a file in it")
    if target.exists() and not target.is_file():
        raise OptionError(f"can't write {path}: it is a device or a pipe; give the name of a file")
    if not target.parent.is_dir():
        raise OptionError(f"can't write {path}: there is no folder {target.parent}; make it, or give another")
    if not os.access(target.parent, os.W_OK):
        raise OptionError(f"can't write {path}: no permission in {target.parent}; give a file elsewhere")
    return target


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename: a file that is there is replaced whole, or stays as it is.

    Raises `OptionError` if it can't be written.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "plan.json"), "{}")
    ...     os.listdir(folder)
    ['plan.json']
    """
    target = check_target(path)
    made = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as f:
            made = f.name
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(made, _mode(target))  # a temporary file is the user's alone
        os.replace(made, target)
    except OSError as e:
        if made is not None:
            Path(made).unlink(missing_ok=True)
        raise OptionError(f"can't write {path}: {e.strerror or e}; give a file elsewhere") from e


def _mode(target: Path) -> int:
    """The permissions of the file that is replaced, else those that any new file would have."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
