"""Problem and plan files: what is written is read back, and anything else is refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematc.errors import PlanError, ProblemError
from rematc.graph import Graph, Op, Value
from rematc.plan import Plan
from rematc.problem import OpCost, Problem

SIZES = st.integers(0, 2**63)
TEXTS = st.text(max_size=8)

PROBLEM = Problem(
    Graph(
        storage_bytes=(8, 8, 4, 8),
        values=(Value("x", 0), Value("a", 1), Value("dy", 2), Value("dx", 3)),
        ops=(
            Op("f", "sin", (0,), (1,), pin="random", needed="effect", module="net.0"),
            Op("g", "mul", (1, 2), (3,), phase="backward"),
        ),
        inputs=(0,),
        tangents=(2,),
        outputs=(1,),
        gradients=(3,),
        held=(2,),
    ),
    (OpCost(5, 2), OpCost(7)),
    budget_bytes=40,
    resident_bytes=8,
    epilogue_bytes=1,
)
PLAN = Plan((1,), (1,), cost_ns=3, bound_ns=2, peak_bytes=30, budget_bytes=40, solve_s=0.5, notes=("ok",))

KINDS = {"problem": (Problem, PROBLEM, ProblemError), "plan": (Plan, PLAN, PlanError)}
each_kind = pytest.mark.parametrize("kind", KINDS)

# JSON values of every type; what is of a field's own type is left out by `wrong_for`.
STRANGERS: list[Any] = [None, True, 1.5, -1, "7", [], {}, ["7"], [1.5], [-1], [None], [True], [[]], [{}]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A chain of forward ops, then as many backward ops."""
    n = draw(st.integers(1, 5))
    values = tuple(Value(draw(TEXTS), s) for s in range(2 * n + 2))
    ops = [Op(draw(TEXTS), draw(TEXTS), (i,), (i + 1,), pin=draw(st.none() | TEXTS)) for i in range(n)]
    for i in range(n):
        reads = (n + 1 + i, draw(st.integers(0, n)))
        ops.append(Op(draw(TEXTS), draw(TEXTS), reads, (n + 2 + i,), "backward", module=draw(TEXTS)))
    sizes = tuple(draw(st.lists(SIZES, min_size=2 * n + 2, max_size=2 * n + 2)))
    graph = Graph(
        sizes, values, tuple(ops), (0,), (n + 1,), (n,), (2 * n + 1,), draw(st.sampled_from([(), (n + 1,)]))
    )
    costs = tuple(OpCost(draw(SIZES), draw(SIZES)) for _ in ops)
    return Problem(graph, costs, draw(st.none() | SIZES), draw(SIZES), draw(SIZES))


plans = st.builds(
    Plan,
    saved=st.lists(SIZES, max_size=4).map(tuple),
    backward=st.lists(SIZES, max_size=4).map(tuple),
    cost_ns=SIZES,
    bound_ns=SIZES,
    peak_bytes=SIZES,
    budget_bytes=st.none() | SIZES,
    status=TEXTS,
    strategy=TEXTS,
    solve_s=st.floats(0, allow_nan=False),
    digest=TEXTS,
    notes=st.lists(TEXTS, max_size=3).map(tuple),
)


@given(problems())
def test_a_problem_comes_back_as_it_was(problem: Problem) -> None:
    back = Problem.from_json(problem.to_json())
    assert back == problem
    assert back.digest == problem.digest
    assert back.to_json() == problem.to_json()


@given(plans)
def test_a_plan_comes_back_as_it_was(plan: Plan) -> None:
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert hash(back) == hash(plan)


def test_the_digest_names_the_problem_without_its_budget() -> None:
    assert PROBLEM.digest == PROBLEM.with_budget(None).digest
    assert PROBLEM.digest != Problem(PROBLEM.graph, PROBLEM.costs, 40, resident_bytes=9).digest


def refused(kind: str, text: str) -> str:
    """The words in which ``text`` is refused."""
    reader, _, error = KINDS[kind]
    with pytest.raises(error) as refusal:
        reader.from_json(text)
    assert type(refusal.value) is error
    return str(refusal.value)


@each_kind
def test_a_file_cut_short_anywhere_is_refused(kind: str) -> None:
    text = KINDS[kind][1].to_json()
    for end in range(len(text)):
        assert "can't be read as JSON" in refused(kind, text[:end])


@each_kind
@pytest.mark.parametrize("text", ["[]", "[1]", "null", "3", '"format"', "{}", '{"format": []}', "NaN"])
def test_json_of_something_else_is_refused(kind: str, text: str) -> None:
    assert "its format is" in refused(kind, text)


@each_kind
def test_nesting_without_end_is_refused(kind: str) -> None:
    assert "can't be read as JSON" in refused(kind, "[" * 200_000)


@each_kind
def test_a_file_that_is_too_large_is_not_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematc.problem.LARGEST", 10)
    assert "10 are the most that is read" in refused(kind, KINDS[kind][1].to_json())


@each_kind
def test_the_other_kind_of_file_is_named(kind: str) -> None:
    other = next(k for k in KINDS if k != kind)
    assert f"'rematc.{other}/1'" in refused(kind, KINDS[other][1].to_json())


@each_kind
def test_a_missing_and_an_unknown_field_are_named(kind: str) -> None:
    data = json.loads(KINDS[kind][1].to_json())
    for key in [*data][1:]:
        assert f"lacks {key!r}" in refused(kind, json.dumps({k: v for k, v in data.items() if k != key}))
    assert "unknown 'colour'" in refused(kind, json.dumps({**data, "colour": 1}))


def wrong_for(value: Any) -> list[Any]:
    """What no field that holds ``value`` may hold, whichever field it is."""
    match value:
        case str():
            return [s for s in STRANGERS if not isinstance(s, str | None)]
        case int():
            return [s for s in STRANGERS if s is not None]
        case float():
            return [s for s in STRANGERS if s != 1.5]
        case [int(), *_]:
            return [s for s in STRANGERS if s != []]
        case [str(), *_]:
            return [s for s in STRANGERS if s not in ([], ["7"])]
        case list():
            return [s for s in STRANGERS if s != []]
    raise AssertionError(value)


@each_kind
def test_the_wrong_type_for_a_field_is_told_with_the_field(kind: str) -> None:
    data = json.loads(KINDS[kind][1].to_json())
    for key in [*data][1:]:
        for stranger in wrong_for(data[key]):
            told = refused(kind, json.dumps({**data, key: stranger}))
            assert f"{key!r} must be" in told or (stranger == [{}] and "op 0 lacks" in told)


def test_the_wrong_type_in_an_op_is_told_with_the_op() -> None:
    data = json.loads(PROBLEM.to_json())
    op = data["ops"][0]
    for key in op:
        for stranger in wrong_for(op[key]):
            # An op that writes in place takes less than nothing, but no less than it makes, which is 8 bytes.
            stranger = -9 if (key, stranger) == ("workspace_bytes", -1) else stranger
            ops = [{**op, key: stranger}, data["ops"][1]]
            assert f"op 0: {key!r} must be" in refused("problem", json.dumps({**data, "ops": ops}))
    ops = [op, {k: v for k, v in op.items() if k != "target"}]
    assert "op 1 lacks 'target'" in refused("problem", json.dumps({**data, "ops": ops}))
    ops = [{**op, "phase": "sideways"}]
    assert "'phase' must be" in refused("problem", json.dumps({**data, "ops": ops}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"values": [["x", 9]]}, "a storage that does not exist"),
        ({"inputs": [9]}, "a value that does not exist"),
        ({"tangents": [9]}, "a value that does not exist"),
        ({"outputs": [9]}, "nobody makes it"),
        ({"gradients": [9]}, "nobody makes it"),
        ({"held": [0]}, "not a tangent"),
        ({"inputs": []}, "before it is made"),
        ({"inputs": [0, 1]}, "a second time"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(change: dict[str, Any], told: str) -> None:
    assert told in refused("problem", json.dumps({**json.loads(PROBLEM.to_json()), **change}))


def test_a_forward_op_after_a_backward_op_is_refused() -> None:
    data = json.loads(PROBLEM.to_json())
    assert "stands after a backward op" in refused(
        "problem", json.dumps({**data, "ops": data["ops"][::-1], "inputs": [0, 1]})
    )


@each_kind
@given(data=st.data())
def test_a_file_damaged_anywhere_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    reader, example, error = KINDS[kind]
    text = example.to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    cut = data.draw(st.integers(0, 6))
    put = data.draw(st.text('0159-.e"[]{}, ntf:\\x\x00é', max_size=4))
    try:
        back = reader.from_json(text[:at] + put + text[at + cut :])
    except error:
        return
    assert reader.from_json(back.to_json()) == back
