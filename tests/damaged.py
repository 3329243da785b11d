"""Kept files, damaged: by bytes, or in what they say though their check sum is right."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rematc import cache

T = TypeVar("T")
Damage = Callable[[str], bytes]

BY_BYTES: dict[str, Damage] = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2].encode(),
    "no text": lambda text: b"\xff\xfe\x00\x80",
    "a list": lambda text: b"[]",
    "null": lambda text: b"null",
    "nested beyond reason": lambda text: b"[" * 100_000,
    "a digit is another": lambda text: _another_digit(text).encode(),
    "no check": lambda text: text.replace('"check"', '"chick"').encode(),
    "another format": lambda text: text.replace('"format": "rematc', '"format": "remat').encode(),
}


def saying(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Damage that only who knows what the file is about can see: ``change`` changes what it says."""

    def damage(text: str) -> bytes:
        data = json.loads(text)
        change(data)
        del data["check"]
        return json.dumps({**data, "check": cache._check(data)}).encode()

    return damage


def read_damaged(path: Path, damage: Damage, read: Callable[[], T], caplog: pytest.LogCaptureFixture) -> T:
    """What ``read()`` makes of the damaged file; it must say that it does not use it."""
    path.write_bytes(damage(path.read_text()))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rematc"):
        result = read()
    assert f"{path} is damaged or of another version" in caplog.text
    return result


def _another_digit(text: str) -> str:
    """The last digit before the check sum is another one: all that is left of the file is as it was."""
    end = text.rindex('"check"')
    at = max(n for n, c in enumerate(text[:end]) if c.isdigit())
    return f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"
