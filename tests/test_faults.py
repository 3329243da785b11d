"""The tests, tested: each fault that is put into a pass makes what `test_fuzz` asserts of models fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rematc import compat
from tests.faults import Fault
from tests.programs import Program
from tests.test_fuzz import (
    OVERWRITTEN_WHILE_IT_IS_READ,
    READ_AND_OVERWRITTEN,
    RETURNED_AND_SPLIT,
    is_right_under_inductor,
    keeps_its_smallest_budget,
    recomputes_all,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning"),
]

Check = Callable[[Program], None]

DROPPED = Program((("product", 0, 0), ("dropout", 0, 0), ("product", 0, 0), ("gelu", 0, 0)), (0,))
NORMED = Program((("batch norm", 0, 0), ("tanh", 0, 0), ("batch norm", 0, 0), ("sin", 0, 0)), (0,))
DEEP = Program(tuple((op, 0, n) for n, op in enumerate(("product", "gelu", "sin", "tanh") * 3)), (0,))

REPLAY, CANONICALIZE = "rematc.passes.replay", "rematc.passes.canonicalize"
CAPTURE, LOWER = "rematc.capture", "rematc.lower"
STEPS, PINS = "    steps = list(steps)\n", "pin, needed = pin_of(node), must_run(node)"
SWAPPED = "    steps = (s := list(steps))[1:2] + s[:1] + s[2:]\n"
FIRST = "latest.update({v: n for v, n in made.items() if v not in latest})"
UNPINNED = "pin, needed = (None, None) if is_random(node) else (pin_of(node), must_run(node))"

FAULTS: list[tuple[Fault, Check, Program]] = [
    (Fault("a replay is left out", REPLAY, STEPS, "    steps = list(steps)[1:]\n"), recomputes_all, DEEP),
    (Fault("two recomputations are swapped", REPLAY, STEPS, SWAPPED), recomputes_all, DEEP),
    (
        Fault("a step reads the first run", REPLAY, "latest.update(made)", FIRST),
        keeps_its_smallest_budget,
        DEEP,
    ),
    (Fault("random numbers are drawn again", CAPTURE, PINS, UNPINNED), recomputes_all, DROPPED),
    (Fault("no op is pinned", CAPTURE, PINS, "pin = needed = None"), recomputes_all, NORMED),
    (
        Fault("old values are not kept", CANONICALIZE, "    snapshot(joint, num_fwd_outputs)\n", ""),
        recomputes_all,
        READ_AND_OVERWRITTEN,
    ),
    (
        Fault("equal takers stay apart", CANONICALIZE, "    _merge_takers(joint.graph)\n", ""),
        recomputes_all,
        RETURNED_AND_SPLIT,
    ),
    (
        Fault(
            "several saved values on one memory",
            "rematc.passes.split",
            "    plan = one_of_each_storage(captured.graph, plan)\n",
            "",
        ),
        is_right_under_inductor,
        OVERWRITTEN_WHILE_IT_IS_READ,
    ),
    (
        Fault(
            "a value is let go of too late",
            "rematc.lower",
            "boxed(args)\n",
            "fx.Interpreter(module).run(*args)\n",
        ),
        keeps_its_smallest_budget,
        DEEP,
    ),
    (
        Fault(
            "a value is let go of too early", "rematc.lower", "for i in unread:", "for i in range(len(args)):"
        ),
        recomputes_all,
        DEEP,
    ),
    (
        Fault(
            "what forward returns is not counted",
            "rematc.simulate",
            "    for instance in held:\n        instance.death = end\n",
            "",
        ),
        keeps_its_smallest_budget,
        Program((("product", 0, 0), ("gelu", 0, 0), ("product", 0, 0)), (0, 1, 2)),
    ),
]


def failure_of(check: Check, program: Program) -> BaseException | None:
    try:
        check(program)
    except BaseException as e:  # a difference, or any error
        return compat.inner_exception(e) or e
    return None


@pytest.mark.parametrize(
    ("fault", "check", "program"),
    [
        pytest.param(*f, id=f[0].name, marks=pytest.mark.slow if f[1] is is_right_under_inductor else ())
        for f in FAULTS
    ],
)
def test_each_fault_is_caught(fault: Fault, check: Check, program: Program) -> None:
    with fault.there():
        failure = failure_of(check, program)
    assert failure is not None
    assert not isinstance(failure, NameError | AttributeError | SyntaxError), "that is no fault, but nonsense"
    check(program)
