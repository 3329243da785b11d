"""What is known of a call's arguments from earlier calls: never more than is so."""

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rematc import compat
from rematc.arguments import IDLE, Arguments, Known


def asked(values: tuple[torch.Tensor, ...]) -> dict[int, int]:
    return dict(map(compat.storage_of, values))


def parameter(size: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(size))


def give_other_memory(w: torch.nn.Parameter) -> None:
    w.data = torch.ones(7)


def take_memory_away(w: torch.nn.Parameter) -> None:
    w.untyped_storage().resize_(0)


def make_part_of_another(w: torch.nn.Parameter) -> None:
    w.data = torch.ones(64)[8:12]


@pytest.mark.parametrize("change", [give_other_memory, take_memory_away, make_part_of_another])
def test_a_parameter_with_other_memory_is_asked_again(change: Callable[..., None]) -> None:
    known, x = Known(), torch.ones(5)
    w, v = parameter(4), parameter(4)
    assert Arguments((w, v, x), known).storages == asked((w, v, x))
    change(w)
    assert Arguments((w, v, x), known).storages == asked((w, v, x))


def test_parameters_of_a_model_that_was_made_anew_are_asked() -> None:
    known = Known()
    for size in (4, 4, 8, 4):  # the old one's place, and that of its memory, are free each time
        w = parameter(size)
        assert Arguments((w,), known).storages == asked((w,))
        del w


def test_other_memory_at_the_same_place_is_asked() -> None:
    """Only the first was looked at: of the others, as long as the place was the same, all was taken to be."""
    known, first, second, memory = Known(), parameter(4), parameter(4), bytearray(64)
    for count in (4, 6):  # two storages, one after the other, at one address
        second.data = torch.frombuffer(memory, dtype=torch.float32, count=count)
        assert Arguments((first, second), known).storages == asked((first, second))


def test_buffers_are_not_asked_again_and_batches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ResNet-50 has as many buffers as parameters: each was asked in each step."""
    known, w, buffer = Known(), parameter(4), torch.ones(3)
    for size in (5, 6, 5, 6):  # by then it is known which of them comes again
        assert Arguments((w, torch.ones(size), buffer), known).storages
    asked: list[torch.Tensor] = []
    of = compat.storage_of
    monkeypatch.setattr(compat, "storage_of", lambda t: asked.append(t) or of(t))
    batch = torch.ones(7)
    assert len(Arguments((w, batch, buffer), known).storages) == 3
    assert [t is batch for t in asked] == [True]


@pytest.mark.parametrize("others", [1, 2, 5])
def test_after_another_model_parameters_are_known_again(others: int) -> None:
    known, mine = Known(), (parameter(4), parameter(5))
    for _ in range(2):
        assert known.looked_at((*mine, torch.ones(2))).places
    for _ in range(others):
        known.looked_at((parameter(4), parameter(5), torch.ones(2)))
    for _ in range(2 * IDLE + 1):
        known.looked_at((*mine, torch.ones(2)))
    assert known.looked_at((*mine, torch.ones(2))).places == [0, 1]


def test_what_has_gradients_is_told_in_order_whoever_is_known() -> None:
    """`Compiled.gradients_of` goes by their places; a result of another graph comes between parameters."""
    known, first, last = Known(), parameter(2), parameter(3)
    for _ in range(3):
        made = torch.ones(4, requires_grad=True) * 2
        given = Arguments((first, made, 7, last, torch.ones(2)), known)
        assert [t.numel() for t in given.trained] == [2, 4, 3]
        assert [t.numel() for t in given.leaves] == [2, 3]
        assert [t.numel() for t in given.tensors] == [2, 4, 3, 2]


def test_arguments_do_not_keep_what_they_know() -> None:
    known, w = Known(), parameter(4)
    Arguments((w,), known)
    there = weakref.ref(w)
    del w
    assert there() is None


def test_parameters_are_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    known, w, x = Known(), parameter(4), torch.ones(5)
    first = Arguments((w, x), known).storages
    of = {id(x): compat.storage_of(x)}
    monkeypatch.setattr(compat, "storage_of", lambda tensor: of[id(tensor)])
    assert Arguments((w, x), known).storages == first


CHANGES = ["same", "data", "anew", "batch", "buffer", "fewer"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(CHANGES)), max_size=12))
def test_what_is_known_is_what_is_asked(changes: list[tuple[int, str]]) -> None:
    known = Known()
    weights, batch, buffer = [parameter(n + 1) for n in range(4)], torch.ones(3), torch.ones(2)
    for n, change in changes:
        if change == "data":
            weights[n].data = torch.ones(n + 2)
        elif change == "anew":
            weights[n] = parameter(n + 1)
        elif change == "batch":
            batch = torch.ones(n + 1)
        elif change == "buffer":
            buffer.data = torch.ones(n + 3)
        values = (*weights[: 3 if change == "fewer" else 4], buffer, batch)
        given = Arguments(values, known)
        assert given.storages == asked(values)
        assert [id(t) for t in given.trained] == [id(t) for t in given.leaves] == [id(w) for w in values[:-2]]
