"""What all tests share: the same threads, examples and caches on every machine."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Read when torch and rematc are first imported, so set before either is.
_cache = tempfile.TemporaryDirectory(prefix="rematc-tests-")
os.environ["REMATC_CACHE_DIR"] = _cache.name
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin while they wait slow all others down
os.environ["KINETO_LOG_LEVEL"] = "99"

settings.register_profile("rematc", derandomize=True, deadline=None, database=None)
settings.load_profile("rematc")


@pytest.fixture(autouse=True, scope="session")
def _remove_cache() -> Iterator[None]:
    yield
    _cache.cleanup()


@pytest.fixture(autouse=True, scope="session")
def _the_same_rates() -> Iterator[None]:
    """What is cheapest depends on them, and a busy machine measures any: those of two quiet cores."""
    if "torch" not in sys.modules:
        yield
        return
    from rematc.costs import Rates

    rates = Rates(5e10, 8e9, 2e10, 2e10, 2e10, 1e9, 3e11, 2e11, 2e11, 3000, {"bfloat16": 4.0, "float16": 1.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rematc.costs.rates.calibrate", lambda *_: rates)
        yield


@pytest.fixture(autouse=True, scope="module")
def _collect_what_is_new() -> None:
    """What torch keeps from earlier files is no garbage; to look at it at each collection takes seconds."""
    if "torch" in sys.modules:  # what it imports later is as much
        importlib.import_module("torch._inductor.compile_fx")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    """No test finds the plans of another."""
    shutil.rmtree(Path(_cache.name) / "plans", ignore_errors=True)


@pytest.fixture
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before, no step that ran, nothing said that is said once, and nothing left behind."""
    import torch  # only when a test asks for it: most need no torch

    home = importlib.import_module("rematc.backend")
    monkeypatch.setattr(home, "_THREADS", weakref.WeakValueDictionary())
    meters, compat = importlib.import_module("rematc.meters"), importlib.import_module("rematc.compat")
    monkeypatch.setattr(meters._Profiler, "was_taken", False)
    for once in (meters._say_profiled, meters._say_unwatched, compat._say_untold):
        once.cache_clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which has the rates of this machine."""
    from tests.small import refusal

    kept = Path(os.environ["REMATC_CACHE_DIR"])
    refusal()  # something was compiled, so they are there
    found = tmp_path / "cache"
    found.mkdir()
    for path in kept.glob("rates-*.json"):
        shutil.copy(path, found)
    monkeypatch.setenv("REMATC_CACHE_DIR", str(found))
    return found


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process is the only one of its process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
