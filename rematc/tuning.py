"""What Inductor takes when a Triton kernel first runs: it tries which way to run it is fastest.

Before each try it clears the card's cache, by writing to as much memory. What the kernel writes over is
copied beforehand, as far as copies fit in below the highest that memory has been by then; else to the host.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

PREFIX = "triton_"  # of a kernel's name, and of the parameters that it has

_WRITTEN = re.compile(r"'mutated_arg_names': \[([^]]*)\]")


def kernels_of(source: str) -> dict[str, tuple[int, ...]]:
    '''Of each Triton kernel in code of Inductor's: which of its arguments it writes over, by position.

    >>> code = """
    ... triton_0 = async_compile.triton('triton_0', \'\'\'
    ... inductor_meta={'mutated_arg_names': ['in_out_ptr0']}
    ... def triton_0(in_out_ptr0, in_ptr0, xnumel):
    ...     pass
    ... \'\'\')
    ... """
    >>> kernels_of(code)
    {'triton_0': (0,)}
    '''
    found = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(args=[_, ast.Constant(value=str(text))])
            ):
                if name.startswith(PREFIX):
                    found[name] = _written_over(name, text)
    return found


def _written_over(name: str, text: str) -> tuple[int, ...]:
    listed = _WRITTEN.search(text)
    signature = re.search(rf"def {name}\(([^)]*)\)", text)
    if listed is None or signature is None:
        return ()
    written = {part.strip(" '\"") for part in listed[1].split(",")}
    return tuple(i for i, part in enumerate(signature[1].split(",")) if part.split(":")[0].strip() in written)


def started(statement: ast.stmt) -> tuple[str, Sequence[ast.expr]] | None:
    """The name and the arguments of the Triton kernel that a statement runs; None if it runs none."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=args)):
            return (name, args) if name.startswith(PREFIX) else None
    return None


def written_over(kernels: Mapping[str, tuple[int, ...]], statement: ast.stmt) -> tuple[str, list[str]] | None:
    """The kernel that a statement runs, and the names of what that writes over; None if it runs none."""
    found = started(statement)
    if found is None:
        return None
    name, args = found
    at = [args[i] for i in kernels.get(name, ()) if i < len(args)]
    return name, [arg.id for arg in at if isinstance(arg, ast.Name)]
