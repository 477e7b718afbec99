"""Whose journal it is, whether the data are those of before, what a master shows, and where it is found."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Any

import pytest

from edl.cli.cmd_master import _default_journal
from edl.errors import ConflictError, SettingsError
from edl.master.datasets import ShardSettings, open_dataset
from edl.master.server.candidate_address import own_address, shown_endpoint
from edl.master.server.continuation import check_continued, check_data, takeover_cause
from edl.master.server.master_server import _told
from edl.master.server.report import UnitRates, encode
from edl.master.shards import ShardBook
from edl.protocol import master as messages


def book_of(spec: messages.DatasetSpec) -> ShardBook:
    book = ShardBook()
    book.apply(messages.Command(create_dataset=messages.CreateDataset(dataset="data", spec=spec)))
    return book


def test_another_journal_is_refused() -> None:
    last = {"job": "j", "term": 3, "journal": "sqlite:///a", "host": "x"}
    check_continued(None, 1, "sqlite:///b")
    check_continued(last, 4, "sqlite:///a")
    with pytest.raises(SettingsError, match="stands in another journal, sqlite:///a of host x"):
        check_continued(last, 1, "sqlite:///b")


def test_the_same_data_go_on() -> None:
    book = book_of(open_dataset("range:100").spec)
    check_data(book, {"data": open_dataset("range:100").spec, "more": open_dataset("range:7").spec})
    plain = messages.DatasetSpec()
    plain.CopyFrom(open_dataset("range:100", ShardSettings(max_failures=3)).spec)
    plain.max_failures = 0
    check_data(book, {"data": plain})
    assert (_told(book, ()), _told(book, ("data",))) == ("data begins", "data goes on")


@pytest.mark.parametrize(
    ("location", "settings", "difference"),
    [
        ("range:200", {}, "it is range:100, and not range:200"),
        ("range:100", {"shard_size": 7}, "and not 7"),
        ("range:100", {"shuffle": True}, "shuffle is False and not True"),
    ],
)
def test_other_data_are_refused(location: str, settings: dict[str, Any], difference: str) -> None:
    book = book_of(open_dataset("range:100").spec)
    with pytest.raises(ConflictError) as caught:
        check_data(book, {"data": open_dataset(location, ShardSettings(**settings)).spec})
    assert difference in str(caught.value)
    assert all(remedy in str(caught.value) for remedy in ("--name", "--new", "for the job"))


def test_changed_text_is_refused(tmp_path: Path) -> None:
    """A file of the same name and length, touched or not."""
    text = tmp_path / "text"
    text.write_text("a\nb\n" * 100)
    book = book_of(open_dataset(f"lines:{text}").spec)
    text.write_text("a\nb\n" * 100)
    check_data(book, {"data": open_dataset(f"lines:{text}").spec})
    text.write_text("a\nc\n" * 100)
    with pytest.raises(ConflictError, match="its files, or what is in them, have changed"):
        check_data(book, {"data": open_dataset(f"lines:{text}").spec})


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        (None, "left no report"),
        ({"endpoint": "a:1", "host": "x", "state": "leading"}, "the one at a:1 on x has ended without a word"),
        ({"endpoint": "a:1", "host": "x", "state": "stopped"}, "the one at a:1 on x was stopped"),
        ({"endpoint": "b:1", "host": "x", "state": "stopped"}, "another master took its journal"),
        ({"endpoint": "\n" * 5000, "state": 7}, "has ended without a word"),
    ],
)
def test_a_takeover_has_a_cause(last: dict[str, Any] | None, cause: str) -> None:
    found = takeover_cause(last, "b:1")
    assert cause in found
    assert len(found) < 500
    assert found.isprintable()


def test_addresses_and_places_are_shown() -> None:
    for slashes in ("/", "//"):
        assert _default_journal(f"sqlite://{slashes}x/store.sqlite", "a/b") == "sqlite:///x/a%252Fb.master.sqlite"
    for host, shown in (("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7"), ("node", "node:7")):
        assert shown_endpoint(host, 7, "sqlite:////tmp/store") == shown
    outside = ipaddress.ip_address(own_address("consul://192.0.2.1:8500"))
    assert not outside.is_unspecified
    for url in ("sqlite:////tmp/store", "consul://127.0.0.1:8500"):
        assert ipaddress.ip_address(own_address(url)) == outside, "other hosts do not reach this one's loopback"


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


def test_a_report_fits_into_a_store() -> None:
    datasets = [status(0, holders=200, poisoned=50) for _ in range(20)]
    data = encode({"job": "j", "datasets": datasets, "events": []})
    assert len(data) <= 200_000
    assert len(json.loads(data)["datasets"]) == 20
