"""Rehearsed code needs what the same code needs when it is run."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from rematc.costs import Call, Taken
from rematc.errors import CaptureError
from rematc.rehearse import Rehearsal
from rematc.rounding import Rounding, exactly, in_units

BYTES = torch.int8


def of(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=BYTES)


def played(
    body: str, *inputs: Any, resident: tuple[Any, ...] = (), rounded: Rounding = exactly
) -> tuple[int, int]:
    """Peak and what is left, of a ``call`` with these lines that takes ``inputs`` as x0, x1, ..."""
    names = "".join(f"x{i}, " for i in range(len(inputs)))
    lines = [f"{names} = args" if names else "pass", "args.clear()", *body.strip().splitlines()]
    code = "def call(self, args):\n" + "".join(f"    {line}\n" for line in lines)
    rehearsal = Rehearsal(resident, rounded)
    rehearsal.play(code, inputs)
    return rehearsal.peak_bytes, rehearsal.live_bytes


def made(name: str, size: int) -> str:
    return f"{name} = empty_strided_cpu(({size},), (1,), torch.int8)\n"


def test_a_buffer_is_alive_until_its_name_is_deleted() -> None:
    body = made("a", 8) + "kernel(x0, a)\ndel x0\n" + made("b", 16) + "kernel(a, b)\ndel a\nreturn (b, )"
    assert played(body, of(4)) == (24, 16)


def test_an_input_that_nobody_deletes_stays_to_the_end() -> None:
    assert played(made("a", 8) + "return (a, )", of(4)) == (12, 8)


def test_a_buffer_taken_over_is_one_buffer() -> None:
    body = made("a", 8) + "b = a; del a  # reuse\nkernel(b)\n" + made("c", 1) + "return (b, c)"
    assert played(body) == (9, 9)


def test_a_view_keeps_its_storage_alive() -> None:
    view = "b = reinterpret_tensor(a, (2,), (1,), 4)\n"
    body = made("a", 8) + view + "del a\n" + made("c", 8) + "return (b, c)"
    assert played(body) == (16, 16)


def test_a_result_given_twice_counts_once() -> None:
    assert played(made("a", 8) + "return (a, reinterpret_tensor(a, (4,), (1,), 0), a)") == (8, 8)


def test_resident_inputs_count_nothing_even_as_results() -> None:
    weight = of(100)
    assert played(made("a", 8) + "return (x0, a)", weight, resident=(weight,)) == (8, 8)


def test_blocks_that_choose_a_device_are_opened_and_streams_are_silent() -> None:
    lines = ["stream0 = get_raw_stream(0)", made("a", 8).strip(), "triton_0.run(a, 8, stream=stream0)"]
    body = "\n        ".join(["with some.guard(0):", *lines])
    code = f"def call(args):\n    {body}\n    return (a, )\n"
    rehearsal = Rehearsal(())
    rehearsal.play(code, [])
    assert (rehearsal.peak_bytes, rehearsal.live_bytes) == (8, 8)


def batches(body: str, *inputs: Any) -> list[tuple[tuple[str, ...], int]]:
    names = "".join(f"x{i}, " for i in range(len(inputs)))
    lines = [f"{names} = args" if names else "pass", "args.clear()", *body.strip().splitlines()]
    rehearsal = Rehearsal(())
    rehearsal.play("def call(args):\n" + "".join(f"    {line}\n" for line in lines), inputs)
    return [tuple(batch) for batch in rehearsal.batches]


def test_what_is_made_for_one_kernel_is_one_batch() -> None:
    """What a plan has one after the other is there at once: no op is to blame for what others make."""
    body = made("buf0", 8) + made("buf1", 4) + "kernel(x0, buf0, buf1)\ndel x0\n"
    body += "buf2 = buf1; del buf1  # reuse\n" + made("buf3", 32) + "kernel(buf0, buf2, buf3)\ndel buf0\n"
    body += made("buf4", 1) + "kernel(buf3, buf4)\ndel buf2\nreturn (buf3, buf4)"
    assert batches(body, of(2)) == [((), 2), (("buf0", "buf1"), 14), (("buf2", "buf3"), 44), (("buf4",), 37)]


def test_a_ready_made_kernel_is_a_batch_of_its_own() -> None:
    body = (
        "buf0 = torch.ops.aten.relu.default(x0)\n" + made("buf1", 4) + "kernel(buf0, buf1)\nreturn (buf1, )"
    )
    assert batches(body, of(2)) == [((), 2), (("buf0",), 4), (("buf1",), 8)]


def test_parts_of_what_a_ready_made_kernel_returns_are_its_own() -> None:
    body = "buf0 = torch.ops.aten.sort.default(x0)\nbuf1 = buf0[0]\nbuf2 = buf0[1]\ndel buf0\n"
    body += made("buf3", 4) + "kernel(buf1, buf3)\nreturn (buf3, )"
    (_, (first, _), (second, _)) = batches(body, of(2))
    assert {"buf0", "buf1", "buf2"} == set(first) and second == ("buf3",)


KERNEL = """{0} = async_compile.triton('{0}', '''
inductor_meta={{'mutated_arg_names': ['in_out_ptr0'], 'optimize_mem': {1}}}
@triton.jit
def {0}(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')
"""


def tuned(*lines: str, has_to_fit: bool = True) -> int:
    """The peak of these lines, where kernels are tuned on a card whose cache has 100 bytes."""
    kernels = "".join(KERNEL.format(f"triton_{n}", has_to_fit) for n in range(2))
    code = kernels + "def call(args):\n" + "".join(f"    {line.strip()}\n" for line in lines)
    rehearsal = Rehearsal((), cache_bytes=100)
    rehearsal.play(code, [])
    return rehearsal.peak_bytes


def test_a_kernel_in_triton_is_tuned_when_it_first_runs() -> None:
    run = "triton_0.run(a, b, 8, stream=stream0)"
    assert tuned(made("a", 8), made("b", 4), run, "return (a, )") == 112
    assert tuned(made("a", 8), made("b", 4), run, "del b", made("c", 50), run, "return (a, )") == 112
    assert tuned(made("a", 8), "extern_kernels.unknown(a)", "return (a, )") == 8


def test_what_it_writes_over_is_copied_where_that_fits_in_below_the_peak_by_then() -> None:
    first, second = (f"triton_{n}.run(a, b, 8, stream=stream0)" for n in range(2))
    assert tuned(made("a", 8), made("b", 4), first, second, "return (a, )") == 112 + 8
    assert tuned(made("a", 108), made("b", 4), first, second, "return (a, )") == 108 + 4 + 100


def test_in_a_forward_pass_it_is_copied_in_any_case() -> None:
    run = "triton_0.run(a, b, 8, stream=stream0)"
    assert tuned(made("a", 108), made("b", 4), run, "return (a, )", has_to_fit=False) == 2 * 108 + 4 + 100


def test_what_an_op_of_torch_returns_is_counted_as_a_tuple_until_that_is_gone() -> None:
    body = (
        "t = torch.ops.aten.var_mean.correction(x0, [0], correction=0)\ndel x0\na = t[0]\ndel t\nreturn (a, )"
    )
    peak, left = played(body, torch.empty(100, 50))
    assert (peak, left) == (100 * 50 * 4 + 2 * 50 * 4, 50 * 4)


@pytest.mark.parametrize(("scratch", "result"), [(0, 0), (100, 64), (0, 70), (100, 70)])
def test_ready_made_kernels_take_scratch_and_return_what_was_measured_of_their_calls(
    scratch: int, result: int
) -> None:
    asked = []

    def measure(calls: Iterable[Call]) -> dict[Hashable, Taken]:
        asked.extend(calls)
        return {call.key: Taken(scratch, result) for call in calls}

    code = "def call(args):\n    x, w = args\n    args.clear()\n    y = extern_kernels.mm(x, w)\n    del x\n"
    rehearsal = Rehearsal((), measure=measure)
    (y,) = rehearsal.play(code + "    del w\n    return (y, )\n", [torch.empty(8, 4), torch.empty(4, 2)])
    assert [call.target for call in asked] == [torch.ops.aten.mm.default]
    returned = max(result, 16 * 4)  # what it says, at the least
    assert rehearsal.live_bytes == returned
    assert rehearsal.peak_bytes == (32 + 8) * 4 + returned + scratch
    rehearsal.release(y)
    assert rehearsal.live_bytes == 0


def test_a_copy_of_a_part_takes_as_much_as_the_whole() -> None:
    """Also where fake tensors come from torch's cache, which knows the part alone."""
    from rematc.storages import fake_mode_of

    body = "a = torch.ops.aten.copy.default(reinterpret_tensor(x0, (4, 5), (8, 1), 0), x1)\nreturn (a, )"
    with fake_mode_of([of(1)]):
        for _ in range(3):
            whole, part = torch.empty(32, dtype=BYTES), torch.empty(4, 5, dtype=BYTES)
            assert played(body, whole, part) == (32 + 20 + 32, 32)
            assert played(body, whole, part, resident=(whole,)) == (20 + 32, 32)


def test_what_is_written_to_memory_made_before_is_not_counted_again() -> None:
    body = made("a", 8) + "extern_kernels.add(x0, x0, out=a)\nreturn (a, )"
    lines = ["x0, = args", "args.clear()", *body.splitlines()]
    rehearsal = Rehearsal((), measure=lambda calls: {call.key: Taken(0, 8) for call in calls})
    rehearsal.play("def call(args):\n" + "".join(f"    {line}\n" for line in lines), [of(8)])
    assert (rehearsal.peak_bytes, rehearsal.live_bytes) == (16, 8)


def test_the_allocator_rounds_up() -> None:
    assert played(made("a", 513) + made("b", 1) + "return (a, b)", rounded=in_units) == (1536, 1536)


def test_two_codes_are_played_one_after_the_other() -> None:
    first = "def call(args):\n    a = empty_strided_cpu((8,), (1,), torch.int8)\n    return (a, )\n"
    then = "def call(args):\n    a, = args\n    args.clear()\n    " + made("b", 4)
    rehearsal = Rehearsal(())
    saved = rehearsal.play(first, [])
    rehearsal.play(then + "    del a\n    return (b, )\n", saved, handed_over=saved)
    assert (rehearsal.peak_bytes, rehearsal.live_bytes) == (12, 4)


def test_what_is_larger_than_it_says_is_that_in_the_next_code_too() -> None:
    first = "def call(args):\n    x, = args\n    a = torch.ops.aten.sin.default(x)\n    return (a, )\n"
    then = "def call(args):\n    a, = args\n    args.clear()\n    kernel(a)\n    del a\n    return ()\n"
    x = torch.ones(2)
    rehearsal = Rehearsal((x,), measure=lambda calls: {call.key: Taken(0, 100) for call in calls})
    saved = rehearsal.play(first, [x])
    assert rehearsal.live_bytes == 100
    rehearsal.play(then, saved, handed_over=saved)
    assert (rehearsal.peak_bytes, rehearsal.live_bytes) == (100, 0)


def test_nothing_is_allocated_for_fake_tensors() -> None:
    from rematc.storages import fake_mode_of

    with fake_mode_of([of(1)]):
        huge = "(1 << 40,), (1,), torch.int8"
        assert played(f"a = empty_strided_cpu({huge})\nkernel(a)\nreturn (a, )") == (1 << 40, 1 << 40)


def test_code_without_call_is_refused() -> None:
    with pytest.raises(ValueError, match="no function call"):
        Rehearsal(()).play("x = 1", [])


def test_what_asks_for_numbers_can_t_be_followed() -> None:
    """Inductor's nan_asserts: the error came from torch's depths, and Dynamo broke the graph for it."""
    asserted = "assert not x0.isnan().any().item()"
    with FakeTensorMode(), pytest.raises(CaptureError, match=re.escape(asserted)):
        played(f"{asserted}\nreturn (x0, )", of(4))


def test_a_device_and_numbers_that_the_code_names_are_what_they_are() -> None:
    made = "y = torch.ops.aten.full.default([4], -inf, dtype=torch.float32, device=device(type='cpu'))"
    assert played(f"{made}\nreturn (y, )") == (16, 16)


@pytest.mark.parametrize("last", ["return (buf0, )", "kernel(buf0)\ndel buf0\nreturn (x0, )"])
def test_a_tensor_that_nobody_knows_the_making_of_is_none_of_no_bytes(last: str) -> None:
    with pytest.raises(CaptureError, match="can't follow"):
        played(f"buf0 = kernel_that_returns(x0)\n{last}", of(4))
    assert played("stream0 = get_raw_stream(0)\nkernel(x0, stream0)\nreturn (x0, )", of(4)) == (4, 4)
