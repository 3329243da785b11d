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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rematc import compat
from rematc.capture import copies_all_memory
from rematc.costs import Call, Taken
from rematc.errors import CaptureError
from rematc.rounding import Rounding, exactly
from rematc.storages import storages
from rematc.tuning import Kernel, kernels_of, started

Measure = Callable[[Sequence[Call]], Mapping[Hashable, Taken]]
BUFFER = "buf"  # what Inductor calls the tensors that its code makes
NOT_KNOWN = (
    "the code that Inductor writes for this model does something that rematc can't follow: %s\n"
    '  what to try: inner="eager", which runs op by op; or Inductor\'s settings as by default'
)


class _Tuned(NamedTuple):
    """A Triton kernel runs for the first time: bytes of what it writes over, see `rematc.tuning`."""

    sizes: Sequence[int]
    has_to_fit: bool


class _Moment(NamedTuple):
    """A statement: the storages that something holds from then on, with their bytes; those let go of; its
    calls of torch's ops, each with the storages that it made; what a Triton kernel is tuned with; and the
    number of the `Batch` that it belongs to.
    """

    held: Sequence[tuple[int, int]] = ()
    released: Sequence[int] = ()
    calls: Sequence[tuple[Call, dict[int, int]]] = ()
    tuned: _Tuned | None = None
    batch: int = 0


class Batch(NamedTuple):
    """Buffers that are made one after the other, for the next kernel, and the most bytes alive meanwhile."""

    buffers: tuple[str, ...]
    alive_bytes: int


class Rehearsal:
    '''Storages alive, and the most bytes that there were; several codes are played one after the other.

    ``resident`` tensors are there all the time and not counted. ``rounded``: what the allocator gives
    for so many bytes. ``measure`` finds what calls of torch's ops take, by their keys:
    a ready-made kernel takes scratch memory while it runs, and may return more than it says. For one in
    Triton the card's cache of ``cache_bytes`` is cleared when it first runs (`rematc.tuning`).
    ``batches`` are those of the code that was played last.

    >>> code = """
    ... def call(args):
    ...     x, = args
    ...     args.clear()
    ...     buf0 = empty_strided_cpu((8,), (1,), torch.int8)
    ...     kernel(x, buf0)
    ...     del x
    ...     return (buf0, )
    ... """
    >>> rehearsal = Rehearsal(resident=())
    >>> results = rehearsal.play(code, [torch.ones(4, dtype=torch.int8)])
    >>> rehearsal.peak_bytes, rehearsal.live_bytes, rehearsal.batches[1]
    (12, 8, Batch(buffers=('buf0',), alive_bytes=12))
    '''

    def __init__(
        self,
        resident: Sequence[Any],
        rounded: Rounding = exactly,
        measure: Measure = lambda calls: {},
        cache_bytes: int = 0,
    ) -> None:
        self.rounded, self.measure, self.cache_bytes = rounded, measure, cache_bytes
        self.resident = {key for key, _ in storages(resident)}
        self.holders: Counter[int] = Counter()
        self.size: dict[int, int] = {}  # of what is held
        self.live_bytes = self.peak_bytes = 0
        self.batches: list[Batch] = []

    def hold(self, value: Any) -> None:
        """Something holds ``value``, a tensor or a collection of them, from now on."""
        self._count([_Moment(held=self._counted(value))])

    def release(self, value: Any) -> None:
        """The opposite of `hold`."""
        self._count([_Moment(released=_keys(self._counted(value)))])

    def play(self, source: str, inputs: Sequence[Any], handed_over: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Run ``call(inputs)`` of the module ``source``; the results are held when it returns.

        The list of inputs is the callee's, which empties it; nobody else holds what is ``handed_over`` from
        then on. Raises `ValueError` for code without ``call``,
        `CaptureError` for one that makes a tensor in a way that can't be followed, as it would count as
        nothing, or that asks for numbers, of which there are none.
        """
        names, made = _Names(inputs), list[tuple[Call, dict[int, int]]]()
        kernels = kernels_of(source) if self.cache_bytes else {}
        moments = [_Moment(self._counted(inputs), _keys(self._counted(handed_over)))]
        batches, has_run = [list[str]()], True

        def on_call(target: Any, args: Any, kwargs: Any, result: Any) -> None:
            if target not in _MAKERS:
                made.append((Call(target, args, kwargs), self._made(target, (args, kwargs), result)))

        with compat.watched(on_call):
            for statement in _body(source):
                last = len(batches) - 1
                if isinstance(statement, ast.Return):
                    results = tuple(names.value_of(statement.value))
                    _check_known(statement, results)
                    left = _keys(self._counted(list(names.held.values())))
                    returned = _Moment(held=self._counted(results), batch=last)
                    alive = self._count([*moments, returned, _Moment(released=left, batch=last)])
                    self.batches = [Batch(tuple(b), n) for b, n in zip(batches, alive, strict=True)]
                    return results
                held, released = names.run(statement)
                if names.made and has_run and not _is_part(statement):
                    batches.append([])
                    has_run = False
                batches[-1] += names.made
                has_run = has_run or isinstance(statement, ast.Expr) or bool(made)
                tuned = self._tuned(kernels, statement, names)
                counted = self._counted(held), _keys(self._counted(released))
                moments.append(_Moment(*counted, made.copy(), tuned, len(batches) - 1))
                made.clear()
        raise ValueError("the code has no function call() that returns something")

    def _count(self, moments: list[_Moment]) -> list[int]:
        """Count what is alive; the most of it in each batch."""
        taken = self.measure([call for moment in moments for call, _ in moment.calls])
        most = [0] * (1 + moments[-1].batch)
        for moment in moments:
            larger = dict[int, int]()
            for call, made in moment.calls:  # which of several results is larger is not known
                more = max(0, _taken(taken, call).result_bytes - sum(made.values()))
                larger |= {key: size + more for key, size in made.items()}
            for key, size in moment.held:
                if not self.holders[key]:
                    self.size[key] = max(size, larger.get(key, 0))
                    self.live_bytes += self.size[key]
                self.holders[key] += 1
            alive_bytes = self.live_bytes
            self.peak_bytes = max(self.peak_bytes, alive_bytes)
            for key in moment.released:
                self.holders[key] -= 1
                self.live_bytes -= 0 if self.holders[key] else self.size.pop(key)
            scratch = max((_taken(taken, call).workspace_bytes for call, _ in moment.calls), default=0)
            if moment.tuned is not None:
                scratch = max(scratch, self.cache_bytes + self._copied(moment.tuned))
            most[moment.batch] = max(most[moment.batch], alive_bytes, self.live_bytes + scratch)
            self.peak_bytes = max(self.peak_bytes, most[moment.batch])
        return most

    def _copied(self, tuned: _Tuned) -> int:
        """Bytes of copies; where they have to fit in below the peak by now, of those that do, in turn."""
        if not tuned.has_to_fit:
            return sum(tuned.sizes)
        room = left = self.peak_bytes - self.live_bytes
        for size in tuned.sizes:
            left -= size if size <= left else 0
        return room - left

    def _tuned(self, kernels: dict[str, Kernel], statement: ast.stmt, names: _Names) -> _Tuned | None:
        """What tuning the kernel copies that a statement runs; one of ``kernels`` is tuned once, and gone."""
        if (found := started(kernels, statement)) is None:
            return None
        name, written = found
        sizes = [size for n in written for _, size in self._counted(names.held.get(n), there=True)]
        return _Tuned(sizes, kernels.pop(name).has_to_fit)

    def _made(self, target: Any, given: tuple[Any, Any], result: Any) -> dict[int, int]:
        """The storages that an op made, with their bytes."""
        read = dict(self._counted(given, there=True))
        least = read[compat.storage_key(given[0][0])] if copies_all_memory(target) else 0
        return {key: max(size, least) for key, size in self._counted(result) if key not in read}

    def _counted(self, value: Any, there: bool = False) -> list[tuple[int, int]]:
        """The storages of ``value``; those of what is resident only if ``there``."""
        left_out = () if there else self.resident
        return [(key, self.rounded(size)) for key, size in storages(value) if key not in left_out]


def _keys(counted: Iterable[tuple[int, int]]) -> list[int]:
    return [key for key, _ in counted]


def _taken(taken: Mapping[Hashable, Taken], call: Call) -> Taken:
    return taken.get(call.key, Taken(0, 0))


class _Names:
    """The local names of ``call``; each holds what it stands for. ``made``: buffers of the last statement."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.made: list[str] = []
        self.names = _Globals(args=list(inputs))
        self.held: dict[str, Any] = {"args": tuple(inputs)}

    def run(self, statement: ast.stmt) -> tuple[list[Any], list[Any]]:
        """What names hold since, and what they let go of."""
        try:
            exec(compile(ast.Module([statement], []), "call", "exec"), self.names)
        except Exception as e:  # that it asserts something of numbers, say (nan_asserts): here are none
            raise CaptureError(NOT_KNOWN % ast.unparse(statement)) from e
        touched = dict.fromkeys(n.id for n in ast.walk(statement) if isinstance(n, ast.Name))
        now = {name: _frozen(self.names[name]) for name in touched if dict.__contains__(self.names, name)}
        _check_known(statement, (value for name, value in now.items() if name.startswith(BUFFER)))
        changed = [n for n in touched if now.get(n) is not self.held.get(n)]
        self.made = [n for n in changed if n in now and n.startswith(BUFFER)]
        released = [self.held.pop(n, None) for n in changed]
        self.held |= {n: now[n] for n in changed if n in now}
        return [now.get(n) for n in changed], released

    def value_of(self, expression: ast.expr | None) -> Any:
        return eval(
            compile(ast.Expression(expression or ast.Tuple([], ast.Load())), "call", "eval"), self.names
        )


class _Silent:
    """Stands for every kernel and stream: does nothing, and has whatever is asked of it."""

    def __call__(self, *_: Any, **__: Any) -> _Silent:
        return self

    def __getattr__(self, name: str) -> _Silent:
        if name.startswith("__"):  # torch asks whether it is a tensor of a kind of its own
            raise AttributeError(name)
        return self


def _is_part(statement: ast.stmt) -> bool:
    """Does it take one of several results apart? That is no new buffer."""
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript)


def _check_known(statement: ast.stmt, made: Iterable[Any]) -> None:
    if any(isinstance(value, _Silent) for value in made):
        raise CaptureError(NOT_KNOWN % ast.unparse(statement))


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
