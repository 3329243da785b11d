"""General DAGs for the tests: by hand, at random, and what running one in some order needs."""

from __future__ import annotations

import random
from typing import Any

import networkx as nx


def dag_of(edges: str, **attributes: Any) -> nx.DiGraph:
    """The DAG of edges such as "ab bc"; each node makes 10 bytes in 1 ns, or has ``attributes``."""
    dag = nx.DiGraph()
    for u, v in edges.split():
        dag.add_edge(u, v)
    for node in dag:
        dag.add_node(node, **{"bytes": 10, "runtime_ns": 1, **attributes})
    return dag


def random_dag(seed: int) -> nx.DiGraph:
    rng = random.Random(seed)
    dag = nx.DiGraph()
    for i in range(rng.randint(1, 9)):
        size, ns, workspace = rng.randint(0, 9), rng.randint(0, 9), rng.choice([0, 0, 4])
        dag.add_node(i, bytes=size, runtime_ns=ns, workspace_bytes=workspace)
        dag.add_edges_from((u, i) for u in range(i) if rng.random() < 0.4)
    return dag


def random_runs(seed: int, n: int) -> list[int]:
    """All of ``n`` ops in order, and after each first run some that run again."""
    rng = random.Random(seed)
    return [i for new in range(n) for i in (new, *rng.choices(range(new + 1), k=rng.choice([0, 0, 1, 2])))]


def peak_by_intervals(dag: nx.DiGraph, runs: list[int]) -> int:
    """Moccasin's way to count: each run keeps its result until the last read before the op's next run."""
    live = [dag.nodes[i]["workspace_bytes"] for i in runs] + [0]
    for start, i in enumerate(runs):
        again = next((t for t in range(start + 1, len(runs)) if runs[t] == i), len(runs))
        reads = [t for t in range(start, again) if i in dag.pred[runs[t]]]
        last = len(runs) if again == len(runs) and not dag.succ[i] else max([start, *reads])
        for t in range(start, last + 1):
            live[t] += dag.nodes[i]["bytes"]
    return max(live)
