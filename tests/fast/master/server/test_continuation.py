"""Whose journal it is, and whether the data are those of before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edl.cli.cmd_master import _default_journal
from edl.errors import ConflictError, SettingsError
from edl.master.datasets import ShardSettings, open_dataset
from edl.master.server.continuation import check_continued, check_data, earlier_events, takeover_cause
from edl.master.server.master_server import _told
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


@pytest.mark.parametrize(
    ("location", "settings", "difference"),
    [
        ("range:200", {}, "it is range:100, and not range:200"),
        ("range:100", {"shard_size": 7}, "and not 7"),
        ("range:100", {"epochs": 3}, "epochs is 1 and not 3"),
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
        ({"endpoint": "a:1", "host": "x", "state": "done"}, "all being done"),
        ({"endpoint": "b:1", "host": "x", "state": "stopped"}, "another master took its journal"),
        ({"endpoint": "\n" * 5000, "state": 7}, "has ended without a word"),
    ],
)
def test_a_takeover_has_a_cause(last: dict[str, Any] | None, cause: str) -> None:
    found = takeover_cause(last, "b:1")
    assert cause in found
    assert len(found) < 500
    assert found.isprintable()


@pytest.mark.parametrize("last", [None, {}, {"events": None}, {"events": "x"}, {"events": [1, "x", None]}])
def test_garbage_is_no_event(last: dict[str, Any] | None) -> None:
    assert earlier_events(last) == []


def test_data_of_a_new_journal_begin() -> None:
    book = book_of(open_dataset("range:100").spec)
    assert (_told(book, ()), _told(book, ("data",))) == ("data begins", "data goes on")


@pytest.mark.parametrize("slashes", ["/", "//"])
def test_default_journal_has_one_slash(slashes: str) -> None:
    assert _default_journal(f"sqlite://{slashes}x/store.sqlite", "a/b") == "sqlite:///x/a%252Fb.master.sqlite"
