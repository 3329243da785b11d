"""rematc: a memory budget for torch.compile.

``torch.compile(model, backend=rematc.backend(budget="20GB"))`` trains the model with a peak memory
that stays under 20 GB, with exactly the same gradients, and the least recomputation for that memory.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rematc.backend import Backend, backend
    from rematc.compare import compare
    from rematc.errors import BudgetError, CaptureError, OptionError, PlanError, ProblemError, RematcError
    from rematc.measure import Measurement, measure
    from rematc.pareto import pareto
    from rematc.partitioner import partitioner
    from rematc.plan import Plan
    from rematc.problem import OpCost, Problem
    from rematc.pure import pure
    from rematc.simulate import Profile, simulate, validate
    from rematc.solve import solve
    from rematc.verify import Verification, verify

__version__ = "0.1.0"

# Where each public name lives: it is loaded when it is first asked for, so that `import rematc`
# brings in neither OR-Tools nor Inductor.
_HOMES = {
    "Backend": "backend",
    "BudgetError": "errors",
    "CaptureError": "errors",
    "Measurement": "measure",
    "OpCost": "problem",
    "OptionError": "errors",
    "Plan": "plan",
    "PlanError": "errors",
    "Problem": "problem",
    "ProblemError": "errors",
    "Profile": "simulate",
    "RematcError": "errors",
    "Verification": "verify",
    "backend": "backend",
    "compare": "compare",
    "measure": "measure",
    "pareto": "pareto",
    "partitioner": "partitioner",
    "pure": "pure",
    "simulate": "simulate",
    "solve": "solve",
    "validate": "simulate",
    "verify": "verify",
}

__all__ = [
    "Backend",
    "BudgetError",
    "CaptureError",
    "Measurement",
    "OpCost",
    "OptionError",
    "Plan",
    "PlanError",
    "Problem",
    "ProblemError",
    "Profile",
    "RematcError",
    "Verification",
    "backend",
    "compare",
    "measure",
    "pareto",
    "partitioner",
    "pure",
    "simulate",
    "solve",
    "validate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rematc' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"rematc.{_HOMES[name]}"), name)
    return value


class _Package(ModuleType):
    """`rematc.backend` is the function, though its room rematc/backend.py has the same name.

    Importing a submodule sets it on its package; here that must not hide the public name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
