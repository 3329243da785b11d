"""What is known of a call's arguments from earlier calls: never more than is so."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rematc import compat
from rematc.arguments import Arguments, Known


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


def test_parameters_are_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    known, w, x = Known(), parameter(4), torch.ones(5)
    first = Arguments((w, x), known).storages
    of = {id(x): compat.storage_of(x)}
    monkeypatch.setattr(compat, "storage_of", lambda tensor: of[id(tensor)])
    assert Arguments((w, x), known).storages == first


CHANGES = ["same", "data", "anew", "batch"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(CHANGES)), max_size=12))
def test_what_is_known_is_what_is_asked(changes: list[tuple[int, str]]) -> None:
    known = Known()
    weights, batch = [parameter(n + 1) for n in range(4)], torch.ones(3)
    for n, change in changes:
        if change == "data":
            weights[n].data = torch.ones(n + 2)
        elif change == "anew":
            weights[n] = parameter(n + 1)
        elif change == "batch":
            batch = torch.ones(n + 1)
        values = (*weights, batch)
        assert Arguments(values, known).storages == asked(values)
