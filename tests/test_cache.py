"""Files that are kept: whole or absent, and not believed when they are not what was written."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from rematc import cache
from tests.damaged import BY_BYTES, read_damaged, saying

FORM = "rematc.test/1"
DATA = {"format": FORM, "number": 11.5, "texts": ["a", "b"]}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "file.json"
    cache.keep(path, DATA)
    return path


def test_what_is_kept_is_read(kept: Path) -> None:
    assert cache.load(kept, FORM) == DATA
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]


def test_what_is_not_there_is_none_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache.load(tmp_path / "none.json", FORM) is None
    assert not caplog.records


@pytest.mark.parametrize("damage", BY_BYTES)
def test_a_damaged_file_is_none(damage: str, kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_damaged(kept, BY_BYTES[damage], lambda: cache.load(kept, FORM), caplog) is None


def test_a_file_of_another_kind_is_none(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = saying(lambda data: data.update(format="rematc.other/1"))
    assert read_damaged(kept, other, lambda: cache.load(kept, FORM), caplog) is None


def test_a_file_beyond_all_measure_is_not_read(
    kept: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LARGEST_BYTES", 10)
    assert cache.load(kept, FORM) is None
    assert "more than 10 bytes" in caplog.text


@pytest.mark.parametrize("where", ["a file", "inside a file", "the file is a folder"])
def test_what_can_t_be_written_passes_with_a_warning(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    if where == "the file is a folder":
        (folder / "file.json").mkdir(parents=True)
    else:
        folder.write_text("")
    path = (folder / "deeper" if where == "inside a file" else folder) / "file.json"
    with caplog.at_level(logging.WARNING, "rematc"):
        cache.keep(path, DATA)
        assert cache.load(path, FORM) is None
    assert "nothing is kept for the next time" in caplog.text
    if where == "the file is a folder":
        assert [p.name for p in folder.iterdir()] == ["file.json"]  # nothing half-written is left


def test_who_writes_at_the_same_time_leaves_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    written = [{"format": FORM, "number": n, "texts": ["x"] * 1000 * n} for n in range(1, 9)]
    threads = [threading.Thread(target=cache.keep, args=(path, data)) for data in written for _ in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert cache.load(path, FORM) in written
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_user_without_a_home_has_a_folder_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("REMATC_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache.cache_folder().is_absolute()
