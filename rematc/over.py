"""Tells when the code of a backward pass has run: a hook after it would have autograd hold its gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable


class _OfThread(threading.local):
    then: Callable[[], object] | None = None


_of_thread = _OfThread()


def when_over(then: Callable[[], object]) -> None:
    """Call ``then`` once the next code that runs in this thread has."""
    _of_thread.then = then


def over() -> None:
    """Some has."""
    then, _of_thread.then = _of_thread.then, None
    if then is not None:
        then()
