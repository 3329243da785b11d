"""Several processes and threads, kills, full disks, unusable folders: training goes on, files are whole."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from rematc import cache, files, plans
from rematc.measure import measure
from tests.small import batch, eager, gradients, net, refusal, same_bits

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ROOT = Path(__file__).parent.parent
FORMS = ("rematc.rates/2", "rematc.costs/2", "rematc.plan/1", "rematc.plans/1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which has the rates of this machine."""
    kept = Path(os.environ["REMATC_CACHE_DIR"])
    refusal()  # something was compiled, so they are there
    found = tmp_path / "cache"
    found.mkdir()
    for path in kept.glob("rates-*.json"):
        shutil.copy(path, found)
    monkeypatch.setenv("REMATC_CACHE_DIR", str(found))
    return found


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


# Threads


class Trained:
    """A model and its loss as one function, of some depth; each has a backend of its own."""

    def __init__(self, depth: int, budget_bytes: int) -> None:
        torch.manual_seed(depth)
        blocks = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(depth))
        self.model, self.x = nn.Sequential(*blocks), batch()
        self.backend, self.budget_bytes = eager(budget_bytes), budget_bytes
        self.run = torch.compile(lambda x: self.model(x).square().mean(), backend=self.backend)

    def step(self) -> None:
        self.model.zero_grad()
        self.run(self.x).backward()

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def least(depth: int) -> int:
    with pytest.raises(rematc.BudgetError) as refused:
        Trained(depth, 1).step()
    torch._dynamo.reset()
    return refused.value.minimum_bytes


def in_threads(steps: list[Callable[[], None]]) -> None:
    """All begin at once."""
    ready, failed = threading.Barrier(len(steps)), list[BaseException]()

    def run(step: Callable[[], None]) -> None:
        ready.wait()
        try:
            step()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_threads_that_compile_different_models_at_once_train_as_each_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budgets = {depth: least(depth) * 11 // 10 for depth in (2, 3, 4)}
    expected = {depth: Trained(depth, budgets[depth]) for depth in budgets}
    for alone in expected.values():
        alone.step()
    torch._dynamo.reset()
    shutil.rmtree(folder / "plans")
    trained = {depth: Trained(depth, budgets[depth]) for depth in budgets}
    in_threads([each.step for each in trained.values()])
    for depth, each in trained.items():
        assert same_bits(each.gradients, expected[depth].gradients)
        (plan,), (problem,) = each.backend.plans, each.backend.problems
        assert plan.cost_ns > 0 and each.backend.resident_bytes < plan.peak_bytes <= each.budget_bytes
        each.model.zero_grad()
        assert each.backend.resident_bytes + measure(each.step).peak_bytes <= each.budget_bytes
        kept = plans.load(problem, each.backend.options.solve, folder)
        assert kept is not None and (kept.saved, kept.backward) == (plan.saved, plan.backward)
    assert_whole(folder, caplog)


class Sharing:
    """One function and one backend for several threads, each with a model of its own."""

    def __init__(self, depths: tuple[int, ...], backend: Any) -> None:
        self.run = torch.compile(lambda model, x: model(x).square().mean(), backend=backend)
        self.models = [Trained(depth, 1).model for depth in depths]
        self.gradients: list[list[Tensor]] = [[] for _ in depths]

    def train(self, number: int, steps: int = 3) -> None:
        """Gradients, which no thread writes where another does."""
        model = self.models[number]
        for _ in range(steps):
            self.gradients[number] += torch.autograd.grad(self.run(model, batch()), list(model.parameters()))


@pytest.mark.parametrize("depths", [(2, 2), (2, 3)], ids=["one graph", "two graphs"])
def test_threads_that_share_a_backend_train_as_each_alone(depths: tuple[int, ...]) -> None:
    alone = Sharing(depths, "aot_eager")
    for number in range(len(depths)):
        alone.train(number)
    budget_bytes = max(map(least, depths)) * 11 // 10
    backend = eager(budget_bytes)
    sharing = Sharing(depths, backend)
    in_threads([partial(sharing.train, number) for number in range(len(depths))])
    assert all(map(same_bits, sharing.gradients, alone.gradients))
    assert backend.plans and max(plan.cost_ns for plan in backend.plans) > 0
    assert max(plan.peak_bytes for plan in backend.plans) <= budget_bytes


def of_threads(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "rematc.threads"]


def test_steps_that_are_open_at_once_in_two_threads_are_planned_apart_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    budget_bytes = least(2) * 11 // 10
    backend = eager(budget_bytes)
    sharing = Sharing((2, 2), backend)
    losses: dict[int, Tensor] = {}

    def forward(number: int) -> None:
        losses[number] = sharing.run(sharing.models[number], batch())

    def backward(number: int) -> None:
        losses.pop(number).backward()

    for phase in (forward, backward, forward, backward):  # one thread after the other
        for number in range(2):
            in_threads([partial(phase, number)])
    assert len(backend.plans) == 2
    assert [message.partition(":")[0] for message in of_threads(caplog)] == [
        f"2 threads train at the same time by rematc.backend(budget={budget_bytes!r})"
    ]


def test_threads_that_train_in_turns_share_the_steps_of_one(caplog: pytest.LogCaptureFixture) -> None:
    backend = eager(least(2) * 11 // 10)
    sharing = Sharing((2,), backend)
    for _ in range(3):
        in_threads([partial(sharing.train, 0)])
    assert len(backend.plans) == 1 and not of_threads(caplog)
