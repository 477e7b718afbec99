"""`edl status` and `edl report` on ledgers in a real store."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from edl.cli import main
from edl.collective.goodput.node import AgentState, Ledger, NodeRecord
from edl.collective.goodput.records import LedgerWriter
from edl.collective.goodput.spans import TimeCategory, span_of
from edl.collective.job_records import JobState, Member, World
from edl.collective.worker_status import Phase, WorkerStatusPage
from edl.discovery import Store, open_store

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module", autouse=True)
def imported_commands() -> None:
    """A node that is silent for five seconds is lost, and the first call's imports take as long on a busy machine."""
    for command in ("status", "report"):
        import_module(f"edl.cli.cmd_{command}")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as store:
        yield store


def add_node(store: Store, node: str, ago_s: float, trained_s: float, *, workers: int = 2) -> LedgerWriter:
    """A node that began `ago_s` ago, met the others for a second, then trained ten steps in `trained_s`."""
    ledger = Ledger(node, workers, 0.0, time.time() - ago_s)
    status = replace(
        WorkerStatusPage.from_env().read_status(), generation=3, phase=Phase.TRAIN, phase_since=1.0, step_at=1.0
    )
    ledger.observe(0.0, AgentState.RENDEZVOUS, ())
    ledger.observe(1.0, AgentState.RUNNING, [status] * workers)
    totals = {**status.totals_s, Phase.TRAIN: status.totals_s[Phase.TRAIN] + trained_s}
    done = replace(status, totals_s=totals, step=9, step_at=1.0 + trained_s, samples=640)
    ledger.observe(1.0 + trained_s, AgentState.RUNNING, [done] * workers)
    writer = LedgerWriter(store, "resnet", ledger)
    writer.write_record()
    return writer


def put_world(store: Store, *nodes: str, state: JobState = JobState.RUNNING) -> None:
    members = tuple(Member(name, "10.0.0.1", 29400, 2, 2 * place) for place, name in enumerate(nodes))
    store.put("jobs/resnet/world", World(3, state, members, "b joined").encode())


def test_members_goodput_and_events(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Members goodput and events are shown."""
    add_node(store, "a", 10.0, 9.0).record_event("join", "2 workers", generation=3)
    add_node(store, "b", 10.0, 9.0)
    add_node(store, "gone", 60.0, 2.0)
    put_world(store, "a", "b")
    assert main(["status", "resnet", "--store", url]) == 0
    out = capsys.readouterr().out
    assert "job resnet: running, generation 3, 4 ranks, step 9" in out
    assert "b joined" in out
    # 2 + 9 seconds of training in the 60 since the first node began; nobody was there for 47.
    assert re.search(r"goodput 18\.\d% of 60 s · train 11 s · rendezvous 2\.00 s · down 47 s", out), out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert rows["a"][1:5] == ["0-1", "train", "3", "9"]
    assert rows["b"][1] == "2-3"
    assert rows["gone"][1] == "lost"
    assert re.search(r"\d\d:\d\d:\d\d  join +a  2 workers", out)


def test_json_is_complete(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_node(store, "a", 10.0, 9.0).record_event("kill", "rank 1", node="b")
    put_world(store, "a")
    assert main(["status", "resnet", "--json", "--store", url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["job"], told["state"], told["step"], told["generation"]) == ("resnet", "running", 9, 3)
    assert told["goodput"] == pytest.approx(0.9)
    assert sum(told["seconds"].values()) == pytest.approx(told["elapsed_s"])
    (node,) = told["nodes"]
    assert (node["node"], node["ranks"], node["samples_per_s"]) == ("a", [0, 1], pytest.approx(1280 / 9, abs=0.01))
    (event,) = told["events"]
    assert (event["node"], event["kind"], event["text"]) == ("b", "kill", "rank 1")


def test_the_age_of_replicas_is_shown(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of nodes of which another node has a replica; without any there is no column."""
    records = {name: add_node(store, name, 10.0, 9.0) for name in "ab"}
    put_world(store, "a", "b")
    assert main(["status", "resnet", "--store", url]) == 0
    assert "replica" not in capsys.readouterr().out
    at = round((time.time() - 600.0) * 1e6)
    record = NodeRecord("a", at, 2, replicated_us=at)
    records["a"].write_record(replace(record, spans=(span_of(TimeCategory.TRAIN, 600_000_000, 2, running=True),)))
    assert main(["status", "resnet", "--store", url]) == 0
    out = capsys.readouterr().out
    assert "replica" in out
    assert re.search(r"a +0-1 .* 10 min \d\d s old", out), out
    assert main(["status", "resnet", "--json", "--store", url]) == 0
    ages = {node["node"]: node["replica_age_s"] for node in json.loads(capsys.readouterr().out)["nodes"]}
    assert ages["a"] == pytest.approx(600.0, abs=60.0)
    assert ages["b"] is None


def test_beginning_job_needs_no_world(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that only begins needs no world."""
    ledger = Ledger("a", 1, 0.0, time.time())
    LedgerWriter(store, "resnet", ledger).write_record()
    assert main(["status", "resnet", "--store", url]) == 0
    out = capsys.readouterr().out
    assert re.search(r"job resnet: starting, \d+ nodes? so far", out)
    assert "goodput unknown" in out
    assert main(["report", "resnet", "--store", url]) == 2
    assert "no ledger yet" in capsys.readouterr().err


def test_a_world_without_ledgers_is_shown(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    put_world(store, "a", state=JobState.DONE)
    assert main(["status", "resnet", "--store", url]) == 0
    assert "job resnet: done" in capsys.readouterr().out


def test_a_job_that_ended_does_not_age(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_node(store, "a", 3600.0, 9.0)
    put_world(store, "a", state=JobState.DONE)
    assert main(["status", "resnet", "--watch", "--json", "--store", url]) == 0  # and the watch ends at once
    told = json.loads(capsys.readouterr().out)
    assert told["elapsed_s"] == pytest.approx(10.0)
    assert told["seconds"]["down"] == 0


def test_job_without_agents_is_down(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A job whose agents are all gone is down."""
    add_node(store, "a", 100.0, 9.0)
    put_world(store, "a")
    assert main(["status", "resnet", "--json", "--store", url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "down"
    assert told["seconds"]["down"] >= 89


@pytest.mark.parametrize("command", ["status", "report"])
def test_unknown_job_names_known_ones(command: str, store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown job is one line that names those there are."""
    put_world(store)
    assert main([command, "rednet", "--store", url]) == 2
    error = capsys.readouterr().err
    assert error == f"edl {command}: there is no job 'rednet' in this store; there is resnet\n"


def test_names_cannot_control_the_terminal(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and events cannot play with the terminal."""
    add_node(store, "a\x1b[2J", 10.0, 9.0).record_event("join", "\x1b[31m[bold]x")
    put_world(store, "a\x1b[2J")
    for command in ("status", "report"):
        assert main([command, "resnet", "--store", url]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "[bold]x" in out


def test_watch_repeats_until_interrupted(store: Store, url: str) -> None:
    """Watching tells again until interrupted."""
    writer = add_node(store, "a", 10.0, 9.0)
    put_world(store, "a")
    command = [sys.executable, "-m", "edl", "status", "resnet", "--watch", "--json", "--store", url]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert watch.stdout is not None
        assert json.loads(watch.stdout.readline())["events"] == []
        writer.record_event("hang", "no step for 30 s")
        while not json.loads(line := watch.stdout.readline())["events"]:
            assert line
        watch.send_signal(signal.SIGINT)
        assert watch.wait(20) == 130
    finally:
        watch.kill()
        watch.wait()
        with contextlib.suppress(AttributeError):
            watch.stdout.close()  # type: ignore[union-attr]


def test_the_report_in_the_terminal(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_node(store, "a", 10.0, 9.0).record_event("join", "2 workers")
    add_node(store, "b", 40.0, 9.0)
    put_world(store, "a")
    assert main(["report", "resnet", "--store", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line[21:] for line in lines if line.strip()}
    assert re.fullmatch(r"m+━+ *", rows["b"])
    assert re.fullmatch(r" +m+━+", rows["a"])
    (whole,) = (line[21:] for line in lines if line.startswith("the job".rjust(20)))
    assert re.fullmatch(r"m+━+x+m+━+", whole)
    assert any("join        a  2 workers" in line for line in lines)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_a_file(store: Store, url: str, suffix: str, tmp_path: Path) -> None:
    for number in range(3):
        add_node(store, f"node-$\\x{number}$", 10.0 + number, 9.0).record_event("join", "2 workers")
    put_world(store)
    out = tmp_path / f"job{suffix}"
    assert main(["report", "resnet", "--store", url, "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000
    assert suffix != ".png" or out.read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["job.txt", "job", "no/such/folder/job.png"])
def test_impossible_picture_is_one_line(
    name: str, store: Store, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture that cannot be is one line."""
    add_node(store, "a", 10.0, 9.0)
    assert main(["report", "resnet", "--store", url, "--out", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("edl report: ")
    assert error.count("\n") == 1
