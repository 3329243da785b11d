"""Torch's profiler, of which a process has one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch


def profiler_is_active() -> bool:
    """Does a torch profiler run in this thread? There can't be a second one."""
    return bool(torch.autograd._profiler_enabled())


def profiler_is_taken() -> bool:
    """Is it active, or was a profile begun and not ended? In its warm-up it is not active yet."""
    if profiler_is_active():
        return True
    profiles = [o for o in gc.get_objects() if type(o) is torch.autograd.profiler.profile]
    return any(p.entered and p.kineto_results is None for p in profiles)


@contextmanager
def before_profiles(call: Callable[[], object]) -> Iterator[None]:
    """Inside, ``call`` is called before anybody starts a profile."""

    def first(then: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            call()
            return then(*args, **kwargs)

        return called

    module = torch.autograd.profiler
    names = ("_prepare_profiler", "_enable_profiler")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(module, name, first(getattr(module, name))))
        yield
