"""Quantities and times of the API."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.objects import parse_time
from edl.kube.quantity import format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        *(("0", "0"), ("2", "2"), ("500m", "0.5"), ("1.5Gi", str(3 * 2**29)), ("2e3", "2000"), ("1E", str(10**18))),
        *(("1E3", "1000"), (".5", "0.5"), ("5.", "5"), ("+1k", "1000"), ("-1", "-1"), ("100n", "0.0000001")),
        *(("1Ki", "1024"), ("1u", "0.000001"), (" 3 ", "3")),
    ],
)
def test_quantities_are_read(text: str, amount: str) -> None:
    assert parse_quantity(text) == Decimal(amount)


def test_plain_numbers_of_yaml() -> None:
    assert parse_quantity(2) == 2
    assert parse_quantity(0.5) == Decimal("0.5")


@pytest.mark.parametrize(
    "text",
    ["", "m", "Gi", "1 Gi", "1GiB", "1ki", "1K", "1e", "0x10", "1e9999", "nan", "inf", "1" * 65, "\uff11", "1,5", True],
)
def test_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        parse_quantity(text)


@settings(max_examples=40)
@given(st.decimals(min_value=0, max_value=10**15, places=9))
def test_quantity_comes_back(amount: Decimal) -> None:
    assert parse_quantity(format_quantity(amount)) == amount
    rounded = parse_quantity(format_quantity(amount, binary=True))
    assert amount <= rounded < amount + 1, "memory is in whole bytes, and never less"


def test_beyond_a_billionth_is_rounded_up() -> None:
    assert format_quantity(Decimal("1e-10")) == "1n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("1970-01-01T00:00:00Z", 0.0), ("2026-11-23T04:00:00Z", 1795406400.0), ("1970-01-01T00:00:01.5Z", 1.5)),
        *(("1970-01-01T00:00:00.000001Z", 1e-6), ("1970-01-01T00:00:00.123456789Z", 0.123456789)),
        *(("1970-01-01T01:00:00+01:00", 0.0), ("1969-12-31T23:59:59Z", -1.0)),
    ],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(
    "text", ["", "now", "2026-11-23", "2026-11-23T04:00:00", "2026-13-01T00:00:00Z", "1.Z", "1.5Z"]
)
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError):
        parse_time(text)
