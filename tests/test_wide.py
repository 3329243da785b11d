"""Many models as people have them, at two budgets each: what `test_models` asserts of a few."""

from __future__ import annotations

import pytest

from tests.test_models import holds_op_by_op, holds_under_inductor
from tests.zoo_wide import WIDE

SHARES = (0.0, 0.5)  # of the way from the floor x 1.02 to saving everything
QUICK = ("qwen3", "t5")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WIDE]

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", EACH)
def test_op_by_op_the_budget_holds_and_the_bits_are_the_same(name: str, share: float) -> None:
    holds_op_by_op(name, share)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", WIDE)
def test_under_inductor_the_budget_holds_and_gradients_are_equal_within_rounding(
    name: str, share: float
) -> None:
    holds_under_inductor(name, share)


def test_there_are_more_than_forty() -> None:
    assert len(WIDE) > 40
