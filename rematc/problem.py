"""What the solver is asked: a graph, its costs, and the memory it may use. JSON in and out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from rematc.errors import ProblemError, RematcError
from rematc.graph import Graph, Op, Value

FORMAT = "rematc.problem/1"
LARGEST = 64 << 20  # characters of a file, which may be a stranger's; the largest graphs have a few million


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one run of an op costs: nanoseconds, and bytes that it needs only while it runs.

    Those are below zero, by no more than it makes, for a backward op that writes that over what it reads.

    >>> OpCost(runtime_ns=1200, workspace_bytes=0)
    OpCost(runtime_ns=1200, workspace_bytes=0)
    """

    runtime_ns: int
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Problem:
    """A `Graph`, one `OpCost` for each of its ops, and the memory limit.

    ``budget_bytes`` bounds the peak of the whole step, ``resident_bytes`` included; None is no
    limit. ``epilogue_bytes`` is needed on top of what is alive when the last op has run (autograd
    copies a gradient whose strides are not its parameter's). ``lowering_bytes`` is what the code that the
    step was lowered to needs on top of what the graph says, or less than that if below zero; it is learned
    by lowering a plan. ``meanwhile_bytes`` are taken between the passes, on top of what is kept for backward:
    by a loss that is computed outside of the graph; known once a step was seen.

    Raises `ProblemError` where the parts contradict each other.

    >>> g = Graph((8, 8), (Value("x", 0), Value("y", 1)), (Op("f", "exp", (0,), (1,)),),
    ...           inputs=(0,), outputs=(1,))
    >>> p = Problem(g, (OpCost(5),), budget_bytes=16, resident_bytes=8)
    >>> Problem.from_json(p.to_json()) == p
    True
    """

    graph: Graph
    costs: tuple[OpCost, ...]
    budget_bytes: int | None = None
    resident_bytes: int = 0
    epilogue_bytes: int = 0
    lowering_bytes: int = 0
    meanwhile_bytes: int = 0

    def __post_init__(self) -> None:
        check(self)

    def with_budget(self, budget_bytes: int | None) -> Problem:
        """The same problem under another budget."""
        other = replace(self, budget_bytes=budget_bytes)
        if "digest" in self.__dict__:  # the same for any budget, and dear for a large graph
            other.__dict__["digest"] = self.digest
        return other

    @property
    def graph_budget_bytes(self) -> int | None:
        """What the budget leaves for the graphs once ``base_bytes`` is taken off."""
        return None if self.budget_bytes is None else self.budget_bytes - self.base_bytes

    @property
    def forward_ns(self) -> int:
        """Time of the forward pass, without what only the backward pass needs of it."""
        return sum(self.costs[i].runtime_ns for i in self.graph.forward_steps(()))

    @property
    def base_bytes(self) -> int:
        """What each step needs besides the values of the graph."""
        return self.resident_bytes + self.lowering_bytes

    @cached_property
    def digest(self) -> str:
        """Names the problem, its budget aside: the same for the same graph, costs and resident."""
        text = self.with_budget(None).to_json()
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The problem as one line of JSON; the schema is in docs/problem.md."""
        g = self.graph
        return json.dumps(
            {
                "format": FORMAT,
                "budget_bytes": self.budget_bytes,
                "resident_bytes": self.resident_bytes,
                "epilogue_bytes": self.epilogue_bytes,
                **{key: size for key in _ABSENT if (size := getattr(self, key))},
                "storage_bytes": g.storage_bytes,
                "values": [[v.name, v.storage] for v in g.values],
                "ops": [
                    {
                        **{f.name: getattr(op, f.name) for f in fields(op)},  # asdict copies, and is slow
                        "runtime_ns": c.runtime_ns,
                        "workspace_bytes": c.workspace_bytes,
                    }
                    for op, c in zip(g.ops, self.costs, strict=True)
                ],
                "inputs": g.inputs,
                "tangents": g.tangents,
                "outputs": g.outputs,
                "gradients": g.gradients,
                "held": g.held,
            }
        )

    @staticmethod
    def from_json(text: str) -> Problem:
        """Read what `to_json` wrote; `ProblemError` says what is wrong with anything else."""
        top = read_object(text, FORMAT, _PROBLEM, ProblemError, **_ABSENT)
        ops = [checked(op, _OP, ProblemError, f"op {i}") for i, op in enumerate(top.pop("ops"))]
        costs = tuple(OpCost(op.pop("runtime_ns"), op.pop("workspace_bytes")) for op in ops)
        graph = Graph(
            values=tuple(Value(name, storage) for name, storage in top.pop("values")),
            ops=tuple(Op(**op) for op in ops),
            **{key: top.pop(key) for key in ("storage_bytes", *_ENDS)},
        )
        return Problem(graph, costs, **top)

    def to_networkx(self) -> Any:
        """The problem as a `networkx.DiGraph` of its ops: see `rematc.exchange.to_networkx`."""
        from rematc.exchange import to_networkx  # loads networkx: only when asked for

        return to_networkx(self)

    @staticmethod
    def from_networkx(dag: Any, **names: Any) -> Problem:
        """A `networkx.DiGraph` of ops as a problem: see `rematc.exchange.from_networkx`.

        >>> import networkx
        >>> dag = networkx.DiGraph()
        >>> dag.add_node("f", size=8, runtime_ns=5)
        >>> problem = Problem.from_networkx(dag, bytes="size")
        >>> Problem.from_networkx(problem.to_networkx()) == problem
        True
        """
        from rematc.exchange import from_networkx  # loads networkx: only when asked for

        return from_networkx(dag, **names)


def check(problem: Problem) -> None:
    """Raise `ProblemError` unless every op reads what was made before it, and sizes make sense."""
    g = problem.graph
    if len(problem.costs) != len(g.ops):
        raise ProblemError(f"{len(g.ops)} ops but {len(problem.costs)} costs")
    sizes = [*g.storage_bytes, *(c.runtime_ns for c in problem.costs)]
    sizes += [problem.resident_bytes, problem.epilogue_bytes, problem.meanwhile_bytes]
    if any(not isinstance(x, int) or x < 0 for x in sizes):
        raise ProblemError("sizes and times must be whole numbers, not below zero")
    if not all(
        isinstance(x, int) for x in (problem.lowering_bytes, *(c.workspace_bytes for c in problem.costs))
    ):
        raise ProblemError("lowering_bytes and workspace_bytes must be whole numbers")
    if any(not 0 <= v.storage < len(g.storage_bytes) for v in g.values):
        raise ProblemError("a value stands in a storage that does not exist")
    made = {*g.inputs, *g.tangents}
    if any(not 0 <= v < len(g.values) for v in made):
        raise ProblemError("an input or a tangent is a value that does not exist")
    if not set(g.held) <= set(g.tangents):
        raise ProblemError("a held value is not a tangent")
    phase = "forward"
    for op in g.ops:
        if phase == "backward" and op.phase == "forward":
            raise ProblemError(f"forward op {op.name!r} stands after a backward op")
        phase = op.phase
        for v in op.inputs:
            if v not in made or (phase == "forward" and v in g.tangents):
                raise ProblemError(f"op {op.name!r} reads value {v} before it is made")
        for v in op.outputs:
            if v in made or not 0 <= v < len(g.values):
                raise ProblemError(f"op {op.name!r} makes value {v} a second time, or it is unknown")
            made.add(v)
    for v in (*g.outputs, *g.gradients):
        if v not in made:
            raise ProblemError(f"value {v} is an output and nobody makes it")
    for i, cost in enumerate(problem.costs):
        least = -g.made_bytes(i)
        if cost.workspace_bytes < least:  # the solver counts on it that no op takes less than is there before
            what = f"op {i}: 'workspace_bytes' must be at least {least}, and is {cost.workspace_bytes}"
            raise ProblemError(f"{what}: an op may write what it makes over what it reads")
    if problem.meanwhile_bytes and g.is_general:
        raise ProblemError("meanwhile_bytes are taken between the passes, and there are none")


class Kind(NamedTuple):
    """What a field of a file must be: in words, and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_whole(x: Any) -> bool:
    return type(x) is int and x >= 0


def _is_integer(x: Any) -> bool:
    return type(x) is int


def _is_pair(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and isinstance(x[0], str) and _is_whole(x[1])


def list_of(words: str, fits: Callable[[Any], bool]) -> Kind:
    """The kind of a list whose entries all fit."""
    return Kind(f"a list of {words}", lambda x: isinstance(x, list) and all(map(fits, x)))


def or_null(kind: Kind) -> Kind:
    """``kind``, or nothing at all."""
    return Kind(f"{kind.words}, or null", lambda x: x is None or kind.fits(x))


WHOLE = Kind("a whole number of at least zero", _is_whole)
INTEGER = Kind("a whole number", _is_integer)
WHOLES = list_of("whole numbers of at least zero", _is_whole)
TEXT = Kind("text", lambda x: isinstance(x, str))

_ENDS = ("inputs", "tangents", "outputs", "gradients", "held")
_PROBLEM = {
    "budget_bytes": or_null(WHOLE),
    "resident_bytes": WHOLE,
    "epilogue_bytes": WHOLE,
    "lowering_bytes": INTEGER,
    "meanwhile_bytes": WHOLE,
    "storage_bytes": WHOLES,
    "values": list_of("pairs of a name and a storage", _is_pair),
    "ops": list_of("objects", lambda x: isinstance(x, dict)),
    **dict.fromkeys(_ENDS, WHOLES),
}
_ABSENT = {"lowering_bytes": 0, "meanwhile_bytes": 0}  # what need not be there, and what it is then
_OP = {
    "name": TEXT,
    "target": TEXT,
    "inputs": WHOLES,
    "outputs": WHOLES,
    "phase": Kind('"forward" or "backward"', lambda x: x in ("forward", "backward")),
    "pin": or_null(TEXT),
    "needed": or_null(TEXT),
    "module": TEXT,
    "runtime_ns": WHOLE,
    "workspace_bytes": INTEGER,
}


def read_object(
    text: str, form: str, kinds: Mapping[str, Kind], error: type[RematcError], **absent: Any
) -> dict[str, Any]:
    """The fields of a file that says it is in the format ``form``, `checked`; raises ``error``.

    ``absent`` has the fields that need not be there, and what they are then.
    """
    if len(text) > LARGEST:
        raise error(f"not a {form} file: {len(text)} characters, and {LARGEST} are the most that is read")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise error(f"not a {form} file: it can't be read as JSON ({e})") from e
    found = data.pop("format", None) if isinstance(data, dict) else None
    if found != form:
        raise error(f"not a {form} file: its format is {_short(found)}")
    return checked({**absent, **data}, kinds, error, f"this {form} file")


def checked(
    data: dict[str, Any], kinds: Mapping[str, Kind], error: type[RematcError], where: str
) -> dict[str, Any]:
    """``data``, lists as tuples, if it has these fields, no others, each of its kind; else ``error``."""
    missing = [key for key in kinds if key not in data]
    unknown = [key for key in data if key not in kinds]
    if missing or unknown:
        wrong = [f"lacks {key!r}" for key in missing] + [f"has an unknown {key!r}" for key in unknown]
        raise error(f"{where} {', '.join(wrong)}")
    for key, kind in kinds.items():
        if not kind.fits(data[key]):
            raise error(f"{where}: {key!r} must be {kind.words}, and is {_short(data[key])}")
    return {key: tuple(x) if isinstance(x, list) else x for key, x in data.items()}


def _short(x: object) -> str:
    text = repr(x)
    return text if len(text) <= 60 else f"{text[:57]}..."
