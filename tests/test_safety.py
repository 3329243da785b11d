"""Several processes, kills, full disks, unusable folders: training goes on, files are whole."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rematc
from rematc import cache, files
from rematc.costs import rates, table
from tests.small import eager, gradients, net, refusal, same_bits

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ROOT = Path(__file__).parent.parent
FORMS = (rates.FORMAT, table.FORMAT, "rematc.plan/1", "rematc.plans/1")


def budget() -> int:
    return refusal().minimum_bytes * 6 // 5


def train(budget_bytes: int) -> tuple[rematc.Backend, list[Tensor]]:
    torch._dynamo.reset()
    model, backend = net(), eager(budget_bytes)
    return backend, gradients(model, torch.compile(model, backend=backend))


def trains_on(budget_bytes: int) -> None:
    """A model that was never compiled here is trained within its budget, with the gradients of aot_eager."""
    backend, ours = train(budget_bytes)
    assert 0 < backend.plans[0].peak_bytes <= budget_bytes and backend.plans[0].cost_ns > 0
    torch._dynamo.reset()
    model = net()
    assert same_bits(ours, gradients(model, torch.compile(model, backend="aot_eager")))


def assert_whole(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All that lies in ``folder`` is a file that can be read."""
    caplog.clear()
    found = [path for path in folder.rglob("*") if not path.is_dir()]
    assert any(path.parent.name == "plans" for path in found)
    with caplog.at_level(logging.WARNING, "rematc"):
        for path in found:
            form = json.loads(path.read_text())["format"]
            assert form in FORMS and cache.load(path, form) is not None, path
    assert not caplog.records


# Processes


def child(how: str, budget_bytes: int) -> None:
    """What a process of these tests runs: it says when it is ready, and what came of it."""
    print("ready", flush=True)
    sys.stdin.readline()
    if how == "killed":
        os.replace = _killed_instead  # type: ignore[assignment]
    if how == "no room":  # for the second half of a file: the system writes the first, and refuses the rest
        resource.setrlimit(resource.RLIMIT_FSIZE, (128, resource.RLIM_INFINITY))
    backend, grads = train(budget_bytes)
    peak = backend.plans[0].peak_bytes
    print(json.dumps({"peak": peak, "gradients": [g.flatten().tolist() for g in grads]}))


def _killed_instead(source: Any, target: Any) -> None:
    if Path(target).parent.name == "plans":
        os.kill(os.getpid(), signal.SIGKILL)
    os.rename(source, target)


def started(how: str, budget_bytes: int) -> subprocess.Popen[str]:
    code = f"from tests.test_safety import child; child({how!r}, {budget_bytes})"
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code], text=True, cwd=ROOT, **pipes)


def let_go(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """All begin when all are ready: exit status, last line and log of each."""
    for process in processes:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate() for process in processes]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, told, strict=True)]


def test_two_processes_that_compile_the_same_at_once_share_a_folder(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = let_go([started("trained", budget()) for _ in range(2)])
    model = net()
    expected = gradients(model, torch.compile(model, backend="aot_eager"))
    for status, out, log in found:
        assert status == 0 and "cache" not in log and "damaged" not in log, log
        told = json.loads(out)
        assert told["peak"] <= budget()
        assert told["gradients"] == [g.flatten().tolist() for g in expected]
    assert_whole(folder, caplog)


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_stays(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ((status, _, log),) = let_go([started("killed", budget())])
    assert status == -signal.SIGKILL, log
    (left,) = (folder / "plans").iterdir()
    with caplog.at_level(logging.WARNING, "rematc"):
        trains_on(budget())
    assert left.exists() and not caplog.records  # it may be of one who is still at it
    long_ago = left.stat().st_mtime - 2 * files.LEFT_S
    os.utime(left, (long_ago, long_ago))
    trains_on(budget() + 1000)
    assert not left.exists()
    assert_whole(folder, caplog)


# Disks and folders


def refuse(monkeypatch: pytest.MonkeyPatch, calls: list[str], folder: Path, number: int) -> None:
    """From now on the system refuses these calls for what lies in ``folder``."""

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            is_kept = name == "fsync" if isinstance(path, int) else Path(path).is_relative_to(folder)
            if is_kept:
                raise OSError(number, os.strerror(number), str(path))
            return original(path, *args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(os, name, refusing(name, getattr(os, name)))


def assert_said(caplog: pytest.LogCaptureFixture, *told: str) -> None:
    """Each is the beginning of one warning, and there are no others but of tight budgets."""
    said = [message for message in caplog.messages if "recomputation takes" not in message]
    assert len(said) == len(told)
    for message, words in zip(said, told, strict=True):
        assert (
            message.startswith(words) and "training goes on, and nothing is kept for the next time" in message
        )


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_full_disk_is_said_once_for_each_folder_and_training_goes_on(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = budget(), budget() + 1000
    with caplog.at_level(logging.WARNING, "rematc"), monkeypatch.context() as patch:
        refuse(patch, [call], folder, errno.ENOSPC)
        trains_on(first)
        trains_on(second)
    told = [
        f"{where} can't be used as a cache (No space left on device)" for where in (folder, folder / "plans")
    ]
    assert_said(caplog, *told)
    assert not list((folder / "plans").iterdir())  # nothing half-written is left


def test_a_disk_that_is_full_in_the_middle_of_a_file_keeps_nothing_of_it(folder: Path) -> None:
    ((status, out, log),) = let_go([started("no room", budget())])
    assert status == 0 and log.count("File too large") == log.count("training goes on") > 0, log
    model = net()
    expected = gradients(model, torch.compile(model, backend="aot_eager"))
    assert json.loads(out)["gradients"] == [g.flatten().tolist() for g in expected]
    assert not [path for path in folder.rglob("*") if path.suffix == ".part" or path.parent.name == "plans"]


WRITING = ["open", "mkdir", "replace"]
UNUSABLE = {
    "read-only": (WRITING, errno.EROFS, "Read-only file system"),
    "nobody may write": (WRITING, errno.EACCES, "Permission denied"),
}


@pytest.mark.parametrize("how", UNUSABLE)
def test_a_folder_that_can_t_be_written_is_said_once_and_training_goes_on(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, (calls, number, words) = budget(), budget() + 1000, UNUSABLE[how]
    with caplog.at_level(logging.WARNING, "rematc"), monkeypatch.context() as patch:
        refuse(patch, calls, folder, number)
        trains_on(first)
        trains_on(second)
    assert_said(caplog, f"{folder} can't be used as a cache ({words})")


# What rematc.costs.rates asks, Path.exists, raises where it may not look (up to Python 3.13).
def test_a_folder_that_nobody_may_look_into_is_said_once_and_training_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enough = budget()
    with caplog.at_level(logging.WARNING, "rematc"), monkeypatch.context() as patch:
        refuse(patch, [*WRITING, "stat", "lstat", "scandir"], folder / "within", errno.EACCES)
        patch.setenv("REMATC_CACHE_DIR", str(folder / "within"))
        trains_on(enough)
    assert_said(caplog, f"{folder} can't be used as a cache (Permission denied)")


@pytest.mark.parametrize("depth", [0, 2])
def test_a_file_where_the_folder_should_be_is_said_once_and_training_goes_on(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, file = budget(), budget() + 1000, tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("REMATC_CACHE_DIR", str(file.joinpath(*["deeper"] * depth)))
    with caplog.at_level(logging.WARNING, "rematc"):
        trains_on(first)
        trains_on(second)
    assert_said(caplog, f"{file} can't be used as a cache (no folder, but a file)")
    assert file.read_text() == ""
