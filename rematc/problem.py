"""What the solver is asked: a graph, its costs, and the memory it may use. JSON in and out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from rematc.errors import ProblemError
from rematc.graph import Graph, Op, Value

FORMAT = "rematc.problem/1"


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one run of an op costs: nanoseconds, and bytes that it needs only while it runs.

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
    copies a gradient whose strides are not its parameter's).

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

    def __post_init__(self) -> None:
        check(self)

    def with_budget(self, budget_bytes: int | None) -> Problem:
        """The same problem under another budget."""
        return replace(self, budget_bytes=budget_bytes)

    @property
    def graph_budget_bytes(self) -> int | None:
        """What the budget leaves for the graphs once ``resident_bytes`` is taken off."""
        return None if self.budget_bytes is None else self.budget_bytes - self.resident_bytes

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
                "storage_bytes": g.storage_bytes,
                "values": [[v.name, v.storage] for v in g.values],
                "ops": [
                    {**asdict(op), "runtime_ns": c.runtime_ns, "workspace_bytes": c.workspace_bytes}
                    for op, c in zip(g.ops, self.costs, strict=True)
                ],
                "inputs": g.inputs,
                "tangents": g.tangents,
                "outputs": g.outputs,
                "gradients": g.gradients,
            }
        )

    @staticmethod
    def from_json(text: str) -> Problem:
        """Read what `to_json` wrote; `ProblemError` says what is wrong with anything else."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ProblemError(f"this is {data['format']!r}, and this rematc reads {FORMAT!r}")
            return _from_dict(data)
        except (KeyError, TypeError, ValueError) as e:
            raise ProblemError(f"not a problem file ({type(e).__name__}: {e})") from e


def _from_dict(data: dict[str, Any]) -> Problem:
    ops = []
    costs = []
    for raw in data["ops"]:
        fields = dict(raw)
        costs.append(OpCost(fields.pop("runtime_ns"), fields.pop("workspace_bytes")))
        fields["inputs"], fields["outputs"] = tuple(fields["inputs"]), tuple(fields["outputs"])
        ops.append(Op(**fields))
    ends = {k: tuple(data[k]) for k in ("inputs", "tangents", "outputs", "gradients")}
    values = tuple(Value(name, storage) for name, storage in data["values"])
    return Problem(
        Graph(tuple(data["storage_bytes"]), values, tuple(ops), **ends),
        tuple(costs),
        data["budget_bytes"],
        data["resident_bytes"],
        data["epilogue_bytes"],
    )


def check(problem: Problem) -> None:
    """Raise `ProblemError` unless every op reads what was made before it, and sizes make sense."""
    g = problem.graph
    if len(problem.costs) != len(g.ops):
        raise ProblemError(f"{len(g.ops)} ops but {len(problem.costs)} costs")
    sizes = [*g.storage_bytes, *(c.runtime_ns for c in problem.costs)]
    sizes += [problem.resident_bytes, problem.epilogue_bytes]
    sizes += [c.workspace_bytes for c in problem.costs]
    if any(not isinstance(x, int) or x < 0 for x in sizes):
        raise ProblemError("sizes and times must be whole numbers, not below zero")
    if any(not 0 <= v.storage < len(g.storage_bytes) for v in g.values):
        raise ProblemError("a value stands in a storage that does not exist")
    made = {*g.inputs, *g.tangents}
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
