"""Layer kinds: modules that stand at the same place in layers of the same build."""

from __future__ import annotations

import re

from rematc.graph import Graph

TOP = "(top level)"
ALIKE = 0.5


def layer_kinds(graph: Graph) -> dict[str, str]:
    """The kind of each module path in ``graph``: the path, with "*" for the numbers of layers.

    Paths that differ only in numbers are of one kind if at least half of the ops that they run are the
    same: so the parts of a Sequential stay apart, and keep their numbers.

    >>> from rematc.graph import Op
    >>> ran = [("h.0.0", "mm"), ("h.0.1", "gelu"), ("h.1.0", "mm"), ("h.1.1", "gelu"), ("", "sum")]
    >>> layer_kinds(Graph((), (), tuple(Op(p, t, (), (), module=p) for p, t in ran)))
    {'h.0.0': 'h.*.0', 'h.0.1': 'h.*.1', 'h.1.0': 'h.*.0', 'h.1.1': 'h.*.1', '': '(top level)'}
    """
    targets: dict[str, set[str]] = {}
    for op in graph.ops:
        runs = targets.setdefault(op.module, set())
        if op.phase == "forward":
            runs.add(op.target)
    forms: dict[str, list[list[str]]] = {}
    for path in targets:
        alike = forms.setdefault(_starred(path), [])
        group = next((g for g in alike if _overlap(targets[g[0]], targets[path]) >= ALIKE), None)
        if group is None:
            alike.append([path])
        else:
            group.append(path)
    named = {p: _name(group, groups) for groups in forms.values() for group in groups for p in group}
    return {path: named[path] for path in targets}


def _starred(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _overlap(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


def _name(group: list[str], groups: list[list[str]]) -> str:
    """The form of the paths in ``group``, with those numbers that tell it from the other ``groups``."""
    others = [_columns(g) for g in groups]
    parts = [
        found[0] if len(found) == 1 else "*" if all(o[i] == found for o in others) else _ranges(found)
        for i, found in enumerate(_columns(group))
    ]
    return without_wrapper(".".join(parts)) or TOP


def without_wrapper(path: str) -> str:
    """The path without what Dynamo puts before the modules of a model that came wrapped in a function.

    >>> without_wrapper("L.'fn.0.1"), without_wrapper("L.'model.h.0"), without_wrapper("h.0")
    ('0.1', 'h.0', 'h.0')
    """
    return re.sub(r"^L\.'\w+'?\.?", "", path)


def shortened(kind: str, room: int) -> str:
    """``kind``, or its end if it is longer than ``room``; its last part stays whole.

    >>> shortened("model.layers.*.mlp.down_proj", 20)
    '..*.mlp.down_proj'
    """
    while len(kind) > room and "." in kind.removeprefix(".."):
        kind = f"..{kind.removeprefix('..').partition('.')[2]}"
    return kind


def _columns(paths: list[str]) -> list[list[str]]:
    """The different parts at each place of paths of one form."""
    return [list(dict.fromkeys(column)) for column in zip(*(p.split(".") for p in paths), strict=True)]


def _ranges(numbers: list[str]) -> str:
    """As in "0,4" or "1-11"."""
    ns = sorted(map(int, numbers))
    starts = [n for n in ns if n - 1 not in ns]
    ends = [n for n in ns if n + 1 not in ns]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
