"""Processes that share a GPU: who measures or runs has it alone."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_turns import Turns
from rematc.costs import table
from tests.small import batch, eager, net


def is_taken(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_inside_it_is_taken_and_what_was_taken_before_is_kept(tmp_path: Path) -> None:
    turns, path = Turns(tmp_path / "turns"), tmp_path / "turns"
    with turns.mine():
        assert is_taken(path)
    assert not is_taken(path)
    turns.take()
    with turns.mine():
        turns.take()
    assert is_taken(path)
    turns.give()
    turns.give()
    assert not is_taken(path)
    assert turns.had_s > 0 and turns.waited_s >= 0


def test_without_others_nobody_waits() -> None:
    turns = Turns(None)
    turns.take()
    with turns.mine():
        pass
    assert turns.held is None


@pytest.mark.usefixtures("fresh_dynamo")
def test_it_is_taken_to_measure_and_from_the_first_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "turns", list[bool]()
    turns, taken = Turns(path), table.taken

    def noted(*args: object) -> object:
        seen.append(is_taken(path))
        return taken(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(table, "taken", noted)
    with turns.for_costs():
        run = torch.compile(net(), backend=turns.from_the_first_run(eager("2MB")))
        run(batch()).sum().backward()
    assert seen and all(seen)
    assert is_taken(path)
    turns.give()
    assert not is_taken(path)
