"""An op computes the same of the same numbers where these lie otherwise in memory, or it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rematc
from rematc.costs import Call, computes_the_same


def in_a_row(x: Tensor) -> Tensor:
    """The numbers as they lie in memory, whatever the strides are."""
    return x.detach().as_strided((x.numel(),), (1,)).clone().view(x.shape)


@torch.library.custom_op("test_same::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x.clone()


@rematc.pure
@torch.library.custom_op("test_same::misread", mutates_args=())
def misread(x: Tensor) -> Tensor:
    return in_a_row(x)


@rematc.pure
@torch.library.custom_op("test_same::misread_acos", mutates_args=())
def misread_acos(x: Tensor) -> Tensor:
    return in_a_row(x).acos()  # of some of the numbers there is none


ATEN, OURS = torch.ops.aten, torch.ops.test_same
NORM, NORM_BACKWARD = ATEN.native_group_norm.default, ATEN.native_group_norm_backward.default
FLASH = getattr(ATEN, "_scaled_dot_product_flash_attention_for_cpu").default  # noqa: B009
IMAGE, LARGE = torch.empty(2, 4, 6, 6), torch.empty(2, 4, 128, 128)
LAST = IMAGE.to(memory_format=torch.channels_last)
COMPLEX = torch.empty(4, 3, dtype=torch.complex64)
HEADS, APART = torch.empty(1, 2, 8, 4), torch.empty(1, 8, 2, 4).transpose(1, 2)
ONE = IMAGE[:1, :1].expand(IMAGE.shape)
SIZES, LARGE_SIZES = (2, 4, 36, 2), (2, 4, 128 * 128, 2)
STATISTICS = torch.empty(2, 2), torch.empty(2, 2), torch.empty(4)
Row = tuple[Any, Any, Any, tuple[Any, ...]]  # an op, two layouts of what it reads, and what comes after that

SAME: dict[str, Row] = {
    "an elementwise one": (ATEN.tanh.default, [IMAGE], [LAST], ()),
    "one that goes by strides": (NORM, [IMAGE], [LAST], (None, None, *SIZES, 1e-5)),
    "one that draws": (ATEN.native_dropout.default, [IMAGE], [LAST], (0.5, True)),
    "half precision": (ATEN.sum.dim_IntList, [IMAGE.bfloat16()], [LAST.bfloat16()], ([1, 2, 3],)),
    "attention": (FLASH, [HEADS] * 3, [APART] * 3, (0.3,)),
    "no number": (ATEN.acos.default, [IMAGE], [LAST], ()),
    "complex": (ATEN.exp.default, [COMPLEX], [COMPLEX.t().contiguous().t()], ()),
    "expanded": (ATEN.mul.Tensor, [ONE, IMAGE], [ONE, LAST], ()),
}
OTHERS: dict[str, Row] = {
    "one that refuses them": (NORM, [IMAGE], [IMAGE.mT], (None, None, *SIZES, 1e-5)),
    "gradients": (NORM_BACKWARD, [IMAGE] * 2, [IMAGE, IMAGE.mT], (*STATISTICS, *SIZES, [True] * 3)),
    "sums of much": (
        NORM_BACKWARD,
        [LARGE] * 2,
        [LARGE, LARGE.mT],
        (*STATISTICS, *LARGE_SIZES, [False, True, True]),
    ),
    "attention": (FLASH, [HEADS] * 3, [HEADS.mT.contiguous().mT] * 3, (0.3,)),
    "of a user": (OURS.misread.default, [IMAGE], [LAST], ()),
    "no number": (OURS.misread_acos.default, [IMAGE], [LAST], ()),
    "complex": (OURS.misread.default, [COMPLEX], [COMPLEX.t().contiguous().t()], ()),
    "not declared": (OURS.unknown.default, [IMAGE], [LAST], ()),
}


@pytest.mark.parametrize(
    ("row", "is_same"),
    [pytest.param(row, True, id=f"same: {name}") for name, row in SAME.items()]
    + [pytest.param(row, False, id=f"other: {name}") for name, row in OTHERS.items()],
)
def test_an_op_computes_the_same_or_not(row: Row, is_same: bool) -> None:
    target, traced, real, more = row
    before = torch.get_rng_state()
    assert computes_the_same(Call(target, (*traced, *more), {}), Call(target, (*real, *more), {})) == is_same
    assert torch.equal(before, torch.get_rng_state())
