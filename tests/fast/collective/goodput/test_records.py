"""Ledgers in a store: what an agent wrote is read back, and shown by `edl status` and `edl report`."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from edl.cli import cmd_status, main
from edl.collective.agent import status_publisher
from edl.collective.agent.status_publisher import StatusPublisher
from edl.collective.agent.workers.worker_group import WorkerGroup
from edl.collective.goodput.codec import encode_record
from edl.collective.goodput.node import AgentState, Ledger, NodeRecord, ProgressMark
from edl.collective.goodput.records import MAX_EVENTS, LedgerWriter, delete_ledgers, list_jobs, read_job
from edl.collective.goodput.spans import MAX_SPANS, TimeCategory, span_of
from edl.collective.job_records import JobState, Member, World
from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.discovery import Store
from edl.discovery.sqlite.store import SqliteStore
from edl.discovery.store import MAX_VALUE_BYTES, Entry
from edl.errors import DiscoveryError, ProtocolError, SettingsError
from tests.waiting import wait_until


def ledger_of(node: str, began_s: float = 1_700_000_000.0) -> Ledger:
    ledger = Ledger(node, 2, 100.0, began_s)
    ledger.observe(101.5, AgentState.IDLE, ())
    return ledger


def test_what_was_written_is_read_back(store: Store) -> None:
    """Also of a node that comes back, whose former life stays as it was."""
    later, ledger = ledger_of("host:1/a b", 1_700_000_060.0), ledger_of("host:1/a b")
    LedgerWriter(store, "job", later).write_record()
    writer = LedgerWriter(store, "job", ledger)
    writer.write_record()
    writer.record_event("join", "2 workers", generation=3)
    writer.record_event("kill", "rank 1 by SIGKILL", generation=3, node="other")
    ledger.observe(103.0, AgentState.RENDEZVOUS, ())
    writer.write_record()
    back = read_job(store, "job")
    assert back.nodes == (ledger.record(), later.record())
    assert [(event.node, event.kind, event.text) for event in back.events] == [
        ("host:1/a b", "join", "2 workers"),
        ("other", "kill", "rank 1 by SIGKILL"),
    ]
    assert back.world is None
    store.put("jobs/job/world", World(generation=3).encode())
    assert read_job(store, "job").world == World(generation=3)
    assert list(list_jobs(store)) == ["job"]
    with pytest.raises(SettingsError, match="there is no job 'other' in this store; there is job"):
        read_job(store, "other")
    delete_ledgers(store, "job")
    assert read_job(store, "job").nodes == ()


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\n"])
def test_names_that_are_no_keys(name: str, store: Store) -> None:
    with pytest.raises(SettingsError, match="job"):
        read_job(store, name)


def test_largest_ledger_and_events_fit(store: Store) -> None:
    spans = tuple(span_of(TimeCategory(index % 2), 2**42 + index, 4096, running=True) for index in range(MAX_SPANS))
    marks = tuple(ProgressMark(2**48 + index, 2**40, 2**50) for index in range(300))
    assert len(encode_record(NodeRecord("a", 2**50, 4096, spans, marks))) < 60_000
    writer = LedgerWriter(store, "job", ledger_of("a"))
    for _ in range(3):
        writer.record_event("error", "x" * 1000)
    (entry,) = store.list("jobs/job/events/")
    assert len(entry.value) / 3 * MAX_EVENTS < MAX_VALUE_BYTES


GOOD = json.loads(encode_record(ledger_of("a").record()))

DAMAGES: list[dict[str, object]] = [
    {"spans": [[1, 1, 2]]},
    {"spans": [[1, 1, -5, 0, 0, 0, 0, 0, 0]]},
    {"spans": [[1, 1, 1e300, 0, 0, 0, 0, 0, 0]]},
    {"marks": [[1]]},
    {"steps_per_s": float("nan")},
    {"node": 7},
    {"began_us": True},
    {"step": -2},
    {"reached": 1.5},
]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"\xff", "not JSON"),
        (b"[1]", "no version"),
        (b'{"version": 99}', "version 99"),
        (b'{"version": 1}', "not a ledger"),
        *((json.dumps({**GOOD, **damage}).encode(), "not a ledger") for damage in DAMAGES),
    ],
)
def test_what_is_no_ledger_is_named(value: bytes, words: str, store: Store) -> None:
    store.put("jobs/j/ledger/a/1", value)
    with pytest.raises(ProtocolError, match=words) as caught:
        read_job(store, "j")
    assert "jobs/j/ledger/a/1" in str(caught.value)


class Refusing(SqliteStore):
    """Lists nothing the first times that it is asked."""

    refusals = 2

    def list(self, prefix: str) -> list[Entry]:
        if self.refusals:
            self.refusals -= 1
            raise DiscoveryError("no leader")
        return super().list(prefix)


def test_unanswered_question_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_publisher, "_WRITE_EVERY_S", 0.01)
    with Refusing(str(tmp_path / "discovery.sqlite")) as store:
        before = NodeRecord("before", 1, 1, generation=3, step=7)
        LedgerWriter(store, "job", Ledger("before", 1, 0.0, 1.0)).write_record(before)
        publisher = StatusPublisher(store, "job", "late", 1)
        came_late = SimpleNamespace(generation=5, read_statuses=dict)
        publisher.follow_workers(cast(WorkerGroup, came_late))

        def known() -> list[int]:
            publisher.charge_time(AgentState.RUNNING)
            return [] if store.refusals else [one.reached for one in read_job(store, "job").nodes if one.reached >= 0]

        wait_until(lambda: known() == [7], "steps that were finished before are charged as new ones")
        publisher.close()


NOW_S = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day stands still: a node that is silent for five seconds is lost."""
    monkeypatch.setattr(time, "time", lambda: NOW_S)


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
