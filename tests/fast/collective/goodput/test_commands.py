"""`edl status` and `edl report` on ledgers in a store."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edl.cli import cmd_status, main
from edl.collective.goodput.node import AgentState, Ledger, NodeRecord
from edl.collective.goodput.records import LedgerWriter
from edl.collective.goodput.spans import TimeCategory, span_of
from edl.collective.job_records import JobState, Member, World
from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.discovery import Store, open_store

NOW_S = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day stands still: a node that is silent for five seconds is lost."""
    monkeypatch.setattr(time, "time", lambda: NOW_S)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as store:
        yield store


def add_node(store: Store, node: str, ago_s: float, trained_s: float) -> LedgerWriter:
    """A node of two workers that began `ago_s` ago, met the others for a second, and trained ten steps."""
    ledger = Ledger(node, 2, 0.0, NOW_S - ago_s)
    status = replace(
        WorkerStatusPage.from_env().read_status(), generation=3, phase=Phase.TRAIN, phase_since=1.0, step_at=1.0
    )
    ledger.observe(0.0, AgentState.RENDEZVOUS, ())
    ledger.observe(1.0, AgentState.RUNNING, [status] * 2)
    totals = {**status.totals_s, Phase.TRAIN: status.totals_s[Phase.TRAIN] + trained_s}
    done = replace(status, totals_s=totals, step=9, step_at=1.0 + trained_s, samples=640)
    ledger.observe(1.0 + trained_s, AgentState.RUNNING, [done] * 2)
    writer = LedgerWriter(store, "resnet", ledger)
    writer.write_record()
    return writer


def put_world(store: Store, *nodes: str, state: JobState = JobState.RUNNING) -> None:
    members = tuple(Member(name, "10.0.0.1", 29400, 2, 2 * place) for place, name in enumerate(nodes))
    store.put("jobs/resnet/world", World(3, state, members, "b joined").encode())


def test_members_goodput_and_events(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_node(store, "a", 10.0, 9.0).record_event("join", "2 workers", generation=3)
    add_node(store, "b", 10.0, 9.0)
    add_node(store, "gone", 60.0, 2.0).record_event("kill", "rank 1", node="b")
    put_world(store, "a", "b")
    assert main(["status", "resnet", "--store", url]) == 0
    out = capsys.readouterr().out
    assert "job resnet: running, generation 3, 4 ranks, step 9" in out
    # 2 + 9 seconds of training in the 60 since the first node began; nobody was there for 47.
    assert "goodput 18.3% of 60 s · train 11 s · rendezvous 2.00 s · down 47 s" in out
    for line in (r"a +0-1 +train +3 +9 ", r"b +2-3 ", r"gone +lost ", r"\d\d:\d\d:\d\d  join +a  2 workers"):
        assert re.search(line, out), line

    assert main(["status", "resnet", "--json", "--store", url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["job"], told["state"], told["step"], told["generation"]) == ("resnet", "running", 9, 3)
    assert told["goodput"] == pytest.approx(11 / 60, abs=1e-6)
    assert sum(told["seconds"].values()) == pytest.approx(told["elapsed_s"])
    (node,) = (each for each in told["nodes"] if each["node"] == "a")
    assert (node["ranks"], node["samples_per_s"]) == ([0, 1], pytest.approx(1280 / 9, abs=0.01))
    assert [(event["node"], event["kind"]) for event in told["events"]] == [("a", "join"), ("b", "kill")]


def test_the_age_of_replicas_is_shown(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    records = {name: add_node(store, name, 10.0, 9.0) for name in "ab"}
    put_world(store, "a", "b")
    at = round((NOW_S - 600.0) * 1e6)
    spans = (span_of(TimeCategory.TRAIN, 600_000_000, 2, running=True),)
    records["a"].write_record(NodeRecord("a", at, 2, spans, replicated_us=at))
    assert main(["status", "resnet", "--store", url]) == 0
    assert re.search(r"replica.*a +0-1 .* 10 min 00 s old", capsys.readouterr().out, re.DOTALL)
    assert main(["status", "resnet", "--json", "--store", url]) == 0
    ages = {node["node"]: node["replica_age_s"] for node in json.loads(capsys.readouterr().out)["nodes"]}
    assert ages == {"a": 600.0, "b": None}


def test_jobs_that_begin_end_or_are_down(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    LedgerWriter(store, "resnet", Ledger("a", 1, 0.0, NOW_S)).write_record()
    assert main(["status", "resnet", "--store", url]) == 0
    out = capsys.readouterr().out
    assert re.search(r"job resnet: starting, \d+ nodes? so far", out)
    assert "goodput unknown" in out
    assert main(["report", "resnet", "--store", url]) == 2
    assert "no ledger yet" in capsys.readouterr().err

    for entry in store.list("jobs/resnet/"):
        store.delete(entry.key)
    put_world(store, "a", state=JobState.DONE)
    assert main(["status", "resnet", "--store", url]) == 0
    assert "job resnet: done" in capsys.readouterr().out

    add_node(store, "a", 3600.0, 9.0)
    assert main(["status", "resnet", "--watch", "--json", "--store", url]) == 0  # and the watch ends at once
    told = json.loads(capsys.readouterr().out)
    assert (told["elapsed_s"], told["seconds"]["down"]) == (pytest.approx(10.0), 0)

    put_world(store, "a")
    assert main(["status", "resnet", "--json", "--store", url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["seconds"]["down"]) == ("down", pytest.approx(3590.0))


def test_names_cannot_control_the_terminal(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_node(store, "a\x1b[2J", 10.0, 9.0).record_event("join", "\x1b[31m[bold]x")
    put_world(store, "a\x1b[2J")
    for command in ("status", "report"):
        assert main([command, "resnet", "--store", url]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "[bold]x" in out


def test_watch_repeats_until_interrupted(
    store: Store, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = add_node(store, "a", 10.0, 9.0)
    put_world(store, "a")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt
        writer.record_event("hang", "no step for 30 s")

    monkeypatch.setattr(cmd_status, "time", SimpleNamespace(sleep=pause))
    assert main(["status", "resnet", "--watch", "--json", "--store", url]) == 130
    first, second = (json.loads(line)["events"] for line in capsys.readouterr().out.splitlines())
    assert (first, [event["kind"] for event in second]) == ([], ["hang"])


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_a_file(store: Store, url: str, suffix: str, tmp_path: Path) -> None:
    add_node(store, "node-$\\x$", 10.0, 9.0).record_event("join", "2 workers")
    put_world(store)
    out = tmp_path / f"job{suffix}"
    assert main(["report", "resnet", "--store", url, "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000
    assert out.read_bytes().startswith(b"\x89PNG") is (suffix == ".png")


@pytest.mark.parametrize("name", ["job.txt", "job", "no/such/folder/job.png"])
def test_impossible_picture_is_one_line(
    name: str, store: Store, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(store, "a", 10.0, 9.0)
    assert main(["report", "resnet", "--store", url, "--out", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("edl report: ")
    assert error.count("\n") == 1
