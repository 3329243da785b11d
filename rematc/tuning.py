"""What Inductor takes when a Triton kernel first runs: it tries which way to run it is fastest.

Before each try it clears the card's cache, by writing to as much memory. What the kernel writes over is
copied beforehand; in a backward pass copies that don't fit in below the highest that memory has been by then
are made on the host. Kernels of a user's own, under ``triton.autotune``, are not known here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import NamedTuple

PREFIX = "triton_"  # of a kernel's name


class Kernel(NamedTuple):
    """Which of its arguments a kernel writes over, by position; ``has_to_fit``: copies of them."""

    written: tuple[int, ...]
    has_to_fit: bool


_WRITTEN = re.compile(r"'mutated_arg_names': \[([^]]*)\]")
_HAS_TO_FIT = "'optimize_mem': True"


def kernels_of(source: str) -> dict[str, Kernel]:
    '''The Triton kernels in code that Inductor wrote, by name.

    >>> code = """
    ... triton_0 = async_compile.triton('triton_0', \'\'\'
    ... inductor_meta={'mutated_arg_names': ['in_out_ptr0'], 'optimize_mem': True}
    ... def triton_0(in_out_ptr0, in_ptr0, xnumel):
    ...     pass
    ... \'\'\')
    ... """
    >>> kernels_of(code)
    {'triton_0': Kernel(written=(0,), has_to_fit=True)}
    '''
    found = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(args=[_, ast.Constant(value=str(text))])
            ):
                if name.startswith(PREFIX):
                    found[name] = Kernel(_written(name, text), _HAS_TO_FIT in text)
    return found


def _written(name: str, text: str) -> tuple[int, ...]:
    listed = _WRITTEN.search(text)
    signature = re.search(rf"def {name}\(([^)]*)\)", text)
    if listed is None or signature is None:
        return ()
    written = {part.strip(" '\"") for part in listed[1].split(",")}
    return tuple(i for i, part in enumerate(signature[1].split(",")) if part.split(":")[0].strip() in written)


def started(kernels: Mapping[str, Kernel], statement: ast.stmt) -> tuple[str, list[str]] | None:
    """The one of ``kernels`` that a statement runs, and the names of what it writes over."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=args)):
            if name in kernels:
                written = [args[i] for i in kernels[name].written if i < len(args)]
                return name, [arg.id for arg in written if isinstance(arg, ast.Name)]
    return None
