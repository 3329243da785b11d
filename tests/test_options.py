"""Settings: what is read, and what a user is told about what can't be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematc.errors import OptionError, RematcError
from rematc.options import UNITS, Options, SolveOptions, parse_budget


@pytest.mark.parametrize(
    ("given_text", "nbytes"),
    [
        ("1", 1),
        ("12 B", 12),
        ("3kB", 3_000),
        ("3KiB", 3_072),
        ("20MB", 20_000_000),
        ("20MiB", 20_971_520),
        ("20GB", 20_000_000_000),
        (" 20 gb ", 20_000_000_000),
        ("18.5GiB", 19_864_223_744),
        ("0.5GB", 500_000_000),
        ("2TB", 2_000_000_000_000),
        ("1TiB", 1_099_511_627_776),
    ],
)
def test_gb_is_a_power_of_1000_and_gib_of_1024(given_text: str, nbytes: int) -> None:
    assert parse_budget(given_text) == nbytes


@given(st.integers(1, 10**18))
def test_bytes_are_taken_to_the_byte(n: int) -> None:
    assert parse_budget(n) == parse_budget(str(n)) == parse_budget(f"{n}B") == n


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_of_any_unit_are_exact_in_any_case(n: int, unit: str) -> None:
    assert parse_budget(f"{n}{unit}") == parse_budget(f" {n} {unit.lower()} ") == n * UNITS[unit]


@given(st.integers(1, 10**12), st.integers(1, 100))
def test_a_percentage_is_of_the_device_and_never_more(device: int, percent: int) -> None:
    if device * percent < 100:
        return  # less than a byte
    nbytes = parse_budget(f"{percent}%", device_bytes=device)
    assert nbytes is not None
    assert abs(nbytes - device * percent // 100) <= 1
    assert nbytes <= device


def test_none_is_no_limit() -> None:
    assert parse_budget(None) is None


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ("20 apples", "unknown unit 'apples'"),
        ("twenty", "can't read the budget 'twenty'"),
        ("", "can't read the budget ''"),
        ("-3GB", "can't read"),
        ("1e9", "can't read"),
        (1.5, "can't read the budget 1.5"),
        (True, "can't read the budget True"),
        (0, "must be above zero"),
        (-5, "must be above zero"),
        ("0GB", "must be above zero"),
    ],
)
def test_a_refusal_says_what_can_be_given(budget: object, told: str) -> None:
    with pytest.raises(OptionError, match="20GB") as refusal:
        parse_budget(budget)  # type: ignore[arg-type]
    assert told in str(refusal.value)
    assert "None for no limit" in str(refusal.value)


def test_a_percentage_needs_a_device_with_memory_of_its_own() -> None:
    with pytest.raises(OptionError, match=r"give bytes, as in \"20GB\""):
        parse_budget("80%")


def test_no_more_than_all_of_the_device() -> None:
    assert parse_budget("100%", device_bytes=1000) == 1000
    with pytest.raises(OptionError, match="at most 100%"):
        parse_budget("101%", device_bytes=1000)


@given(st.text(max_size=12) | st.floats() | st.integers() | st.none() | st.booleans())
def test_anything_is_read_or_refused_and_nothing_else(budget: object) -> None:
    try:
        nbytes = parse_budget(budget, device_bytes=10**9)  # type: ignore[arg-type]
    except OptionError:
        return
    assert nbytes is None or (isinstance(nbytes, int) and nbytes > 0)


def test_options_are_checked_when_made() -> None:
    with pytest.raises(OptionError, match="unknown unit"):
        Options(budget="20 parsecs")
    with pytest.raises(OptionError, match='give "inductor" or "eager"'):
        Options(budget=None, inner="cuda")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"torch\.optim\.AdamW"):
        Options(budget=None, optimizer="adam")
    for wrong in (-1, "1 lot", "80%", True):
        with pytest.raises(OptionError, match=f'^reserve={wrong!r}: give "500MB"'):
            Options(budget=None, reserve=wrong)


def test_a_percentage_is_left_for_the_device_to_settle() -> None:
    assert Options(budget="80%").budget == "80%"
    with pytest.raises(OptionError, match="at most 100%"):
        Options(budget="180%")


@pytest.mark.parametrize(("reserve", "nbytes"), [(0, 0), (12, 12), ("2GB", 2 * 10**9)])
def test_reserve_is_in_bytes(reserve: int | str, nbytes: int) -> None:
    assert Options(budget=None, reserve=reserve).reserve_bytes == nbytes


def test_options_are_equal_and_hashable_by_their_values() -> None:
    one, two = Options(budget="20GB", reserve="1GB"), Options(budget="20GB", reserve="1GB")
    assert one == two
    assert len({one, two, Options(budget="21GB")}) == 2


@pytest.mark.parametrize("seconds", [0, -1, "30", True])
def test_the_time_limit_is_above_zero(seconds: object) -> None:
    with pytest.raises(OptionError, match="give seconds above zero"):
        SolveOptions(time_limit_s=seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("gap", [-0.1, "1%", False])
def test_the_gap_is_a_fraction(gap: object) -> None:
    with pytest.raises(OptionError, match=r"0\.01 for 1 %"):
        SolveOptions(gap=gap)  # type: ignore[arg-type]


def test_a_refusal_is_both_ours_and_a_value_error() -> None:
    assert issubclass(OptionError, RematcError)
    assert issubclass(OptionError, ValueError)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("2.01GB", 2_010_000_000), ("0.1MB", 100_000), ("1.5KiB", 1536)]
)
def test_decimals_are_read_to_the_byte(text: str, nbytes: int) -> None:
    assert parse_budget(text) == nbytes


def test_a_number_of_any_length_is_read() -> None:
    assert parse_budget("0." + "3" * 400 + "GB") == 333_333_333


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, True, "1"])
@pytest.mark.parametrize("setting", ["time_limit_s", "gap"])
def test_numbers_that_are_none_are_refused(setting: str, number: object) -> None:
    with pytest.raises(OptionError, match=setting):
        SolveOptions(**{setting: number})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="regather"):
        Options(None, regather="yes")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="measure_s"):
        Options(None, measure_s=number)  # type: ignore[arg-type]
