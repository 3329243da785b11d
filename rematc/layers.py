"""Where a model's layers are, read from the module paths of its ops, and segments of them."""

from __future__ import annotations

from rematc.graph import Graph

SLICES = 16

Layers = tuple[tuple[int, ...], ...]


def find_layers(graph: Graph) -> Layers:
    """The forward ops of each layer, as op indices, in the order in which the layers start.

    A layer is a numbered module: "model.layers.3" of "model.layers.3.mlp". Where numbers nest, the level
    of the container with the most members decides, the outer on a tie: "layers.3" with 32 layers of 8 experts
    each, "layer2.0" in a ResNet (a name that ends in a digit is no number), "layers.2.blocks.5" in a Swin.
    All containers of that level count (an encoder's layers and a decoder's). Ops outside are in no layer.

    A model without numbered modules (most U-Nets) is cut into 16 slices of equally many forward ops.

    >>> from rematc.graph import Op
    >>> paths = ["embed", "h.0.mlp.0", "h.0.mlp.1", "h.1.mlp.0", "h.1.mlp.1", "h.2.mlp.0", "head"]
    >>> find_layers(Graph((), (), tuple(Op(p, "", (), (), module=p) for p in paths)))
    ((1, 2), (3, 4), (5,))
    """
    members: dict[str, set[str]] = {}
    for i in graph.forward:
        for prefix in _numbered(graph.ops[i].module):
            members.setdefault(prefix.rpartition(".")[0], set()).add(prefix)
    if not members or max(map(len, members.values())) < 2:
        return _slices(graph.forward, SLICES)
    levels = {container: sum(p.isdigit() for p in container.split(".")) for container in members}
    level = levels[max(sorted(members), key=lambda c: (len(members[c]), -levels[c]))]
    layers: dict[str, list[int]] = {}
    for i in graph.forward:
        prefixes = _numbered(graph.ops[i].module)
        if len(prefixes) > level:
            layers.setdefault(prefixes[level], []).append(i)
    return tuple(map(tuple, layers.values()))


def in_segments(layers: Layers, k: int) -> dict[int, int]:
    """The number of the segment of ``k`` consecutive layers that each op is in; other ops are not there.

    >>> in_segments(((0, 1), (2,), (4,)), 2)
    {0: 0, 1: 0, 2: 0, 4: 1}
    """
    return {op: n // k for n, layer in enumerate(layers) for op in layer}


def read_in_backward(graph: Graph) -> tuple[int, ...]:
    """The forward values that a backward op reads, or that are returned as gradients."""
    read = {v for b in graph.backward_steps for v in graph.ops[b].inputs} | {*graph.gradients}
    return tuple(sorted(v for i in graph.forward for v in graph.ops[i].outputs if v in read))


def crossing(graph: Graph, segments: dict[int, int]) -> tuple[int, ...]:
    """The forward values that one segment makes and another reads; what is in no segment counts as one.

    What checkpointing saves: the inputs of segments, and what a loss or a head reads of the last.
    """
    found = {
        v
        for i in graph.forward
        for v in graph.ops[i].inputs
        if v in graph.producer and segments.get(graph.producer[v]) != segments.get(i)
    }
    return tuple(sorted(found))


def recompute_whole(graph: Graph, saved: tuple[int, ...], segments: dict[int, int]) -> tuple[int, ...]:
    """Backward steps in which the first op to need anything of a segment gets all that backward reads of it.

    As in `torch.utils.checkpoint`: one segment at a time, each value kept until its last reader.
    """
    reads: dict[int, list[int]] = {}
    for v in read_in_backward(graph):
        reads.setdefault(segments.get(graph.producer[v], -1), []).append(v)
    at_hand = {*graph.inputs, *graph.tangents, *saved}
    steps: list[int] = []
    wanted = [(graph.ops[b].inputs, (b,)) for b in graph.backward_steps]
    for inputs, then in [*wanted, (graph.gradients, ())]:
        missing = graph.ancestors(inputs, stop=at_hand)
        touched = {segments[i] for i in missing if i in segments}
        missing |= graph.ancestors([v for s in sorted(touched) for v in reads.get(s, [])], stop=at_hand)
        for op in (*sorted(missing), *then):
            steps.append(op)
            at_hand.update(graph.ops[op].outputs)
    return tuple(steps)


def _numbered(module: str) -> list[str]:
    """The prefixes of a module path that end in a number, outermost first."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _slices(ops: tuple[int, ...], n: int) -> Layers:
    n = min(n, len(ops))
    return tuple(ops[len(ops) * i // n : len(ops) * (i + 1) // n] for i in range(n))
