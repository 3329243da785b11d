"""Op by op, a value is let go of as soon as the simulation says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rematc.lower import op_by_op
from rematc.measure import measure

KB = 256  # floats


@pytest.fixture(params=["code", "interpreter"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without boxed code of torch's."""
    if request.param == "interpreter":
        monkeypatch.delattr(torch.fx.graph, "_BoxedCodeGen")


pytestmark = pytest.mark.usefixtures("either_way")


def test_a_value_that_nobody_reads_is_let_go_of_at_once() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.sin.default, (x,))  # unread
    y = graph.call_function(torch.ops.aten.cos.default, (x,))
    graph.output((y,))
    run, given = op_by_op(torch.fx.GraphModule({}, graph), None), torch.ones(KB)

    def step() -> Tensor:
        (out,) = run([given])
        return out

    assert measure(step).peak_bytes == KB * 4


def test_inputs_are_let_go_of_at_their_last_use_and_the_list_is_emptied() -> None:
    graph = torch.fx.Graph()
    x, unread = graph.placeholder("x"), graph.placeholder("unread")
    y = graph.call_function(torch.ops.aten.sin.default, (x,))
    z = graph.call_function(torch.ops.aten.cos.default, (y,))
    graph.output((z,))
    assert not unread.users
    run = op_by_op(torch.fx.GraphModule({}, graph), None)

    def step() -> Tensor:
        given = [torch.ones(KB), torch.ones(KB)]
        (out,) = run(given)
        assert given == []
        return out

    # Two inputs at first; then the one that is read and its sine; then two again.
    assert measure(step).peak_bytes == 2 * KB * 4
