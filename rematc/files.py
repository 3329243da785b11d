"""Write a file whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from rematc.errors import OptionError

LEFT_S = 3600  # a temporary file this much older than a new file has no writer any more: it was killed
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.part")


def check_target(path: Path) -> Path:
    """The file that ``path`` names, links followed; `OptionError` if it can't be written.

    Asked before the work is done, so that an hour of it is not lost for a misspelled folder.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise OptionError(f"can't write {path}: it is a folder; give the name of a file in it")
        if target.exists() and not target.is_file():
            raise OptionError(f"can't write {path}: it is a device or a pipe; give the name of a file")
        if not target.parent.is_dir():
            told = f"there is no folder {target.parent}; make it, or give another"
            raise OptionError(f"can't write {path}: {told}")
        if not os.access(target.parent, os.W_OK):
            raise OptionError(f"can't write {path}: no permission in {target.parent}; give a file elsewhere")
    except OSError as e:  # a folder that may not even be looked into
        raise _refused(path, e) from e
    return target


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename: a file that is there is replaced whole, or stays as it is.

    Raises `OptionError` if it can't be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "plan.json"), "{}")
    ...     os.listdir(folder)
    ['plan.json']
    """
    check_target(path)
    try:
        replace_whole(path, text)
    except OSError as e:
        raise _refused(path, e) from e


def replace_whole(path: Path, text: str) -> None:
    """`write_whole` without a look beforehand: raises the `OSError` that the system does."""
    target = Path(os.path.realpath(path))
    made = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    mode = _mode(target)

    def opener(name: str, flags: int) -> int:  # less the mask, which nobody can read without changing it
        return os.open(name, flags, 0o666 if mode is None else mode)

    try:
        with open(made, "x", encoding="utf-8", opener=opener) as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        if mode is not None:
            os.chmod(made, mode)
        os.replace(made, target)
    except BaseException:
        with suppress(OSError):
            made.unlink()
        raise
    _clear(target)


def _mode(target: Path) -> int | None:
    """The permissions of the file that is replaced; None: there is none."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        return None


def _clear(written: Path) -> None:
    """Take away what writers that were killed have left beside the file that was just ``written``."""
    with suppress(OSError), os.scandir(written.parent) as entries:
        now_s = written.stat().st_mtime  # by the clock of the file system, which may be another machine's
        for entry in entries:
            with suppress(OSError):  # another process was faster, or it is another user's
                is_temporary = _TEMPORARY.fullmatch(entry.name) is not None
                if is_temporary and now_s - entry.stat(follow_symlinks=False).st_mtime > LEFT_S:
                    os.unlink(entry.path)


def _refused(path: Path, error: OSError) -> OptionError:
    return OptionError(f"can't write {path}: {error.strerror or error}; give a file elsewhere")
