"""What measures a survey leaves the profiler to others, and their numbers as they are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.profiler import record_function

import rematc
from rematc import compat
from rematc.compat import profiler_is_active
from rematc.measure import measure
from rematc.meters import CpuMeter, give_way, survey_of
from rematc.survey import Survey
from tests.blocks import batch
from tests.losses import LOGITS, Classifier, gradients_of, labels, training

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def test_gradients_are_the_same_where_the_user_names_parts_of_a_step() -> None:
    """A profile that ends inside of a `record_function` must not be followed by one there."""
    backend = rematc.backend("1GB", inner="eager")
    torch.manual_seed(0)
    model, x, y = Classifier(), batch(), labels()
    blocks = list(model.blocks)
    for block in blocks:
        block.compile(backend=backend)
    expected = gradients_of(None)
    for _ in range(8):
        model.zero_grad()
        with record_function("a step"):
            with record_function("forward"):
                out = model(x)
            with record_function("loss"):
                loss = F.cross_entropy(out, y)
            with record_function("backward"):
                loss.backward()
        for p, theirs in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p.grad, theirs)


def test_the_profiler_is_left_alone() -> None:
    """It is free after a step, after results that nobody wants, and for whoever has it already."""
    _, step = training(rematc.backend("1GB", inner="eager"))
    step()
    assert not profiler_is_active()
    model = Classifier()
    run = torch.compile(model, backend=rematc.backend("1GB", inner="eager"))
    out = run(batch())
    assert profiler_is_active()
    assert measure(lambda: torch.ones(8).sum()).peak_bytes >= 32  # it gives way
    assert not profiler_is_active()
    del out
    out = run(batch())
    del out
    assert not profiler_is_active()
    with torch.profiler.profile(profile_memory=True, acc_events=True):
        F.cross_entropy(run(batch()), labels()).backward()
    F.cross_entropy(run(batch()), labels()).backward()
    assert not profiler_is_active()


def test_where_all_steps_run_under_a_profile_it_is_said_that_none_was_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the loss takes is not known then. It is where a step was watched, or the loss is in the graph."""
    said = "none was watched before"
    model, x, y = Classifier(), batch(), labels()
    inside = rematc.backend("1GB", inner="eager")
    whole = torch.compile(lambda: F.cross_entropy(model(x), y), backend=inside)
    measure(lambda: whole().backward())
    _, step = training(rematc.backend("2GB", inner="eager"))
    step()
    measure(step)
    assert said not in caplog.text
    backend = rematc.backend("3GB", inner="eager")
    _, step = training(backend)
    for _ in range(3):
        measure(step)
    assert caplog.text.count(said) == 1
    assert backend.outside[0].meanwhile_bytes < LOGITS
    step()
    assert backend.outside[0].meanwhile_bytes > 2 * LOGITS


def test_no_profile_begins_in_a_backward_pass() -> None:
    """It would be gone with the pass, and stopped later all the same: torch 2.11 raises an error then."""
    meter, x = CpuMeter(lambda: None), torch.ones(4, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda grad: meter.open())
    y.sum().backward()
    assert not profiler_is_active()
    assert meter.running is None and not meter.is_whole
    meter.close()


def test_batches_in_turns_leave_the_profiler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step begins before the last one's calls went back: those are followed no longer."""
    begin, closed = Survey.backward_begins, set[Survey]()

    def begins(survey: Survey, call: int, gradients: Any) -> None:
        assert survey not in closed
        begin(survey, call, gradients)

    close = Survey.close
    monkeypatch.setattr(Survey, "close", lambda survey: closed.add(survey) or close(survey))
    monkeypatch.setattr(Survey, "backward_begins", begins)
    run = torch.compile(Classifier(), backend=rematc.backend("1GB", inner="eager"))
    for _ in range(3):
        first, second = run(batch()), run(batch())
        F.cross_entropy(first, labels()).backward()
        third = run(batch())
        F.cross_entropy(second, labels()).backward()
        F.cross_entropy(third, labels()).backward()
        assert measure(lambda: torch.ones(8).sum()).peak_bytes >= 32
    assert closed


def test_the_user_s_own_profiles_are_whole_wherever_they_begin() -> None:
    """One in its warm-up is not active yet; and one may begin between the passes, where a survey measures."""
    _, step = training(rematc.backend("1GB", inner="eager"))
    plan = torch.profiler.schedule(wait=0, warmup=1, active=2)
    with torch.profiler.profile(schedule=plan, acc_events=True) as own:
        for n in range(3):
            step()
            if n < 2:  # one more would begin anew, with a warning
                own.step()
    assert len(own.events()) > 20
    torch._dynamo.reset()
    run = torch.compile(Classifier(), backend=rematc.backend("1GB", inner="eager"))
    seen = []
    for _ in range(3):
        out = run(batch())
        with torch.profiler.profile(acc_events=True) as own:
            F.cross_entropy(out, labels()).backward()
        seen.append(len(own.events()))
    assert min(seen) > 0.9 * max(seen) > 20


def test_who_gives_way_in_a_backward_pass_does_so_at_its_end() -> None:
    """As where a reentrant checkpoint has a block compiled there: a profile stopped in it stays on."""
    run = torch.compile(Classifier(), backend=rematc.backend("1GB", inner="eager"))
    for _ in range(3):
        logits = run(batch())
        assert profiler_is_active()
        logits.register_hook(lambda _: give_way())
        F.cross_entropy(logits, labels()).backward()
        assert not profiler_is_active()


def test_a_profile_that_is_being_read_gives_way_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected whenever it likes, and results that nobody wants end a survey."""
    meter = CpuMeter(lambda: None)
    meter.open()
    assert meter.running is not None
    stop = meter.running.stop
    monkeypatch.setattr(meter.running, "stop", lambda: (give_way(), stop()))
    meter.shut()
    meter.close()
    assert len(meter.rises) == 1 and not profiler_is_active()


def test_where_several_processes_train_nothing_is_profiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A transfer that is under way when a profile ends writes to memory that is gone."""
    monkeypatch.setattr(compat, "rank_store", dist.HashStore)
    assert [survey_of([batch()], lambda: None) for _ in range(3)] == [None] * 3
    assert caplog.text.count("is not watched") == 1


def test_a_result_dropped_in_another_thread_ends_the_survey_in_its_own() -> None:
    backend = rematc.backend("1GB", inner="eager")
    run = torch.compile(Classifier(), backend=backend)
    box = [run(batch())]
    other = threading.Thread(target=box.clear)
    other.start()
    other.join()
    for _ in range(4):
        logits = run(batch())
        F.cross_entropy(logits, labels()).backward()
        assert not profiler_is_active()
    assert backend.outside[0].meanwhile_bytes > 2 * LOGITS


def test_a_step_that_a_compiler_interrupts_tells_nothing_where_that_would_count() -> None:
    survey = survey_of([torch.ones(1)], lambda: None)
    assert survey is not None
    survey.forward_ends()
    survey.pause()
    give_way()
    survey.forward_ends()
    survey.backward_begins(1, [])
    survey.backward_ends(1, [])
    survey.backward_begins(0, [])
    assert survey.is_over
    assert survey.close() == []
    assert not profiler_is_active()
    assert survey_of([torch.ones(1)], lambda: None) is None
    assert survey_of([torch.ones(1)], lambda: None) is not None
