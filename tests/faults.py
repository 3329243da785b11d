"""Deliberate faults: a module's source with one piece of it changed, for as long as a `with` lasts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Fault:
    """In ``module``, ``right`` is what stands there once, and ``wrong`` stands there instead."""

    name: str
    module: str
    right: str
    wrong: str

    @contextmanager
    def there(self) -> Iterator[None]:
        """The module's functions run with the fault, by whatever name they were imported."""
        module = importlib.import_module(self.module)
        source = inspect.getsource(module)
        assert source.count(self.right) == 1, f"{self.right!r} does not stand once in {self.module}"
        twin = ModuleType(module.__name__)
        twin.__dict__.update(__file__=module.__file__, __package__=module.__package__)
        exec(compile(source.replace(self.right, self.wrong), str(module.__file__), "exec"), twin.__dict__)
        before = {function: function.__code__ for function in _functions(module).values()}
        try:
            for path, function in _functions(module).items():
                function.__code__ = _functions(twin)[path].__code__
            yield
        finally:
            for function, code in before.items():
                function.__code__ = code


def _functions(module: Any) -> dict[str, FunctionType]:
    """The functions and methods that a module defines, by path."""
    found = {}
    for name, thing in vars(module).items():
        owners = {name: thing}
        if inspect.isclass(thing):
            owners = {f"{name}.{key}": member for key, member in vars(thing).items()}
        for path, member in owners.items():
            member = inspect.unwrap(member) if isinstance(member, FunctionType) else member
            is_own = isinstance(member, FunctionType) and member.__module__ == module.__name__
            if is_own and isinstance(member.__code__, CodeType) and not member.__code__.co_freevars:
                found[path] = member
    return found
