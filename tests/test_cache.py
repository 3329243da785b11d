"""Files that are kept: whole or absent, and not believed when they are not what was written."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from rematc import cache, files
from rematc.errors import OptionError
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


WHERE = {
    "a file": "{folder} can't be used as a cache (no folder, but a file)",
    "inside a file": "{folder} can't be used as a cache (no folder, but a file)",
    "the file is a folder": "{folder}/file.json can't be used as a cache (a folder, where a file should be)",
}


@pytest.mark.parametrize("where", WHERE)
def test_what_can_t_be_written_passes_with_one_warning(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    if where == "the file is a folder":
        (folder / "file.json").mkdir(parents=True)
    else:
        folder.write_text("")
    path = (folder / "deeper" if where == "inside a file" else folder) / "file.json"
    with caplog.at_level(logging.WARNING, "rematc"):
        for _ in range(3):
            cache.keep(path, DATA)
            assert cache.load(path, FORM) is None
    (said,) = caplog.messages
    assert said.startswith(WHERE[where].format(folder=folder))
    assert "nothing is kept for the next time" in said
    if where == "the file is a folder":
        assert [p.name for p in folder.iterdir()] == ["file.json"]  # nothing half-written is left


def test_another_folder_and_another_reason_are_said_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (OSError(28, "No space left on device"), OSError(5, "Input/output error")):
        monkeypatch.setattr(os, "fsync", failing(error))
        for folder in ("one", "other", "one", "other"):
            cache.keep(tmp_path / folder / "file.json", DATA)
    assert [message.partition(":")[0] for message in caplog.messages] == [
        f"{tmp_path / folder} can't be used as a cache ({why})"
        for why in ("No space left on device", "Input/output error")
        for folder in ("one", "other")
    ]


def failing(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_who_is_interrupted_leaves_the_old_file_and_no_other(
    call: str, error: BaseException, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept.read_bytes()
    monkeypatch.setattr(os, call, failing(error))
    with pytest.raises(OptionError if isinstance(error, OSError) else KeyboardInterrupt):
        files.write_whole(kept, "another text")
    assert [p.read_bytes() for p in kept.parent.iterdir()] == [before]


def test_what_a_killed_writer_left_goes_once_it_is_old_and_nothing_else_does(kept: Path) -> None:
    left, young, other = (kept.with_name(f".{name}.json.{n:016x}.part") for n, name in enumerate("abc"))
    others = [kept.with_name(name) for name in (".kept.json.swp", "a.part", ".a.json.0123.part")]
    now = kept.stat().st_mtime
    for path in (left, young, other, *others):
        path.write_text("half of")
        os.utime(path, (now, now - 2 * files.LEFT_S))
    os.utime(young, (now, now))
    other.unlink()
    other.symlink_to(kept)  # as old as it is itself
    cache.keep(kept, DATA)
    assert {p.name for p in kept.parent.iterdir()} == {p.name for p in (kept, young, other, *others)}
    assert cache.load(kept, FORM) == DATA


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_permissions_that_any_would_and_the_mask_stays_as_it_is(
    mask: int, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask for the mask is to change it, for all threads."""
    path, before = tmp_path / "file.json", os.umask(mask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", failing(AssertionError("the mask was changed")))
            files.write_whole(path, "{}")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_permissions(mode: int, kept: Path) -> None:
    kept.chmod(mode)
    files.write_whole(kept, "{}")
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == ("{}", mode)


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
