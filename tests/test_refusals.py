"""A budget that is refused leaves nothing behind: the next try, with a smaller batch, needs the memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import rematc
from tests.small import batch, eager, net

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_model_that_was_refused_can_be_let_go_of() -> None:
    model = net()
    gone = weakref.ref(model)
    run = torch.compile(model, backend=eager(1000))
    for _ in range(2):
        with pytest.raises(rematc.BudgetError) as refused:
            run(batch())
        assert refused.value.plan is not None
    del model, run, refused
    gc.collect()
    assert gone() is None
