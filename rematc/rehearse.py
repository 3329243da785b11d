"""Rehearse the code that Inductor wrote on tensors without memory: what is alive at each statement.

Inductor's last word is a Python function, ``call``: buffers are made, kernels are called, names are
deleted. All that decides the peak is in there (what fusion did away with, the order, what is done in
place), so it is run, statement by statement, with kernels that do nothing, and the storages that names
stand for are added up.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from rematc import compat
from rematc.costs import Call
from rematc.errors import CaptureError
from rematc.storages import storages

BUFFER = "buf"  # what Inductor calls the tensors that its code makes
NOT_KNOWN = (
    "the code that Inductor writes for this model makes a tensor in a way that rematc can't follow\n"
    '  what to try: inner="eager", which runs op by op'
)


class Rehearsal:
    '''Storages alive, and the most bytes that there were; several codes are played one after the other.

    ``resident`` tensors are there all the time and not counted. ``allocation_bytes``: the allocator
    rounds each storage up to a multiple. ``calls`` are those of torch's ops, each with the bytes alive then.

    >>> code = """
    ... def call(args):
    ...     x, = args
    ...     args.clear()
    ...     y = empty_strided_cpu((8,), (1,), torch.int8)
    ...     kernel(x, y)
    ...     del x
    ...     return (y, )
    ... """
    >>> rehearsal = Rehearsal(resident=())
    >>> results = rehearsal.play(code, [torch.ones(4, dtype=torch.int8)])
    >>> rehearsal.peak_bytes, rehearsal.live_bytes
    (12, 8)
    '''

    def __init__(self, resident: Sequence[Any], allocation_bytes: int = 1) -> None:
        self.allocation_bytes = allocation_bytes
        self.resident = {key for key, _ in storages(resident)}
        self.holders: Counter[int] = Counter()
        self.live_bytes = self.peak_bytes = 0
        self.calls: list[tuple[int, Call]] = []

    def hold(self, value: Any) -> None:
        """Something holds ``value``, a tensor or a collection of them, from now on."""
        for key, size in self._counted(value):
            self.live_bytes += 0 if self.holders[key] else size
            self.holders[key] += 1
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, value: Any) -> None:
        """The opposite of `hold`."""
        for key, size in self._counted(value):
            self.holders[key] -= 1
            self.live_bytes -= 0 if self.holders[key] else size

    def play(self, source: str, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run ``call(inputs)`` of the module ``source``; the results are held when it returns.

        The list of inputs is the callee's, which empties it. Raises `ValueError` for code without ``call``,
        `CaptureError` for one that makes a tensor in a way that can't be followed: it would count as nothing.
        """
        names, made = _Names(self, inputs), list[Call]()

        def on_call(*call: Any) -> None:
            if call[0] not in _MAKERS:
                made.append(Call(*call))

        with compat.watched(on_call):
            for statement in _body(source):
                if isinstance(statement, ast.Return):
                    results = tuple(names.value_of(statement.value))
                    _check_known(results)
                    self.hold(results)
                    names.forget()
                    return results
                names.run(statement)
                self.calls += [(self.live_bytes, call) for call in made]
                made.clear()
        raise ValueError("the code has no function call() that returns something")

    def _counted(self, value: Any) -> Iterator[tuple[int, int]]:
        unit = self.allocation_bytes
        return ((key, -(-size // unit) * unit) for key, size in storages(value) if key not in self.resident)


class _Names:
    """The local names of ``call``; each holds what it stands for."""

    def __init__(self, rehearsal: Rehearsal, inputs: Sequence[Any]) -> None:
        self.rehearsal = rehearsal
        self.names = _Globals(args=list(inputs))
        self.held: dict[str, Any] = {"args": tuple(inputs)}
        rehearsal.hold(self.held["args"])

    def run(self, statement: ast.stmt) -> None:
        exec(compile(ast.Module([statement], []), "call", "exec"), self.names)
        touched = dict.fromkeys(n.id for n in ast.walk(statement) if isinstance(n, ast.Name))
        now = {name: _frozen(self.names[name]) for name in touched if dict.__contains__(self.names, name)}
        _check_known(value for name, value in now.items() if name.startswith(BUFFER))
        changed = [n for n in touched if now.get(n) is not self.held.get(n)]
        self.rehearsal.hold([now.get(n) for n in changed])
        self.rehearsal.release([self.held.pop(n, None) for n in changed])
        self.held |= {n: now[n] for n in changed if n in now}

    def value_of(self, expression: ast.expr | None) -> Any:
        return eval(
            compile(ast.Expression(expression or ast.Tuple([], ast.Load())), "call", "eval"), self.names
        )

    def forget(self) -> None:
        self.rehearsal.release(list(self.held.values()))


class _Silent:
    """Stands for every kernel and stream: does nothing, and has whatever is asked of it."""

    def __call__(self, *_: Any, **__: Any) -> _Silent:
        return self

    def __getattr__(self, name: str) -> _Silent:
        if name.startswith("__"):  # torch asks whether it is a tensor of a kind of its own
            raise AttributeError(name)
        return self


def _check_known(values: Iterable[Any]) -> None:
    if any(isinstance(value, _Silent) for value in values):
        raise CaptureError(NOT_KNOWN)


_MAKERS = (torch.ops.aten.empty_strided.default, torch.ops.aten.as_strided.default)


class _Extern:
    """The ready-made kernels that Inductor calls by the names of torch's ops."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name, _Silent())


_KNOWN = {  # what stands above the function, as far as tensors are made with it
    "extern_kernels": _Extern(),
    "torch": torch,
    "aten": torch.ops.aten,
    "inductor_ops": torch.ops.inductor,
    "device": torch.device,
    **{name: getattr(math, name) for name in ("inf", "nan")},
    "math": math,
    "reinterpret_tensor": lambda t, size, stride, offset=0: torch.as_strided(t, size, stride, offset),
}


class _Globals(dict[str, Any]):
    """What the code finds where it is no local name: makers of tensors, torch's ops, silent kernels."""

    def __missing__(self, name: str) -> Any:
        if name == "__builtins__":
            raise KeyError(name)
        if name.startswith("empty_strided_"):
            device = name.removeprefix("empty_strided_").removesuffix("_pinned")
            return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
        return _KNOWN.get(name, _Silent())


def _frozen(value: Any) -> Any:
    """A list as a tuple: the code empties it later, and what it held before is to be known then."""
    return tuple(value) if isinstance(value, list) else value


def _body(source: str) -> Iterator[ast.stmt]:
    """The statements of ``call``; blocks that only choose a device are opened."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            return _flat(node.body)
    return iter(())


def _flat(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        if isinstance(statement, ast.With):
            yield from _flat(statement.body)
        else:
            yield statement
