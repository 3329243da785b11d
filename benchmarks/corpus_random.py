"""Random layered graphs, the general-DAG problems of the literature: no forward, no backward, one result.

After the idea of Gagrani et al. (2022, https://arxiv.org/abs/2207.05899, appendix A), at the settings of
Bartan et al. (Moccasin, 2023, https://arxiv.org/abs/2304.14463): new graphs of the same family.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise

from rematc.graph import Graph, Op, Value
from rematc.problem import OpCost, Problem

# Width of a layer over the number of layers, by the number of nodes: Moccasin's four graphs.
ASPECTS = {100: 0.27, 250: 0.43, 500: 0.36, 1000: 0.31}
SPREAD = 0.75  # a layer is as wide as the average, give or take this share of it
# A node feeds one of the next layer and this share of it besides. Theirs is 0.2, counted in another way: this
# makes as many edges.
DENSITY = 0.24
SKIPS = 0.14  # edges that pass over a layer, as a share of those that do not
# Sizes are drawn from a mixture of normal distributions: (weight, mean, deviation), in units of 1000 bytes.
SIZES = ((0.3, 0.5, 0.5), (0.3, 1.0, 1.0), (0.3, 3.0, 1.0), (0.1, 5.0, 1.0))
LONGEST_NS = 1000

Edges = set[tuple[int, int]]


def layered(nodes: int, seed: int) -> Problem:
    """A problem of that many ops, one value each: the first feeds a layer, the last is the result.

    Ops stand in a random topological order, and are named by their layer: "n3.0" is the first in layer 3.

    >>> problem = layered(100, seed=0)
    >>> len(problem.graph.ops), problem == layered(100, seed=0), problem == layered(100, seed=1)
    (100, True, False)
    """
    rng = random.Random(f"rematc layered {nodes} {seed}")
    layers = [[0], *_layers(nodes, rng), [nodes - 1]]
    edges = _edges(layers, rng)
    names = {node: f"n{depth}.{i}" for depth, layer in enumerate(layers) for i, node in enumerate(layer)}
    order = _random_order(nodes, edges, rng)
    place = {node: i for i, node in enumerate(order)}
    reads: list[list[int]] = [[] for _ in order]
    for source, target in edges:
        reads[place[target]].append(place[source])
    graph = Graph(
        storage_bytes=tuple(_size(rng) for _ in order),
        values=tuple(Value(names[node], i) for i, node in enumerate(order)),
        ops=tuple(Op(names[node], "node", tuple(sorted(reads[i])), (i,)) for i, node in enumerate(order)),
        gradients=(place[nodes - 1],),
    )
    return Problem(graph, tuple(OpCost(rng.randint(1, LONGEST_NS)) for _ in order))


def _layers(nodes: int, rng: random.Random) -> list[list[int]]:
    """The nodes between the first and the last, dealt out layer by layer."""
    inner = nodes - 2
    width = math.sqrt(inner * ASPECTS[nodes])
    layers, first = [], 1
    while first <= inner:
        wide = max(1, round(rng.uniform(1 - SPREAD, 1 + SPREAD) * width))
        layers.append(list(range(first, min(first + wide, nodes - 1))))
        first += wide
    return layers


def _edges(layers: list[list[int]], rng: random.Random) -> Edges:
    edges: Edges = set()
    for upper, lower in pairwise(layers):
        edges |= _between(upper, lower, rng)
    depth = {node: d for d, layer in enumerate(layers) for node in layer}
    last = len(layers) - 2  # nothing but the last layer feeds the result
    wanted = len(edges) + round(SKIPS * len(edges))
    while len(edges) < wanted:
        source, target = rng.randrange(1, len(depth) - 1), rng.randrange(1, len(depth) - 1)
        if depth[source] + 2 <= depth[target] <= last:
            edges.add((source, target))
    return edges


def _between(upper: list[int], lower: list[int], rng: random.Random) -> Edges:
    """Each node feeds a run of the next layer around its counterpart there; nobody is left out."""
    edges: Edges = set()
    for i, node in enumerate(upper):
        many = min(len(lower), 1 + int(DENSITY * len(lower) + rng.random()))
        middle = (i + rng.random()) / len(upper) * len(lower)
        start = min(max(0, round(middle - many / 2)), len(lower) - many)
        edges |= {(node, target) for target in lower[start : start + many]}
    fed = {target for _, target in edges}
    for j, target in enumerate(lower):
        if target not in fed:
            edges.add((upper[j * len(upper) // len(lower)], target))
    return edges


def _random_order(nodes: int, edges: Edges, rng: random.Random) -> list[int]:
    """A topological order: of the nodes that are ready, any one is next."""
    waits = [0] * nodes
    feeds: list[list[int]] = [[] for _ in range(nodes)]
    for source, target in sorted(edges):
        waits[target] += 1
        feeds[source].append(target)
    ready, order = [node for node in range(nodes) if not waits[node]], []
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        order.append(node)
        for target in feeds[node]:
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    return order


def _size(rng: random.Random) -> int:
    ((_, mean, deviation),) = rng.choices(SIZES, weights=[weight for weight, _, _ in SIZES])
    return max(10, 10 * round(100 * abs(rng.gauss(mean, deviation))))
