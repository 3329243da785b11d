"""The tests, tested: faults in what models of `test_fuzz` do not come to, each with a test that it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rematc.versions import torch_version
from tests.faults import Fault

CANONICALIZE = "rematc.passes.canonicalize"
MUST, GATHERED = "rematc.passes.must_recompute", "rematc.passes.gathered"
CAPTURE, RANKS, REGATHER, STEPS = "rematc.capture", "rematc.ranks", "rematc.regather", "rematc.steps"
TRACED, POSE = "rematc.traced", "rematc.pose"

POLICIES = "test_policies.py::test_what_must_be_recomputed_is_not_saved_though_there_is_room"
RESULTS = "test_policies.py::test_what_forward_returns_is_there_and_not_made_again"
MEETING = "test_regather.py::test_ranks_plan_for_the_one_with_the_least_room"
GATHERS = "test_collectives.py::test_a_parameter_is_gathered_once_in_each_pass_whatever_the_plan"
DECISION, SHARE = "test_decision.py", "test_steps.py::test_the_budget_holds_for_all_graphs_together"

NOT_ASKED = "    if not whole and not any(_is_asked_for(n) for n in joint.graph.nodes):\n        return\n"
COPIED = "{n: self._copied(n, reader) for n in node.all_input_nodes if n in self.nodes}"
HIGHER_ORDER = '        return "effect: a higher-order op, its body is not looked into"\n'
OTHERS = "        others = kept_beside(dict(storages(inputs)), self.calls.open)\n"
KINDS = "            if graph in self.calls.graphs:\n                self._look_around(graph, args, left)\n"
LOWERED = "        if not any([graph.lower(number) for graph, number in zip(graphs, choice, strict=True)]):\n"

FAULTS: list[tuple[Fault, str]] = [
    (Fault("nothing must be recomputed", MUST, NOT_ASKED, "    return\n"), f"{POLICIES}[eager-0.0]"),
    (Fault("copies read originals", MUST, COPIED, "dict[fx.Node, fx.Node]()"), f"{POLICIES}[eager-0.0]"),
    (
        Fault("copies are of forward", MUST, "        copy.meta[IN_BACKWARD] = True\n", ""),
        f"{POLICIES}[eager-0.0]",
    ),
    (
        Fault("random ops are copied", MUST, " and not must_run(source) and not pin_of(source)\n", "\n"),
        f"{POLICIES}[eager-0.5]",
    ),
    (
        Fault("regions run through", MUST, " and _stays_inside(node, forward))", ")"),
        "test_policies.py::test_what_one_region_gives_to_the_next_is_left_to_the_plan",
    ),
    (Fault("results are copied", MUST, "is_asked and node not in results", "is_asked"), RESULTS),
    (
        Fault("what must be saved is not", CAPTURE, "else policy_of(node)", "else None"),
        "test_policies.py::test_what_must_be_saved_is_not_recomputed_though_there_is_no_room",
    ),
    (
        Fault("equal calls are merged", CANONICALIZE, "must_run(node) is not None", "False"),
        "test_pure.py::test_calls_that_look_the_same_are_one_only_where_the_op_is_declared",
    ),
    (
        Fault("gathered once", GATHERED, "            found.add(node)\n", "            local.add(node)\n"),
        GATHERS,
    ),
    (
        Fault(
            "waits are not repeated",
            GATHERED,
            "(_is(node, WAIT) or not must_run(node))",
            "not must_run(node)",
        ),
        GATHERS,
    ),
    (Fault("parameters are not told", GATHERED, "node.meta[STATIC] = True", "pass"), GATHERS),
    (
        Fault("collectives run again", CAPTURE, " else COLLECTIVE\n", " else None\n"),
        "test_collectives.py::test_no_plan_runs_a_collective_twice",
    ),
    (
        Fault("graphs in ops run again", CAPTURE, HIGHER_ORDER, "        return None\n"),
        "test_opaque.py::test_an_op_that_carries_graphs_runs_once[chosen-]",
    ),
    (
        Fault("readers run again", MUST, "node.meta[READS_WHOLE] = True", "pass"),
        "test_collectives.py::test_what_is_gathered_is_not_kept_for_ops_that_are_recomputed",
    ),
    (Fault("the first rank's room", RANKS, "resident_bytes=max(found)", "resident_bytes=found[0]"), MEETING),
    (Fault("nobody waits", RANKS, "for rank in ranks]", "for rank in ranks[:1]]"), MEETING),
    (Fault("whole ones are kept", REGATHER, " if v not in whole", ""), "test_regather.py"),
    (
        Fault("results are as traced", "rematc.pose", "    captured = _as_measured(captured, prices)\n", ""),
        "test_taken.py",
    ),
    (Fault("gathers have a price", REGATHER, "replace(cost, runtime_ns=0)", "cost"), "test_regather.py"),
    (Fault("other plans are nothing", RANKS, ".decode() != mine", ".decode() == 0"), "test_regather.py"),
    (Fault("nobody asks", RANKS, "    if place != 1:\n", "    if place == 0:\n"), DECISION),
    (Fault("no digest", RANKS, 'if problem.digest != found["digest"]:', "if False:"), DECISION),
    (
        Fault("any budget", RANKS, "untimed.digest, problem.budget_bytes, ", "untimed.digest, "),
        DECISION,
    ),
    (Fault("questions are mixed up", RANKS, "asked = (what, untimed", "asked = (untimed"), DECISION),
    (
        Fault("own times", RANKS, '        problem = _timed(problem, found["runtime_ns"])\n', ""),
        DECISION,
    ),
    (Fault("times are asked for", RANKS, "replace(c, runtime_ns=0)", "c"), DECISION),
    (
        Fault(
            "a store that fails",
            RANKS,
            "except UNHEARD as e:\n        log",
            "except KeyError as e:\n        log",
        ),
        DECISION,
    ),
    (
        Fault("others are not counted", STEPS, OTHERS, "        others = 0\n"),
        "test_steps.py::test_a_first_step_above_the_budget_is_said",
    ),
    (
        Fault("graphs never share", STEPS, "if used > self.budget_bytes:", "if used < 0:"),
        f"{SHARE}[blocks-1200000]",
    ),
    (
        Fault("steps of several alone", STEPS, KINDS, KINDS.replace(" in self", " not in self")),
        f"{SHARE}[blocks-1200000]",
    ),
    (
        Fault(
            "no optimizer",
            STEPS,
            "self.options.reserve_bytes + self.needs.to_come_bytes",
            "self.options.reserve_bytes",
        ),
        "test_steps.py::test_the_optimizer_s_state_is_kept_free_for_the_parameters_of_all_calls",
    ),
    (
        Fault("code is not looked at", "rematc.compiled", LOWERED, "        if True:\n"),
        "test_steps.py::test_plans_are_chosen_anew_by_what_their_code_is_found_to_need",
    ),
    (
        Fault("numbers become constants", TRACED, "if not is_later or", "if True or"),
        "test_numbers.py::test_each_step_has_what_it_was_given[a factor]",
    ),
    (
        Fault("a batch is kept", TRACED, "compat.stand_in(x, self.context)", "x"),
        "test_numbers.py::test_no_batch_is_kept",
    ),
    (
        Fault("torch begins anew", TRACED, "except compat.restart():", "except KeyError:"),
        "test_numbers.py::test_each_step_has_what_it_was_given[a broken slope]",
    ),
    (
        Fault("sizes stay open", POSE, "        int(size)  #", "        #"),
        "test_numbers.py::test_a_number_that_makes_sizes_has_a_plan_for_each[repeated]",
    ),
    (
        Fault("marks are kept", POSE, "    compat.unmark(sizes)\n", ""),
        "test_sizes.py::test_each_size_keeps_the_budget_or_is_refused[nested-eager]",
    ),
    (
        Fault("new gradients", STEPS, "kind.in_turns or self.options", "self.options"),
        "test_steps.py::test_batches_in_turns_are_planned_for_as_many_as_are_open_at_once",
    ),
]


class Failures:
    """Plugin of pytest: what tests failed with."""

    def __init__(self) -> None:
        self.types: list[type[BaseException]] = []

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        assert call.excinfo is not None
        self.types.append(call.excinfo.type)


def failures(test: str) -> list[type[BaseException]]:
    """Of a run of its own of ``test``, in this process."""
    plugin, path = Failures(), str(Path(__file__).parent / test)
    alone = ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", ""]
    ended = pytest.main([path, *alone], plugins=[plugin])
    assert ended in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"there is no test {test}"
    return plugin.types


def marks_of(fault: Fault) -> list[pytest.MarkDecorator]:
    reason = "this torch fixes such numbers when it traces first"
    is_met = fault.name != "torch begins anew" or torch_version() < (2, 15)
    return [] if is_met else [pytest.mark.skip(reason=reason)]


@pytest.mark.parametrize(
    ("fault", "test"), [pytest.param(*f, id=f[0].name, marks=marks_of(f[0])) for f in FAULTS]
)
def test_each_fault_is_caught(fault: Fault, test: str) -> None:
    with fault.there():
        found = failures(test)
    assert found
    assert not issubclass(found[0], NameError | AttributeError | SyntaxError), (
        "that is no fault, but nonsense"
    )


@pytest.mark.slow  # they are run by themselves, too
@pytest.mark.parametrize("test", sorted({test for _, test in FAULTS}))
def test_without_a_fault_they_pass(test: str) -> None:
    assert not failures(test)
