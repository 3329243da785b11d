"""What a survey makes of what it is told."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from rematc.allocations import Span
from rematc.meters import CudaMeter
from rematc.survey import Outside, Survey


class Told:
    """A meter that is told what it measures."""

    waits, is_whole = False, True

    def __init__(self, rises: list[Span]) -> None:
        self.rises = rises
        self.opened = self.shut_ = 0

    def open(self) -> None:
        self.opened += 1

    def shut(self) -> None:
        self.shut_ += 1

    def close(self) -> None:
        assert self.opened == self.shut_ == len(self.rises)


def follow(rises: list[Span], gradients: list[list[Tensor]], returned: list[list[Tensor]]) -> list[Outside]:
    """The survey of a step of several calls, the last of which goes back first."""
    survey = Survey(Told(rises), lambda: None)
    for _ in gradients:
        survey.pause()
        survey.forward_ends()
    for call in reversed(range(len(gradients))):
        survey.backward_begins(call, gradients[call])
        if call:
            survey.backward_ends(call, returned[call])
    assert survey.is_over
    return survey.close()


def bytes_of(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.uint8)


def test_one_call_has_what_stays_and_what_was_there_meanwhile() -> None:
    assert follow([(100, 30)], [[bytes_of(10)]], [[]]) == [Outside(20, 80)]


def test_a_call_whose_end_is_told_after_the_next_has_begun_opens_no_span_in_that() -> None:
    survey = Survey(Told([(1, 1), (2, 2), (3, 3), (0, 0), (5, 5)]), lambda: None)
    for _ in range(3):
        survey.pause()
        survey.forward_ends()
    survey.backward_begins(2, [])
    survey.backward_begins(1, [])
    survey.backward_ends(2, [])
    survey.backward_ends(1, [])
    survey.backward_begins(0, [])
    assert [outside.held_bytes for outside in survey.close()] == [11, 6, 6]


def test_several_calls_see_what_those_before_them_left_outside() -> None:
    """5 of 7 bytes stay, then a loss of 40 leaves its gradient, and there is 1 more on the way back."""
    first, second = bytes_of(6), bytes_of(10)
    found = follow([(7, 5), (40, 10), (8, 7)], [[first], [second]], [[], []])
    assert found == [Outside(6, 7), Outside(5, 40)]


def test_a_gradient_that_another_graph_made_was_never_outside() -> None:
    passed = bytes_of(6)
    found = follow([(7, 5), (40, 10), (0, 0)], [[passed], [bytes_of(10)]], [[], [passed]])
    assert found == [Outside(5, 2), Outside(5, 40)]


def test_on_cuda_it_is_what_the_allocator_counts() -> None:
    over = mock.Mock()
    with (
        mock.patch.object(torch.cuda, "memory_allocated", side_effect=[100, 130]),
        mock.patch.object(torch.cuda, "max_memory_allocated", return_value=190),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats") as reset,
    ):
        survey = Survey(CudaMeter(torch.device("cuda", 0)), over)
        survey.forward_ends()
        survey.backward_begins(0, [bytes_of(10)])
    assert over.call_count == 1 and reset.called  # it is over when its last graph is through
    assert survey.close() == [Outside(20, 70)]
