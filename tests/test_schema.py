"""The JSON Schemas in docs/ and the code agree on what a problem file and a plan file are."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from rematc import plan as plan_room
from rematc import problem as problem_room
from rematc.errors import PlanError, ProblemError, RematcError
from rematc.plan import Plan
from rematc.problem import Problem, checked, read_object
from tests import graphs, test_files

DOCS = Path(__file__).parents[1] / "docs"
SCHEMAS = {kind: json.loads((DOCS / f"{kind}.schema.json").read_text()) for kind in test_files.KINDS}
VALIDATORS = {kind: Draft202012Validator(schema) for kind, schema in SCHEMAS.items()}

each_kind = pytest.mark.parametrize("kind", SCHEMAS)

# Of every JSON type, those that some field takes among them.
STRANGERS: list[Any] = [*test_files.STRANGERS, False, 0, 7, "", "forward", [0], [["a", 0]], [["a", 0, 0]]]
STRANGERS += [[["a", -1]], [[0, "a"]], [[0, 0]], [["a"]], ["a", 0], [0, None]]


def in_schema(kind: str, data: Any) -> bool:
    return bool(VALIDATORS[kind].is_valid(data))


def in_code(kind: str, data: Any) -> bool:
    """Whether the code takes the fields; that they fit together, no schema can say."""
    text = json.dumps(data)
    try:
        if kind == "plan":
            read_object(text, plan_room.FORMAT, plan_room._PLAN, PlanError)
        else:
            absent = problem_room._ABSENT
            top = read_object(text, problem_room.FORMAT, problem_room._PROBLEM, ProblemError, **absent)
            for op in top["ops"]:
                checked(op, problem_room._OP, ProblemError, "op")
    except RematcError:
        return False
    return True


def example(kind: str) -> Any:
    return json.loads(test_files.KINDS[kind][1].to_json())


def parts(kind: str) -> list[tuple[str | int, ...]]:
    """Where in the example there is an object with fields: the file itself, and each of its ops."""
    return [()] if kind == "plan" else [(), ("ops", 0), ("ops", 1)]


def damaged(kind: str, part: tuple[str | int, ...]) -> tuple[Any, Any]:
    """A copy of the example, and the object in it that can be damaged."""
    data = at = copy.deepcopy(example(kind))
    for key in part:
        at = at[key]
    return data, at


@each_kind
def test_the_schema_is_one(kind: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[kind])
    assert SCHEMAS[kind]["title"] == example(kind)["format"]


@given(test_files.problems() | graphs.problems())
def test_every_problem_that_is_written_is_in_the_schema(problem: Problem) -> None:
    VALIDATORS["problem"].validate(json.loads(problem.to_json()))


@pytest.mark.parametrize("more", [-3, 0, 5])
def test_what_the_code_was_found_to_need_may_be_below_zero(more: int) -> None:
    problem = replace(test_files.PROBLEM, lowering_bytes=more)
    VALIDATORS["problem"].validate(json.loads(problem.to_json()))
    assert Problem.from_json(problem.to_json()) == problem


@given(test_files.plans)
def test_every_plan_that_is_written_is_in_the_schema(plan: Plan) -> None:
    VALIDATORS["plan"].validate(json.loads(plan.to_json()))


@each_kind
def test_every_field_is_asked_for_and_no_other(kind: str) -> None:
    for part in parts(kind):
        for key in damaged(kind, part)[1]:
            data, at = damaged(kind, part)
            del at[key]
            assert not in_schema(kind, data)
            assert not in_code(kind, data)
        data, at = damaged(kind, part)
        at["colour"] = 1
        assert not in_schema(kind, data)
        assert not in_code(kind, data)


@each_kind
def test_schema_and_code_agree_on_what_each_field_takes(kind: str) -> None:
    taken = refused = 0
    for part in parts(kind):
        for key in damaged(kind, part)[1]:
            for stranger in STRANGERS:
                data, at = damaged(kind, part)
                at[key] = stranger
                fits = in_code(kind, data)
                assert in_schema(kind, data) == fits, (part, key, stranger)
                taken, refused = taken + fits, refused + (not fits)
    assert min(taken, refused) > 20


@each_kind
@pytest.mark.parametrize("data", [None, [], [1], "format", 3, {}])
def test_json_of_something_else_is_in_neither(kind: str, data: Any) -> None:
    assert not in_schema(kind, data)
    assert not in_code(kind, data)


def test_the_page_and_the_schemas_name_each_other() -> None:
    page = (DOCS / "problem.md").read_text()
    assert all(f"({kind}.schema.json)" in page for kind in SCHEMAS)
