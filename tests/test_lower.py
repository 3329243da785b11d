"""Op by op, a value is let go of as soon as the simulation says."""

from __future__ import annotations

import torch
from torch import Tensor

from rematc.lower import op_by_op
from rematc.measure import measure

KB = 256  # floats


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
