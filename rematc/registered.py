"""The backend that torch knows by name: ``torch.compile(model, backend="rematc")``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import fx

from rematc.backend import backend
from rematc.errors import OptionError, refused


def by_name(gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend registered as "rematc": settings from ``options=``, the budget also from REMATC_BUDGET.

    ``torch.compile(model, backend="rematc", options={"budget": "20GB"})``
    """
    settings = dict(kwargs.get("options") or {})
    if "budget" not in settings:
        if "REMATC_BUDGET" not in os.environ:
            return refused(
                OptionError(
                    'backend="rematc" needs a budget: torch.compile(..., options={"budget": "20GB"}), '
                    "or REMATC_BUDGET=20GB in the environment"
                )
            )
        text = os.environ["REMATC_BUDGET"]
        settings["budget"] = int(text) if text.isdigit() else text
    try:
        made = backend(**settings)
    except OptionError as e:
        return refused(e)
    except TypeError as e:
        known = "budget, inner, reserve, optimizer, time_limit_s, gap, costs, measure_s, accumulate, regather"
        return refused(OptionError(f"options={settings!r}: {e}; rematc's settings are {known}"))
    return made(gm, inputs)
