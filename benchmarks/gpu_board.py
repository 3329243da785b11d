"""What the processes that share the cells of a model tell each other: who runs which, and what it took."""

from __future__ import annotations

from pathlib import Path


class Board:
    """A folder: a file for each cell that somebody runs, with its peak once that is known.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mine, other = Board(Path(folder), "unet"), Board(Path(folder), "unet")
    ...     mine.takes("half"), other.takes("half"), other.has_ended("half")
    ...     mine.ended("half", 1_000)
    ...     other.has_ended("half"), other.peak("half")
    (True, False, False)
    (True, 1000)
    """

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model

    def takes(self, cell: str) -> bool:
        """Is the cell left for the one who asks? Then the others pass it over."""
        try:
            self._file(cell, "taken").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def ended(self, cell: str, peak_bytes: int | None) -> None:
        """The cell took so much; None: it failed."""
        part = self._file(cell, "part")
        part.write_text("" if peak_bytes is None else str(peak_bytes))
        part.replace(self._file(cell, "ended"))

    def has_ended(self, cell: str) -> bool:
        """Has somebody run it?"""
        return self._file(cell, "ended").exists()

    def peak(self, cell: str) -> int | None:
        """Bytes that a cell which has ended took, None if it failed."""
        text = self._file(cell, "ended").read_text()
        return int(text) if text else None

    def _file(self, cell: str, state: str) -> Path:
        return self.folder / f"{self.model}, {cell}.{state}"
