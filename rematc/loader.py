"""The user's file: run it, call its `build()`, and say what is wrong with it in one message."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rematc.errors import CaptureError

Built = tuple[Any, Any, Callable[[Any], Any] | None]

EXAMPLE = (
    "def build():\n"
    "        model = torch.nn.Linear(8, 1)\n"
    "        return model, torch.randn(4, 8), lambda y: y.sum()"
)


def load(path: Path, name: str = "build") -> Built:
    """Run the file at ``path`` and return the model, inputs and loss function (or None) of ``name()``.

    The file's folder is on ``sys.path`` meanwhile, so it finds what stands beside it. Raises `CaptureError`
    for a file that is not there or fails, and for a function that is not there, fails or returns
    something else.
    """
    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise CaptureError(f"{path} {what}: give a Python file with\n    {EXAMPLE}")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        module = _run(path)
        build = _find(module, path, name)
        return _checked(_guarded(build, path, f"{name}()"), path, name)
    finally:
        sys.path.remove(str(path.resolve().parent))


def _run(path: Path) -> ModuleType:
    # Under a name that no import can mean: the file may be called torch.py.
    spec = importlib.util.spec_from_loader(f"rematc explains {path.stem}", loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (OSError, ValueError, SyntaxError) as e:
        if not isinstance(e, SyntaxError) or e.lineno is None:
            raise CaptureError(f"{path} can't be read as Python ({e}): give a Python file") from e
        text = (e.text or "").strip()
        raise CaptureError(f"{path}:{e.lineno}: syntax error: {e.msg}: {text}\n  mend that line first") from e
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up
    _guarded(lambda: exec(code, module.__dict__), path, "the file")
    return module


def _find(module: ModuleType, path: Path, name: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found
    own = [
        n for n, f in vars(module).items() if getattr(f, "__module__", "") == module.__name__ and callable(f)
    ]
    nearest = get_close_matches(name, own, 1, 0.5) or own[:1]
    other = f" (for another function give its name: {path}:{nearest[0]})" if nearest else ""
    what = "is no function" if found is not None else "is not there"
    raise CaptureError(
        f"{path}: {name!r} {what}{other}. It returns (model, inputs) or (model, inputs, loss_fn), as\n"
        f"    {EXAMPLE}"
    )


def _guarded(run: Callable[[], Any], path: Path, what: str) -> Any:
    """``run()``; what it raises is named with the line of the user's file that led there."""
    try:
        return run()
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        own = [f for f in frames if f.filename == str(path)]
        at = f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line}" if own else str(path)
        said = str(e).strip().splitlines()
        raise CaptureError(
            f"{what} raises {type(e).__name__}: {said[0] if said else '(no message)'}\n  at {at}\n"
            f"  what to try: python {path}, and mend what fails there"
        ) from e


def _checked(built: Any, path: Path, name: str) -> Built:
    if not isinstance(built, tuple | list) or len(built) not in (2, 3):
        what = f"{len(built)} things" if isinstance(built, tuple | list) else f"a {type(built).__name__}"
        raise CaptureError(
            f"{path}: {name}() returns {what}; return (model, inputs) or (model, inputs, loss_fn), as\n"
            f"    {EXAMPLE}"
        )
    model, inputs, loss_fn = (*built, None)[:3]
    for part, given in (("model", model), ("loss function", loss_fn or callable)):
        if not callable(given):
            raise CaptureError(
                f"{path}: {name}() returns a {part} of type {type(given).__name__}, which can't be called; "
                "return (model, inputs) or (model, inputs, loss_fn)"
            )
    return model, inputs, loss_fn
