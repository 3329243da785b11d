"""Problems as networkx graphs: a general DAG of ops in, and any problem out and back.

A *general DAG* is the setting of Checkmate and Moccasin: every op makes one tensor, may run again at
any time, and the sinks must be there at the end. As a `Problem` it has forward ops alone and no outputs, and
its gradients are the sinks: so no op runs in the forward pass, and `Plan.backward` is the whole
sequence, in which the first run of an op is free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import networkx as nx

from rematc.errors import ProblemError
from rematc.graph import Graph, Op, Value
from rematc.problem import FORMAT, OpCost, Problem

DERIVED = "bytes"  # the node attribute that `to_networkx` adds for readers: no field of an op


def from_networkx(
    dag: Any,
    *,
    bytes: str = "bytes",
    runtime_ns: str = "runtime_ns",
    workspace_bytes: str = "workspace_bytes",
    pin: str = "pin",
    order: str | Iterable[Hashable] = "order",
) -> Problem:
    """A `networkx.DiGraph` as a problem without a budget; its edge u -> v says that v reads what u makes.

    The keywords name the node attributes to read: ``bytes``, the size of what the op makes, and
    ``runtime_ns``, the time of one run, which every node needs; ``workspace_bytes`` (0 if a node has none)
    and ``pin``, why the op may not run twice, in words (None: it may). Sizes and times are whole numbers of
    at least zero; numpy's, and floats without a fraction, will do. An op is called by its node, or by the
    node's attribute ``name``.

    Ops first run in the order of the attribute ``order``, or of ``order`` itself where it lists the nodes;
    else in the topological order closest to that in which the nodes were added. What the sinks make
    is held to the end, be it one or several.

    A graph that `to_networkx` wrote is read back as the problem that it was; the keywords are not for it.

    Raises `ProblemError`, with the way out, for anything but a directed graph without cycles and parallel
    edges, and for what is missing, negative or no whole number.

    After Jain et al., "Checkmate" (MLSys 2020), and Bartan et al., "Moccasin" (ICML 2023).

    >>> dag = nx.DiGraph([("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    >>> for node, size in zip("abcd", (10, 10, 10, 1)):
    ...     dag.add_node(node, size=size, runtime_ns=7)
    >>> problem = from_networkx(dag, bytes="size")
    >>> from rematc.plan import Plan
    >>> from rematc.simulate import simulate
    >>> for backward in ((0, 1, 2, 3), (0, 1, 2, 0, 3)):
    ...     profile = simulate(problem, Plan(saved=(), backward=backward))
    ...     print(profile.peak_bytes, profile.recompute_ns)
    30 0
    21 7
    """
    _check_kind(dag)
    if str(dag.graph.get("format")).startswith("rematc."):
        return _read_back(dag)
    names = {"bytes": bytes, "runtime_ns": runtime_ns, "workspace_bytes": workspace_bytes, "pin": pin}
    _check_names(dag, {**names, "order": order} if isinstance(order, str) else names)
    nodes = _in_order(dag, order)
    place = {node: i for i, node in enumerate(nodes)}
    ops = tuple(_op(dag, node, place, pin) for node in nodes)
    graph = Graph(
        storage_bytes=tuple(_whole(dag, node, bytes, "bytes") for node in nodes),
        values=tuple(Value(op.name, i) for i, op in enumerate(ops)),
        ops=ops,
        gradients=tuple(place[node] for node in nodes if not dag.succ[node]),
    )
    costs = (
        OpCost(
            _whole(dag, node, runtime_ns, "runtime_ns"),
            _whole(dag, node, workspace_bytes, "workspace_bytes", default=0),
        )
        for node in nodes
    )
    return Problem(graph, tuple(costs))


def to_networkx(problem: Problem) -> Any:
    """Any problem as a `networkx.DiGraph` of its ops, from which `from_networkx` makes the same problem.

    Node i is op i; its attributes are the op's fields in the format of docs/problem.md, and ``bytes``,
    what a run of it allocates. An edge carries ``values``, the indices of those that go along it. All else
    are attributes of the graph. Lists, texts, whole numbers and None throughout, so it survives JSON
    (`networkx.node_link_data`).

    Once ``dag.graph["format"]`` is deleted, `from_networkx` reads it as a general DAG, in which a view is
    a tensor of no bytes that keeps nothing alive.

    >>> ops = (Op("f", "exp", (), (0,)), Op("g", "exp", (0,), (1,)))
    >>> g = Graph((8, 8), (Value("x", 0), Value("y", 1)), ops, gradients=(1,))
    >>> dag = to_networkx(Problem(g, (OpCost(5), OpCost(6)), budget_bytes=16))
    >>> dag.nodes[1]["name"], dag.nodes[1]["runtime_ns"], dag.edges[0, 1]["values"]
    ('g', 6, [0])
    >>> from_networkx(dag).budget_bytes
    16
    """
    data = json.loads(problem.to_json())
    graph = problem.graph
    dag = nx.DiGraph()
    for i, op in enumerate(data.pop("ops")):
        dag.add_node(i, **op, **{DERIVED: _allocated(graph, graph.ops[i])})
    dag.graph.update(data)
    dag.add_edges_from((u, v, {"values": values}) for (u, v), values in _edges(graph).items())
    return dag


def _allocated(graph: Graph, op: Op) -> int:
    """Bytes of the storages that a run of ``op`` makes: not those of its inputs, nor resident ones."""
    there = {graph.values[v].storage for v in op.inputs} | graph.resident
    made = {graph.values[v].storage for v in op.outputs} - there
    return sum(graph.storage_bytes[s] for s in made)


def _edges(graph: Graph) -> dict[tuple[int, int], list[int]]:
    """Who reads whom, and which values: each once, though an op may read one twice."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, op in enumerate(graph.ops):
        for v in dict.fromkeys(op.inputs):
            if v in graph.producer:
                found.setdefault((graph.producer[v], i), []).append(v)
    return found


def _read_back(dag: Any) -> Problem:
    """What `to_networkx` wrote; the nodes are read, and what follows from them must still agree."""
    if {*dag} != {*range(len(dag))}:
        raise ProblemError(
            f"the nodes of a {FORMAT} graph are its ops, 0 to {len(dag) - 1}, and these are not; for a graph "
            'of another kind delete graph["format"]'
        )
    ops = [{key: x for key, x in dag.nodes[i].items() if key != DERIVED} for i in range(len(dag))]
    try:
        text = json.dumps({**dag.graph, "ops": ops})
    except (TypeError, ValueError, RecursionError) as e:
        raise ProblemError(f"an attribute of a {FORMAT} graph can't be written as JSON: {e}") from e
    problem = Problem.from_json(text)
    for i, op in enumerate(problem.graph.ops):
        made = _allocated(problem.graph, op)
        if dag.nodes[i].get(DERIVED, made) != made:
            raise ProblemError(f"op {i} allocates {made} bytes: change storage_bytes, not {DERIVED!r} alone")
    _check_edges(dag, problem.graph)
    return problem


def _check_edges(dag: Any, graph: Graph) -> None:
    """Raise `ProblemError` unless the edges of ``dag`` say the same as the inputs of its nodes."""
    edges = _edges(graph)
    found = {(u, v): data.get("values", []) for u, v, data in dag.edges(data=True)}
    for u, v in [*edges, *found]:
        by_inputs, by_edge = edges.get((u, v)), found.get((u, v))
        if by_inputs != by_edge:
            raise ProblemError(
                f"op {v} reads {by_inputs or 'nothing'} of op {u} by its 'inputs', and "
                f"{by_edge or 'nothing'} by the edge's 'values': change both, or neither"
            )


def _check_kind(dag: Any) -> None:
    """Raise `ProblemError` unless it is a directed graph without parallel edges, and not empty."""
    if not isinstance(dag, nx.Graph):
        raise ProblemError(f"give a networkx.DiGraph, not {type(dag).__name__}")
    if not dag.is_directed():
        raise ProblemError(
            "the graph has no directions: give a networkx.DiGraph, where u -> v says v reads u"
        )
    if dag.is_multigraph():
        raise ProblemError("the graph may have parallel edges: give networkx.DiGraph(dag), which joins them")
    if not dag:
        raise ProblemError("the graph has no nodes: add one for each op")


def _check_names(dag: Any, names: Mapping[str, str]) -> None:
    """An attribute that the caller named must be there: mistyped, it would quietly count as absent."""
    there = sorted({str(key) for _, data in dag.nodes(data=True) for key in data})
    for keyword, attribute in names.items():
        if attribute != keyword and attribute not in there:
            raise ProblemError(
                f"no node has the attribute {attribute!r} that {keyword}= names; there are: "
                f"{', '.join(there) or 'none'}"
            )


def _in_order(dag: Any, order: str | Iterable[Hashable]) -> list[Any]:
    """The nodes in the order in which they first run: as given, else topological."""
    added = {node: i for i, node in enumerate(dag)}
    try:
        nodes = list(nx.lexicographical_topological_sort(dag, key=added.__getitem__))
    except nx.NetworkXUnfeasible as e:
        cycle = nx.find_cycle(dag)
        way = " -> ".join(repr(u) for u, *_ in [*cycle, cycle[0]])
        raise ProblemError(
            f"the graph has a cycle, {way}: unroll the loop into ops that run once each"
        ) from e
    if not isinstance(order, str):
        nodes = list(order)
        if len(nodes) != len(dag) or {*nodes} != {*dag}:
            raise ProblemError(f"order= must list each of the {len(dag)} nodes once")
    elif any(order in data for _, data in dag.nodes(data=True)):
        rank = {node: _whole(dag, node, order, "order") for node in dag}
        nodes = sorted(dag, key=rank.__getitem__)
        for u, v in pairwise(nodes):
            if rank[u] == rank[v]:
                raise ProblemError(f"nodes {u!r} and {v!r} have the same {order!r}: number them apart")
    place = {node: i for i, node in enumerate(nodes)}
    for u, v in dag.edges:
        if place[u] > place[v]:
            raise ProblemError(f"node {v!r} reads {u!r} and comes before it in the order: put {u!r} first")
    return nodes


def _op(dag: Any, node: Any, place: Mapping[Any, int], pin: str) -> Op:
    data = dag.nodes[node]
    why = data.get(pin)
    if why is not None and not (isinstance(why, str) and why):
        raise ProblemError(
            f"node {node!r}: {pin!r} is {why!r}, and must say in words why the op may not run twice, as in "
            '"random", or be None'
        )
    name = str(data.get("name", node))
    reads = tuple(sorted(place[u] for u in dag.pred[node]))
    return Op(name, str(data.get("target", name)), reads, (place[node],), pin=why)


def _whole(dag: Any, node: Any, attribute: str, keyword: str, default: int | None = None) -> int:
    """The attribute as an int, whichever type says it."""
    x = dag.nodes[node].get(attribute, default)
    if x is None:
        there = ", ".join(map(repr, dag.nodes[node])) or "none"
        raise ProblemError(
            f"node {node!r} lacks {attribute!r}: set it, or name another attribute, as in "
            f'{keyword}="size"; it has: {there}'
        )
    number: Any = math.nan if isinstance(x, bool) or not isinstance(x, Real) else x
    if (isinstance(number, Integral) or math.isfinite(number)) and number == int(number) >= 0:
        return int(number)
    raise ProblemError(
        f"node {node!r}: {attribute!r} is {x!r}, and must be a whole number of at least zero: round it, "
        "or count in a smaller unit"
    )
