"""The page's documentation says what is exported and listened to."""

from __future__ import annotations

import re
from pathlib import Path

from edl.cli.http import cmd_dashboard
from edl.dashboard.metrics import METRICS
from edl.dashboard.server.event_stream import HEARTBEAT_S
from edl.dashboard.server.settings import DEFAULT_PORT

PAGE = (Path(__file__).parents[3] / "docs/dashboard.md").read_text()


def test_every_metric_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(edl_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
    table = {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}
    journal = table.pop("edl_master_journal_commit_seconds")
    assert journal[0] == "histogram"
    assert table == {spec.name: (spec.kind, spec.labels, spec.text) for spec in METRICS}


def test_names_follow_prometheus() -> None:
    for spec in METRICS:
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert not re.search(r"_(ms|millis|minutes|percent)(_|$)", spec.name), spec.name
        assert {"shard", "sample", "le", "job"}.isdisjoint(spec.labels), spec.name


def test_figures_of_the_page_are_the_code_s() -> None:
    assert cmd_dashboard._PORT == DEFAULT_PORT
    assert f"localhost:{DEFAULT_PORT}" in PAGE
    assert f"nothing else did for {HEARTBEAT_S:.0f} s" in PAGE
