"""What a master shows: rates, sizes, and whose journal it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edl.master.server.report import UnitRates, describe_dataset, encode


def status(done: int, holders: int = 0, poisoned: int = 0) -> dict[str, Any]:
    return {
        "name": "d",
        "units": 1000,
        "epochs": 2,
        "units_done": done,
        "holders": [{"holder": f"w{n}", "session": f"s{n}", "leases": 1, "units_done": n} for n in range(holders)],
        "poisoned": [{"shard": n, "failures": [{"reason": "x" * 500}] * 3} for n in range(poisoned)],
    }


def test_rates_are_of_the_last_seconds() -> None:
    rates = UnitRates()
    assert rates.look("d", 0, 0.0) == 0.0
    for second in range(1, 101):
        rate = rates.look("d", 10.0 * second if second < 50 else 490.0, float(second))
        if second == 49:
            assert rate == pytest.approx(10.0)
    assert rate == 0.0


def test_a_total_put_back_has_no_rate() -> None:
    rates = UnitRates()
    rates.look("d", 1000, 0.0)
    assert rates.look("d", 10, 1.0) == 0.0
    assert rates.look("d", 20, 2.0) == pytest.approx(10.0)


def test_the_time_left_follows_the_rate() -> None:
    rates = UnitRates()
    assert describe_dataset(status(0), rates, 0.0, lambda session: 0.0)["eta_s"] is None
    found = describe_dataset(status(100, holders=3), rates, 10.0, lambda session: 1.5)
    assert found["units_per_s"] == 10.0
    assert found["eta_s"] == 190.0
    assert [holder["holder"] for holder in found["holders"]] == ["w2", "w1", "w0"]
    assert found["holders"][0]["seen_s"] == 1.5


def test_a_report_fits_into_a_store() -> None:
    datasets = [status(0, holders=200, poisoned=50) for _ in range(20)]
    data = encode({"job": "j", "datasets": datasets, "events": []})
    assert len(data) <= 200_000
    assert len(json.loads(data)["datasets"]) == 20
