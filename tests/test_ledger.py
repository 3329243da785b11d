"""The ledger of calls: which are open, carried, or over, and what those that went back have left."""

from __future__ import annotations

import gc

import torch

from rematc.arguments import Arguments
from rematc.ledger import Ledger
from tests.blocks import one_node


def test_a_step_begins_when_the_calls_before_it_are_through() -> None:
    calls: Ledger[str] = Ledger()
    w = torch.ones(2, requires_grad=True)
    assert calls.begins()
    first = one_node(w)
    calls.ran("a", Arguments((w,)), first, 1)
    assert not calls.begins()
    second = one_node(first, w)
    calls.ran("b", Arguments((first, w)), second, 1)
    assert [call.graph for call in calls.open] == ["a", "b"]
    second.backward()
    assert calls.open == []
    assert calls.begins()
    assert list(calls.kinds) == [(0, ("a", "b"), ("b", "a"))]
    assert calls.graphs == ["a", "b"]


def test_inputs_that_a_call_of_the_step_made_are_not_read_from_outside() -> None:
    calls: Ledger[str] = Ledger()
    w = torch.ones(4, requires_grad=True)
    first = one_node(w)
    calls.ran("a", Arguments((w,)), first, 1)
    calls.ran("b", Arguments((first, w)), one_node(first, w), 1)
    assert [list(call.inputs.values()) for call in calls.running] == [[16], [16]]
    assert [list(call.results.values()) for call in calls.running] == [[4], [4]]


def test_a_call_whose_results_are_gone_is_over_and_one_whose_are_held_is_carried() -> None:
    calls: Ledger[str] = Ledger()
    w = torch.ones(2, requires_grad=True)
    gone, held, last = one_node(w), one_node(w), one_node(w)
    calls.ran("gone", Arguments((w,)), gone, 1)
    calls.ran("held", Arguments((w,)), held, 1)
    calls.ran("last", Arguments((w,)), last, 1)
    del gone
    last.backward()
    assert [call.graph for call in calls.open] == ["held"]
    assert calls.begins()
    assert [call.graph for call in calls.held] == ["held"]
    held.backward()
    assert calls.begins()
    assert calls.held == []


def test_a_kind_of_step_is_forgotten_with_its_model() -> None:
    calls: Ledger[str] = Ledger()
    w = torch.ones(2, requires_grad=True)
    loss = one_node(w)
    calls.ran("a", Arguments((w,)), loss, 1)
    calls.ran("a", Arguments((w,)), loss, 1)
    loss.backward()
    assert calls.begins()
    assert list(calls.kinds) == [(0, ("a", "a"), ("a", "a"))]
    del w, loss
    gc.collect()
    assert calls.begins()
    assert not calls.kinds


def test_results_of_calls_that_went_back_are_followed_as_long_as_somebody_has_them() -> None:
    calls: Ledger[str] = Ledger()
    w = torch.ones(1024, requires_grad=True)
    first, second = one_node(w) * w, one_node(w) * w
    calls.ran("a", Arguments((w,)), first, 1)
    calls.ran("b", Arguments((w,)), second, 1)
    (first.sum() + second.sum()).backward()
    assert sum(call.left_bytes for call in calls.running) == 4096  # of the first that went back
    del first
    assert calls.begins()
    assert [call.graph for call in calls.left] == ["b"]
    assert [call.made.live_bytes() for call in calls.left] == [4096]
    del second
    assert calls.begins()
    assert calls.left == []


def test_what_a_compiler_s_garbage_holds_is_left_to_nobody() -> None:
    calls: Ledger[str] = Ledger()
    w = torch.ones(1024, requires_grad=True)
    gc.disable()
    try:
        calls.compiled()
        first, second = one_node(w) * w, one_node(w) * w
        calls.ran("a", Arguments((w,)), first, 1)
        calls.ran("b", Arguments((w,)), second, 1)
        loss = first.sum() + second.sum()
        del first
        garbage: list[object] = [second]
        garbage.append(garbage)
        del garbage, second
        loss.backward()
    finally:
        gc.enable()
    assert [call.left_bytes for call in calls.running] == [0, 0]


def test_what_ran_forward_in_one_step_and_went_back_in_another_is_carried() -> None:
    calls: Ledger[str] = Ledger()
    w = torch.ones(2, requires_grad=True)
    for _ in range(3):
        generated, real, fake = one_node(w), one_node(w), one_node(w)
        calls.begins()
        calls.ran("make", Arguments((w,)), generated, 1)
        calls.ran("judge", Arguments((w,)), real, 1)
        calls.ran("judge", Arguments((w,)), fake, 1)
        (real + fake).backward()
        assert calls.begins()
        judged = one_node(generated, w)
        calls.ran("judge", Arguments((generated, w)), judged, 1)
        judged.backward()
    together, own = ("make", "judge"), ("make", "judge", "judge")
    assert {(key.carried, key.forward) for key in calls.kinds} == {(1, together), (0, own)}
    assert [kind.first_graph for kind in calls.kinds.values() if kind.carried] == ["judge"]


def test_steps_of_the_same_graphs_are_of_two_kinds_if_one_carries_a_call() -> None:
    calls: Ledger[str] = Ledger()
    w = torch.ones(2, requires_grad=True)
    held = one_node(w)
    calls.begins()
    calls.ran("a", Arguments((w,)), held, 1)
    gone = one_node(w)
    calls.ran("a", Arguments((w,)), gone, 1)
    gone.backward()
    assert calls.begins()
    last = one_node(held, w)
    calls.ran("a", Arguments((held, w)), last, 1)
    last.backward()
    assert calls.begins()
    both = [one_node(w), one_node(w)]
    for result in both:
        calls.ran("a", Arguments((w,)), result, 1)
    torch.stack(both).sum().backward()
    assert calls.begins()
    assert [key.carried for key in calls.kinds] == [1, 0]
