"""What masters report, as the page shows it."""

from __future__ import annotations

import json

import pytest

from edl.dashboard.state import reader as module
from edl.dashboard.state.events import merge_events
from edl.dashboard.state.jobs import job_status
from edl.dashboard.state.masters import decode_master
from edl.errors import DiscoveryError
from edl.settings import Credentials


def test_events_of_a_master_have_causes() -> None:
    """As the master writes them: time, kind, text, cause; a line of an older version has no cause."""
    events = [
        {"time": 1.0, "kind": "takeover", "text": "term 2 begins", "cause": "h1 was lost"},
        {"time": 2.0, "kind": "retried", "text": "data: 3 shards are to do again", "cause": "an operator asked"},
        {"time": 3.0, "kind": "session_ended", "text": "data: w0"},
    ]
    master = decode_master(json.dumps({"state": "leading", "time": 3.0, "events": events}).encode(), "j", 3.0)
    rows = merge_events([job_status("j", None, master, None, 50)], [])
    assert [(row.kind, row.text, row.cause, row.decision) for row in rows] == [
        ("takeover", "term 2 begins", "h1 was lost", True),
        ("retried", "data: 3 shards are to do again", "an operator asked", True),
        ("session_ended", "data: w0", "", False),
    ]


def test_store_is_shown_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def open_store(url: str, *, timeout_s: float, credentials: Credentials | None) -> None:
        shown.append(credentials)
        raise DiscoveryError("away")

    monkeypatch.setattr(module, "open_store", open_store)
    credentials = Credentials(ca="ca.pem")
    with module.StateReader("edl://store.example:1", credentials=credentials) as reader:
        assert "away" in reader.read().stale
    assert shown == [credentials]
