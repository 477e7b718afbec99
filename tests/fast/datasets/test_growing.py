"""Sources without an end: what a follower tells the master, and what readers then read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.backoff import Backoff
from edl.datasets import Dataset, Follower, FollowSettings, ShardSettings, load_dataset, open_dataset, same_data
from edl.datasets import text as text_module
from edl.datasets.files import StorageError
from edl.errors import ConflictError, DiscoveryError, SettingsError, SourceError
from edl.master.shards import ShardBook
from edl.protocol.master import Command, CreateDataset, DatasetSpec, EndDataset, ExtendDataset
from tests.fast.datasets.leases import Lease
from tests.waiting import DEADLINE_S, wait_until


class Master:
    """A book of shards, called as a `MasterClient` is."""

    def __init__(self, dataset: Dataset) -> None:
        self.book = ShardBook()
        self.book.apply(Command(create_dataset=CreateDataset(dataset="data", spec=dataset.spec)))
        self.ended = False
        self.away = 0
        self.calls: list[int] = []

    def describe_dataset(self, name: str) -> DatasetSpec:
        if self.away:
            self.away -= 1
            raise DiscoveryError("away")
        reply = self.book.datasets[name].describe()
        spec = DatasetSpec()
        spec.CopyFrom(reply.spec)
        spec.units = reply.units
        return spec

    def extend_dataset(self, name: str, units: int, index: bytes, known: int | None) -> None:
        extension = ExtendDataset(dataset=name, units=units, index=index, known=known)
        self.book.apply(Command(extend_dataset=extension))
        self.calls.append(units)
        if self.away:
            self.away -= 1
            raise DiscoveryError("the answer was lost")

    def end_dataset(self, name: str) -> None:
        self.book.apply(Command(end_dataset=EndDataset(dataset=name)))
        self.ended = True

    @property
    def units(self) -> int:
        return self.book.datasets["data"].describe().units

    def read(self) -> list[Any]:
        spec = self.describe_dataset("data")
        dataset, size, units = load_dataset(spec), spec.shard_size, self.units
        leases = [Lease(0, start // size, start, min(units, start + size)) for start in range(0, units, size)]
        return [sample for lease in leases for sample in dataset.read(lease)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def opened(location: str, shard_size: int = 4, flush_s: float = 0.0, **options: Any) -> Dataset:
    return open_dataset(f"follow:{location}", ShardSettings(shard_size=shard_size, flush_s=flush_s), **options)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_quiet_source_ends(log: Path) -> None:
    """Units that fill no shard are told after `flush_s`, all of them at the end."""
    dataset, now_s = opened(str(log), shard_size=2, flush_s=4.0), 100.0
    master = Master(dataset)
    follower = Follower(master, "data", dataset, FollowSettings(end_after_s=5.0), clock=lambda: now_s)
    append(log, b"1\n2\n3\nbegun")
    for quiet_s, units, end in ((0.0, 2, False), (3.9, 2, False), (4.0, 3, False), (4.9, 3, False), (5.0, 4, True)):
        now_s = 100.0 + quiet_s
        assert follower.follow_once() is master.ended is end
        assert master.units == units
    for field, value in (("poll_s", 0), ("settle_s", float("nan")), ("end_after_s", "1")):
        with pytest.raises(SettingsError, match=field):
            FollowSettings(**{field: value})  # type: ignore[arg-type]


# A text that grows.


@settings(max_examples=25)
@given(
    pieces=st.lists(st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"\xff", b"\0"])).map(b"".join), max_size=8),
    crash=st.booleans(),
    flush_s=st.sampled_from([0.0, 4.0]),
)
def test_growing_text(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], crash: bool, flush_s: float
) -> None:
    """Whatever is appended when, each line is read once, also where every follower dies after a look."""
    path, now_s = tmp_path_factory.mktemp("growth") / "log", 0.0

    def clock() -> float:
        return now_s

    dataset = opened(str(path), shard_size=3, keep_ends=True, flush_s=flush_s)
    master = Master(dataset)
    follower = Follower(master, "data", dataset, clock=clock)
    for piece in pieces:
        append(path, piece)
        before, lines = master.units, path.read_bytes().count(b"\n")
        assert not follower.follow_once()
        assert master.units == max(before, lines // 3 * 3)
        now_s += 4.0
        assert not follower.follow_once()
        assert master.units == (lines if flush_s else lines // 3 * 3)
        if crash:
            follower = Follower(master, "data", load_dataset(dataset.spec), clock=clock)
    follower.finish()
    assert follower.follow_once()
    assert master.ended
    written = path.read_bytes() if path.exists() else b""
    assert master.read() == [line + b"\n" for line in written.split(b"\n")[:-1]] + [
        line for line in written.split(b"\n")[-1:] if line
    ]


def test_reader_is_updated(log: Path) -> None:
    append(log, b"1\n2\n3\n4\n")
    dataset = opened(str(log), shard_size=2)
    assert dataset.units is None
    assert not dataset.spec.HasField("units")
    master = Master(dataset)
    Follower(master, "data", load_dataset(dataset.spec)).follow_once()
    reader = load_dataset(dataset.spec)
    assert not reader.covers(Lease(0, 1, 2, 4))
    with pytest.raises(SettingsError, match="if the data set has grown, update"):
        reader.read(Lease(0, 1, 2, 4))
    reader.update(master.describe_dataset("data"))
    assert reader.covers(Lease(0, 1, 2, 4))
    assert list(reader.read(Lease(0, 1, 2, 4))) == [b"3", b"4"]
    assert not reader.covers(Lease(0, 2, 4, 6))
    with pytest.raises(SettingsError, match="is not the data set"):
        reader.update(open_dataset("range:5").spec)
    assert same_data(opened(str(log), shard_size=2).spec, master.describe_dataset("data"))
    assert not same_data(opened(str(log), shard_size=3).spec, master.describe_dataset("data"))


def test_lost_answer_repeats_nothing(log: Path) -> None:
    """Nor does a second follower, which should not be: what both have told is taken once."""
    dataset = opened(str(log), shard_size=2)
    master = Master(dataset)
    follower, second = (Follower(master, "data", load_dataset(dataset.spec)) for _ in range(2))
    append(log, b"1\n2\n3\n")
    follower.follow_once()
    second.follow_once()
    append(log, b"4\n5\n6\n")
    master.away = 1
    with pytest.raises(DiscoveryError):
        follower.follow_once()
    second.follow_once()
    append(log, b"7\n8")
    follower.finish()
    assert follower.follow_once()
    assert master.read() == [b"%d" % number for number in range(1, 9)]


@pytest.mark.parametrize("rotate", ["truncate", "replace", "shorten", "remove"])
@pytest.mark.parametrize("crash", [False, True])
def test_rotated_text_is_an_error(log: Path, rotate: str, crash: bool) -> None:
    dataset = opened(str(log), shard_size=2)
    master = Master(dataset)
    follower = Follower(master, "data", dataset)
    append(log, b"1\n2\n3\n4\n")
    follower.follow_once()
    if rotate == "truncate":
        log.write_bytes(b"")
    elif rotate == "shorten":
        os.truncate(log, 7)
    elif rotate == "remove":
        log.unlink()
    else:
        log.rename(log.with_suffix(".1"))
        log.write_bytes(b"5\n6\n7\n8\n9\n10\n")
    if crash:
        follower = Follower(master, "data", load_dataset(dataset.spec))
    words = "No such file" if rotate == "remove" else "log' has changed.*(truncated|replaced), or rotated"
    with pytest.raises(SourceError, match=words):
        follower.follow_once()
    with pytest.raises(SourceError, match=r"log' (has changed since it was indexed|cannot be read)"):
        master.read()


# A folder that gets files.


def test_two_followers_of_a_folder(tmp_path: Path) -> None:
    """Their orders may differ: the second is refused, rather than that a file is lost, and looks anew once."""
    dataset, now_s = opened(f"{tmp_path}/", shard_size=1), 100.0
    master = Master(dataset)
    first, second, third = (
        Follower(master, "data", load_dataset(dataset.spec), FollowSettings(poll_s=0.01), clock=lambda: now_s)
        for _ in range(3)
    )
    for follower in (first, second, third):
        follower.follow_once()
    (tmp_path / "b").write_bytes(b"x")
    first.follow_once()
    now_s += 10.0
    first.follow_once()
    (tmp_path / "a").write_bytes(b"x")
    second.finish()
    with pytest.raises(ConflictError, match=r"has 1 units, and a follower that knew of 0.*another follower extends it"):
        second.follow_once()
    third.finish()
    third.start()
    assert third.wait_ended(DEADLINE_S)
    assert [sample.id for sample in master.read()] == ["b", "a"]


# A source of the user's.


class Squares:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.closed = False

    def count(self) -> int:
        return len(self.rows)

    def ended(self) -> bool:
        return self.closed

    def read(self, start: int, stop: int) -> Iterable[int]:
        return self.rows[start:stop]


def test_source_of_the_users() -> None:
    source = Squares()
    dataset = open_dataset("source:squares", ShardSettings(shard_size=3, flush_s=0), samples=source)
    assert (dataset.kind, dataset.units) == ("source", None)
    master = Master(dataset)
    follower = Follower(master, "data", dataset)
    for number in range(10):
        source.rows.append(number * number)
        assert not follower.follow_once()
        assert master.units == (number + 1) // 3 * 3
    source.closed = True
    assert follower.follow_once()
    assert master.units == 10
    reader = load_dataset(master.describe_dataset("data"), samples=source)
    assert reader.covers(Lease(0, 3, 9, 10))
    assert list(reader.read(Lease(0, 2, 6, 9))) == [36, 49, 64]
    assert reader.sample_ids(Lease(0, 2, 6, 9)) == [6, 7, 8]
    with pytest.raises(SettingsError, match="samples='squares'"):
        load_dataset(master.describe_dataset("data"))
    source.rows = source.rows[:2]
    with pytest.raises(SourceError, match="0 samples, not the 3"):
        list(reader.read(Lease(0, 2, 6, 9)))


def test_source_that_shrinks() -> None:
    source = Squares()
    source.rows = [1, 2, 3]
    dataset = open_dataset("source:squares", ShardSettings(shard_size=1), samples=source)
    follower = Follower(Master(dataset), "data", dataset)
    follower.follow_once()
    source.rows.pop()
    with pytest.raises(SourceError, match="has 2: its offsets have changed"):
        follower.follow_once()


# The follower's thread.


@pytest.fixture
def following(log: Path) -> Iterator[tuple[Follower, Master]]:
    dataset = opened(str(log), shard_size=2)
    master = Master(dataset)
    follower = Follower(master, "data", dataset, FollowSettings(poll_s=0.01, end_marker=str(log) + ".end"))
    follower._backoff = Backoff(0.01, 0.02)
    yield follower, master
    follower.close()


def test_follower_until_the_marker(
    log: Path, following: tuple[Follower, Master], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It outlives a master and a storage that are away for a while."""
    follower, master = following
    master.away = 2
    real, failures = text_module.stat_file, iter(range(2))

    def fail(path: str) -> Any:
        if next(failures, None) is not None:
            raise StorageError("away")
        return real(path)

    monkeypatch.setattr(text_module, "stat_file", fail)
    follower.start()
    for number in range(6):
        append(log, b"%d\n" % number)
        wait_until(lambda number=number: master.units >= (number + 1) // 2 * 2, "what was written")  # type: ignore[misc]
    append(log, b"last")
    log.with_name("log.end").touch()
    assert follower.wait_ended(DEADLINE_S)
    assert master.read() == [*(b"%d" % number for number in range(6)), b"last"]


def test_follower_ends_with_its_error(log: Path, following: tuple[Follower, Master]) -> None:
    follower, master = following
    append(log, b"1\n2\n")
    follower.start()
    wait_until(lambda: master.units, "what was written")
    log.write_bytes(b"")
    with pytest.raises(SourceError, match="rotated"):
        follower.wait_ended(DEADLINE_S)
    assert isinstance(follower.error, SourceError)
    follower.close()
    assert not master.ended, "a source that broke has not ended"


def test_what_cannot_be_followed(log: Path) -> None:
    dataset = open_dataset("range:5")
    with pytest.raises(SettingsError, match="does not grow"):
        Follower(Master(dataset), "data", dataset)
    for wrong in ({"shuffle": True}, {"shuffle_within": True}, {"epochs": 2}):
        with pytest.raises(SettingsError, match="has no end"):
            open_dataset(f"follow:{log}", ShardSettings(**wrong))
