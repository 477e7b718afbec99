"""Readers whose position is part of a checkpoint: each sample once, relative to the state that survives."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edl.errors import ConflictError, LeaseLostError, SettingsError
from edl.master import MasterClient, MasterServer, ShardReader
from tests.fast.master.processes import running, until

Lead = Callable[..., MasterServer]
Create = Callable[..., None]
Read = Callable[..., ShardReader]


def train(folder: str, name: str, limit: int, every: int, pause_s: float, seen: str, saving: bool = False) -> None:
    """Count samples, in a checkpoint with the reader; after `limit` of them be killed in the middle of a step.

    With `saving` that is in the middle of the checkpoint that follows: the master has the mark, the disk has not.

    The process's state is the counts, which a checkpoint replaces as a whole, as a model's would be.
    """
    path = Path(folder) / f"checkpoint.{name}"
    counts: dict[str, int] = {}
    with (
        MasterClient("job", f"sqlite:///{folder}/store.sqlite", timeout_s=60) as client,
        ShardReader(client, "d", holder=name, prefetch=2) as reader,
    ):
        if path.exists():
            saved = json.loads(path.read_text())
            reader.load_state_dict(saved["reader"])
            counts = saved["counts"]
        else:
            reader.start_over()
        step = 0

        def save() -> None:
            state = {"reader": reader.state_dict(), "counts": counts}
            if saving and step >= limit:
                os.kill(os.getpid(), signal.SIGKILL)
            path.with_suffix(".new").write_text(json.dumps(state))
            path.with_suffix(".new").rename(path)

        with open(seen, "a", buffering=1) as log:  # noqa: PTH123
            for sample in reader.samples():
                counts[str(sample)] = counts.get(str(sample), 0) + 1
                log.write(f"{name} {sample}\n")
                step += 1
                if step == limit and not saving:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step % every == 0:
                    save()
                time.sleep(pause_s)
        save()


def survived(folder: Path) -> Counter[int]:
    """What the checkpoints have counted together."""
    counts: Counter[int] = Counter()
    for path in folder.glob("checkpoint.*"):
        counts.update({int(sample): count for sample, count in json.loads(path.read_text())["counts"].items()})
    return counts


@pytest.mark.timeout(600)
def test_killed_before_its_checkpoint(lead: Lead, create: Create, tmp_path: Path) -> None:
    """Shards that were reported after the last checkpoint are done again: their samples died with the process."""
    master = lead()
    create(800, commit="checkpoint", session_s=4.0, lease_s=4.0, max_failures=100)  # no live process is silent so long
    seen = str(tmp_path / "seen")
    with running(train, str(tmp_path), "b", 10_000, 25, 0.2, seen):  # slow enough to leave the other some
        for limit, saving in ((33, True), (95, False), (57, True), (38, False), (90, True)):
            with running(train, str(tmp_path), "a", limit, 40, 0.002, seen, saving) as worker:
                worker.join(120)
                assert worker.exitcode == -signal.SIGKILL
        with running(train, str(tmp_path), "a", 10_000, 40, 0.002, seen) as worker:
            worker.join(120)
            assert worker.exitcode == 0
        assert master.wait_done(120)
    assert survived(tmp_path) == Counter(range(800))
    done = Path(seen).read_text().splitlines()
    assert len(done) > 800, "samples that died with their process were done again"


def test_a_position_within_a_shard(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    lead()
    create(30, commit="checkpoint")
    first = read("a", prefetch=1)
    samples = first.samples()
    before = [next(samples) for _ in range(13)]
    state = json.loads(json.dumps(first.state_dict()))
    lost = [next(samples) for _ in range(9)]
    first.load_state_dict(state)
    again = list(first.samples())
    assert set(lost) <= set(again)
    assert sorted(before + again) == list(range(30))
    first.state_dict()


def test_a_lost_holder_keeps_what_it_marked(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    """It never comes back: what it did after its last mark is given to others, what it did before is not."""
    lead()
    create(100, commit="checkpoint", session_s=3.0, lease_s=3.0, max_failures=100)
    lost = read("lost", prefetch=0)
    samples = lost.samples()
    marked = [next(samples) for _ in range(35)]
    lost.state_dict()
    for _ in range(20):
        next(samples)
    spec = lost._thread.spec
    spec.lease_s = spec.session_s = 10_000.0
    other = read("other")
    assert sorted(marked + list(other.samples())) == list(range(100))
    with pytest.raises(LeaseLostError, match="load it"):
        list(samples)


def test_a_second_resumer_is_refused(lead: Lead, create: Create, read: Read, stack: ExitStack) -> None:
    lead()
    create(100, commit="checkpoint", session_s=4.0, lease_s=4.0)  # no live process is silent so long
    first = read("a")
    samples = first.samples()
    next(samples)
    state = first.state_dict()
    second = read("a")
    second.load_state_dict(state)
    third = read("a")
    with pytest.raises(ConflictError):
        third.load_state_dict(state)


def test_a_mark_needs_such_a_data_set(lead: Lead, create: Create, read: Read) -> None:
    lead()
    create(100)
    reader = read()
    next(reader)
    with pytest.raises(SettingsError, match='commit="checkpoint"'):
        reader.state_dict()
    with pytest.raises(SettingsError):
        reader.load_state_dict({"format": 1, "job": "job", "dataset": "other", "session": "x", "mark": 1})
    with pytest.raises(SettingsError):
        reader.load_state_dict({})


def test_a_reader_is_a_field_of_a_state(
    lead: Lead, create: Create, read: Read, tmp_path: Path, stack: ExitStack
) -> None:
    """EDL's own `State` saves and restores it as any object with a `state_dict`."""
    collective = pytest.importorskip("edl.collective")
    fields = pytest.importorskip("edl.collective.checkpoint.state.fields")
    lead()
    create(40, commit="checkpoint")
    reader = read("a")
    state: Any = collective.State(reader=reader, step=0)
    samples = reader.samples()
    before = [next(samples) for _ in range(15)]
    assert fields.field_kind(state.reader) == "object"
    form = fields.field_form(state.reader, {})
    for _ in range(5):
        next(samples)
    reader.close()
    restored = read("a")
    fields.load_field("reader", restored, form, {})
    assert sorted(before + list(restored.samples())) == list(range(40))


def test_the_end_counts_no_unmarked_shard(
    lead: Lead, create: Create, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that is killed after its reader's end, and before its last checkpoint, goes back to the one before."""
    master = lead()
    create(100, commit="checkpoint")
    with read("a") as first:
        samples = first.samples()
        before = [next(samples) for _ in range(35)]
        state = first.state_dict()
        assert len(before + list(samples)) == 100
    assert "7 shards of d were done after the last state_dict()" in caplog.text
    assert not master.wait_done(0.5)
    with read("a") as second:
        second.load_state_dict(state)
        assert sorted(before + list(second.samples())) == list(range(100))
        second.state_dict()
    assert master.wait_done(20)


def test_closing_with_commit_counts(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    master = lead()
    create(100, commit="checkpoint")
    reader = read()
    assert len(list(reader)) == 10
    reader.close(commit=True)
    assert client.status()["datasets"][0]["shards"]["done"] == 10
    assert master.wait_done(10)


def test_closing_before_the_end_gives_back(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    lead()
    create(100, commit="checkpoint")
    with read() as reader:
        for _ in range(5):
            next(reader)
    until(lambda: client.status()["datasets"][0]["shards"]["todo"] == 10)


def test_lives_without_marks_hide_none(lead: Lead, create: Create, read: Read, client: MasterClient) -> None:
    """A process that was killed twice before its first checkpoint was on disk, the second time before any mark."""
    lead()
    create(40, commit="checkpoint")
    with read("rank0") as first:
        first.start_over()
        samples = first.samples()
        for _ in range(25):
            next(samples)
        first.state_dict()
    with read("rank0") as second:
        next(second.samples())
    with read("rank0") as third:
        third.start_over()
        assert sorted(third.samples()) == list(range(40))
