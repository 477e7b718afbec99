"""Sources without an end: what a follower tells the master, and what readers then read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.errors import ConflictError, DiscoveryError, SettingsError, SourceError
from edl.master.datasets import Dataset, Follower, FollowSettings, ShardSettings, load_dataset, open_dataset, same_data
from edl.master.datasets.growth import growing_files, growing_text
from edl.master.datasets.growth.decision import FollowState, Observation, decide
from edl.master.datasets.index import IndexPart, pack_part
from edl.master.datasets.storage import StorageError, local
from edl.master.shards import ShardBook
from edl.protocol.master import Command, CreateDataset, DatasetSpec, EndDataset, ExtendDataset
from tests.fast.master.datasets.leases import Lease

DEADLINE_S = 20.0


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
        reply = self.book.describe(name)
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
        return self.book.describe("data").units

    def dataset(self) -> Dataset:
        return load_dataset(self.describe_dataset("data"))

    def read(self) -> list[Any]:
        dataset, size, units = self.dataset(), self.describe_dataset("data").shard_size, self.units
        starts = range(0, units, size)
        return [
            sample
            for start in starts
            for sample in dataset.read(Lease(0, start // size, start, min(units, start + size)))
        ]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def opened(location: str, shard_size: int = 4, flush_s: float = 0.0, **options: Any) -> Dataset:
    return open_dataset(f"follow:{location}", ShardSettings(shard_size=shard_size, flush_s=flush_s), **options)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_repeated_extension_is_accepted(log: Path) -> None:
    """The answer was lost: the same part again changes nothing."""
    master = Master(opened(str(log)))
    index = pack_part(IndexPart({"from": 0}, {}))
    for _ in range(2):
        master.extend_dataset("data", 4, index, 0)
    with pytest.raises(ConflictError, match="has 4 units, and a follower that knew of 0"):
        master.extend_dataset("data", 4, pack_part(IndexPart({"from": 0, "other": 1}, {})), 0)
    assert master.describe_dataset("data").index.endswith(index)
    assert master.calls == [4, 4]


# The decision.


@given(
    grown=st.lists(st.tuples(st.integers(0, 9), st.floats(0, 20)), max_size=20),
    flush_s=st.sampled_from([0.0, 10.0]),
    shard_size=st.integers(1, 5),
)
def test_decision(grown: list[tuple[int, float]], flush_s: float, shard_size: int) -> None:
    """All that comes is told once and in order; parts of shards only after a quiet time, and at the end."""
    state = FollowState(0, 0, 0.0)
    now_s, units, quiet_since = 0.0, 0, 0.0
    for more, waited_s in grown:
        now_s += waited_s
        units += more
        quiet_since = now_s if more else quiet_since
        before = state
        state, decision = decide(
            state, Observation(now_s, units, False), FollowSettings(), shard_size=shard_size, flush_s=flush_s
        )
        assert before.published <= decision.publish <= units
        assert not decision.end
        quiet = flush_s > 0 and now_s - quiet_since >= flush_s / 2
        assert decision.publish == units or (decision.publish > units - shard_size and not quiet)
        if decision.publish % shard_size and decision.publish > before.published:
            assert quiet
        state, again = decide(
            state, Observation(now_s, units, False), FollowSettings(), shard_size=shard_size, flush_s=flush_s
        )
        assert again.publish == decision.publish, "nothing is told twice"
    _, decision = decide(
        state, Observation(now_s, units, True), FollowSettings(), shard_size=shard_size, flush_s=flush_s
    )
    assert (decision.publish, decision.end) == (units, True)


def test_quiet_source_ends() -> None:
    settings = FollowSettings(end_after_s=5.0)
    state = FollowState(0, 0, 0.0)
    for now_s, units, end in ((1.0, 3, False), (5.9, 3, False), (6.0, 3, True)):
        state, decision = decide(state, Observation(now_s, units, False), settings, shard_size=2, flush_s=0.0)
        assert decision.end is end


@pytest.mark.parametrize("field", ["poll_s", "settle_s", "end_after_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1"])
def test_useless_follow_settings(field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=field):
        FollowSettings(**{field: value})


# A text that grows.


@given(pieces=st.lists(st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"\xff", b"\0"])).map(b"".join), max_size=8))
@pytest.mark.parametrize("crash", [False, True])
def test_growing_text(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], crash: bool) -> None:
    """Whatever is appended when, each line is read once, also where every follower dies after a look."""
    path = tmp_path_factory.mktemp("growth") / "log"
    dataset = opened(str(path), shard_size=3, keep_ends=True)
    master = Master(dataset)
    follower = Follower(master, "data", dataset)
    for piece in pieces:
        append(path, piece)
        assert not follower.follow_once()
        assert master.units == path.read_bytes().count(b"\n") // 3 * 3
        if crash:
            follower = Follower(master, "data", load_dataset(dataset.spec))
    follower.finish()
    assert follower.follow_once()
    assert master.ended
    written = path.read_bytes() if path.exists() else b""
    lines = written.splitlines(keepends=True) if b"\r" not in written.replace(b"\r\n", b"") else None
    assert b"".join(master.read()) == written
    assert lines is None or master.read() == lines


def test_parts_of_shards(log: Path) -> None:
    """A source that has gone quiet is told to its last line, and grows on within the shard."""
    dataset = opened(str(log), shard_size=4, flush_s=0.001)
    master = Master(dataset)
    follower = Follower(master, "data", dataset)
    for number in range(11):
        append(log, b"%d\n" % number)
        follower.follow_once()
        deadline = time.monotonic() + DEADLINE_S
        while master.units <= number:
            assert time.monotonic() < deadline
            follower.follow_once()
    assert master.read() == [b"%d" % number for number in range(11)]
    reader = master.dataset()
    assert list(reader.read(Lease(0, 1, 4, 6))) == [b"4", b"5"]
    assert list(reader.read(Lease(0, 1, 6, 8))) == [b"6", b"7"]
    assert reader.sample_ids(Lease(0, 2, 9, 11)) == [9, 10]


def test_reader_is_updated(log: Path) -> None:
    append(log, b"1\n2\n3\n4\n")
    dataset = opened(str(log), shard_size=2)
    assert dataset.units is None
    assert not dataset.spec.HasField("units")
    master = Master(dataset)
    follower = Follower(master, "data", load_dataset(dataset.spec))
    follower.follow_once()
    reader = load_dataset(dataset.spec)
    assert not reader.covers(Lease(0, 1, 2, 4))
    with pytest.raises(SettingsError, match="where it has grown, update"):
        reader.read(Lease(0, 1, 2, 4))
    reader.update(master.describe_dataset("data"))
    assert reader.covers(Lease(0, 1, 2, 4))
    assert list(reader.read(Lease(0, 1, 2, 4))) == [b"3", b"4"]
    assert not reader.covers(Lease(0, 2, 4, 6))
    with pytest.raises(SettingsError, match="is not the data set"):
        reader.update(open_dataset("range:5").spec)


def test_lost_answer_repeats_nothing(log: Path) -> None:
    dataset = opened(str(log), shard_size=2)
    master = Master(dataset)
    follower = Follower(master, "data", dataset)
    append(log, b"1\n2\n3\n")
    follower.follow_once()
    append(log, b"4\n5\n6\n")
    master.away = 1
    with pytest.raises(DiscoveryError):
        follower.follow_once()
    append(log, b"7\n8")
    follower.finish()
    assert follower.follow_once()
    assert master.read() == [b"%d" % number for number in range(1, 9)]


def test_two_followers_of_a_text(log: Path) -> None:
    """They should not be, and do no harm: what both have told is taken once."""
    dataset = opened(str(log), shard_size=2)
    master = Master(dataset)
    followers = [Follower(master, "data", load_dataset(dataset.spec)) for _ in range(2)]
    for follower in followers:
        follower.follow_once()
    append(log, b"1\n2\n")
    followers[0].follow_once()
    append(log, b"3\n4\n")
    followers[1].follow_once()
    append(log, b"5\n6\n")
    followers[0].follow_once()
    assert master.read() == [b"1", b"2", b"3", b"4", b"5", b"6"]


@pytest.mark.parametrize("rotate", ["truncate", "replace", "shorten"])
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
    else:
        log.rename(log.with_suffix(".1"))
        log.write_bytes(b"5\n6\n7\n8\n9\n10\n")
    if crash:
        follower = Follower(master, "data", load_dataset(dataset.spec))
    with pytest.raises(SourceError, match=r"log' is not as it was indexed.*(cut off|replaced), or rotated"):
        follower.follow_once()
    with pytest.raises(SourceError, match=r"log' is not as it was indexed"):
        master.read()


def test_removed_text_is_an_error(log: Path) -> None:
    dataset = opened(str(log), shard_size=2)
    follower = Follower(Master(dataset), "data", dataset)
    append(log, b"1\n2\n")
    follower.follow_once()
    log.unlink()
    with pytest.raises(SourceError, match="No such file"):
        follower.follow_once()


def test_long_texts_are_told_in_parts(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_text, "_LOOK_NBYTES", 100)
    append(log, b"".join(b"%03d\n" % number for number in range(100)))
    dataset = opened(str(log), shard_size=2)
    master = Master(dataset)
    follower = Follower(master, "data", dataset)
    follower.follow_once()
    assert master.calls == [24]
    append(log, b"x" * 1000)
    for _ in range(5):
        follower.follow_once()
    assert master.units == 100
    append(log, b"\n")
    deadline = time.monotonic() + DEADLINE_S
    while master.units < 100:
        assert time.monotonic() < deadline
        follower.follow_once()
    follower.finish()
    follower.follow_once()
    assert master.read()[-1] == b"x" * 1000


# A folder that gets files.


def test_growing_folder(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    dataset = opened(f"{folder}", shard_size=2)
    master = Master(dataset)
    settings = FollowSettings(settle_s=0.001)
    follower = Follower(master, "data", dataset, settings)
    expected = []
    for batch in (["b", "a"], ["0", "z", "c"], ["sub/x"]):
        for name in batch:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(name.encode())
        expected += sorted(batch)
        deadline = time.monotonic() + DEADLINE_S
        while master.units < len(expected) // 2 * 2:
            assert time.monotonic() < deadline
            follower.follow_once()
        follower = Follower(master, "data", load_dataset(dataset.spec), settings)
    (folder / "half").write_bytes(b"being written")
    follower.finish()
    assert follower.follow_once()
    samples = master.read()
    assert [sample.id for sample in samples[:4]] == ["a", "b", "0", "c"]
    assert sorted(sample.id for sample in samples) == sorted([*expected, "half"])
    assert samples[0].read_bytes() == b"a"


def test_unfinished_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(growing_files.time, "monotonic", lambda: now_s)
    dataset = opened(f"{tmp_path}/*.bin", shard_size=1)
    master = Master(dataset)
    follower = Follower(master, "data", dataset, FollowSettings(settle_s=5.0))
    for _ in range(4):
        append(tmp_path / "a.bin", b"more")
        follower.follow_once()
        now_s += 4.9
        follower.follow_once()
        assert master.units == 0
    now_s += 0.2
    follower.follow_once()
    assert master.units == 1
    assert master.read()[0].nbytes == 16
    append(tmp_path / "a.bin", b"after all")
    with pytest.raises(SourceError, match=r"a\.bin' is not as it was indexed"):
        master.read()


def test_two_followers_of_a_folder(tmp_path: Path) -> None:
    """Their orders may differ: the second is refused, rather than a file be lost, or the index of no use to readers."""
    dataset = opened(f"{tmp_path}/", shard_size=1)
    master = Master(dataset)
    first, second = (
        Follower(master, "data", load_dataset(dataset.spec), FollowSettings(settle_s=0.0001)) for _ in range(2)
    )
    for follower in (first, second):
        follower.follow_once()
    (tmp_path / "b").write_bytes(b"x")
    first.finish()
    first.follow_once()
    (tmp_path / "a").write_bytes(b"x")
    second.finish()
    with pytest.raises(ConflictError, match=r"has 1 units, and a follower that knew of 0.*another one follows it"):
        second.follow_once()
    assert [sample.id for sample in master.read()] == ["b"]


def test_refused_follower_looks_anew(tmp_path: Path) -> None:
    """A master that was followed by another one has followed to its end: its last part is no reason to give up."""
    dataset = opened(f"{tmp_path}/", shard_size=1)
    master = Master(dataset)
    first, second = (
        Follower(master, "data", load_dataset(dataset.spec), FollowSettings(poll_s=0.01, settle_s=0.0001))
        for _ in range(2)
    )
    second.follow_once()
    (tmp_path / "b").write_bytes(b"x")
    first.follow_once()
    time.sleep(0.001)
    first.follow_once()
    (tmp_path / "a").write_bytes(b"x")
    second.finish()
    second.start()
    assert second.wait_ended(DEADLINE_S)
    assert [sample.id for sample in master.read()] == ["b", "a"]


# A source of the user's.


class Squares:
    """A source in a list."""

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


def test_source_that_lies() -> None:
    source = Squares()
    source.rows = [1, 2, 3]
    dataset = open_dataset("source:squares", ShardSettings(shard_size=1), samples=source)
    follower = Follower(Master(dataset), "data", dataset)
    follower.follow_once()
    source.rows.pop()
    with pytest.raises(SourceError, match="has 2: offsets mean something else"):
        follower.follow_once()
    with pytest.raises(SourceError, match="0 samples, not the 1"):
        list(dataset.read(Lease(0, 2, 2, 3)))


def test_source_by_factory(tmp_path: Path) -> None:
    code = "class Endless:\n    def count(self): return 7\n    def ended(self): return True\n"
    code += "    def read(self, start, stop): return range(start, stop)\n"
    (tmp_path / "endless.py").write_text(code)
    location = f"{tmp_path}/endless.py:Endless"
    dataset = open_dataset(location, ShardSettings(shard_size=4))
    assert (dataset.kind, dataset.spec.location) == ("source", location)
    assert list(load_dataset(dataset.spec, samples=location).read(Lease(0, 1, 4, 7))) == [4, 5, 6]


# The follower's thread.


@pytest.fixture
def following(log: Path) -> Iterator[tuple[Follower, Master]]:
    dataset = opened(str(log), shard_size=2)
    master = Master(dataset)
    follower = Follower(master, "data", dataset, FollowSettings(poll_s=0.01, end_marker=str(log) + ".end"))
    yield follower, master
    follower.close()


def test_follower_until_the_marker(log: Path, following: tuple[Follower, Master]) -> None:
    follower, master = following
    follower.start()
    for number in range(20):
        append(log, b"%d\n" % number)
        deadline = time.monotonic() + DEADLINE_S
        while master.units < (number + 1) // 2 * 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    append(log, b"last")
    log.with_name("log.end").touch()
    assert follower.wait_ended(DEADLINE_S)
    assert master.read() == [*(b"%d" % number for number in range(20)), b"last"]


def test_follower_outlives_a_master(log: Path, following: tuple[Follower, Master]) -> None:
    follower, master = following
    master.away = 2
    append(log, b"1\n2\n")
    follower._backoff = __import__("edl.backoff").backoff.Backoff(0.01, 0.02)
    follower.start()
    follower.finish()
    assert follower.wait_ended(DEADLINE_S)
    assert master.read() == [b"1", b"2"]


def test_follower_outlives_a_storage(
    log: Path, following: tuple[Follower, Master], monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, master = following
    append(log, b"1\n2\n")
    real, failures = local.LocalStorage.stat_file, iter(range(2))

    def fail(storage: local.LocalStorage, path: str) -> Any:
        if next(failures, None) is not None:
            raise StorageError("away")
        return real(storage, path)

    monkeypatch.setattr(local.LocalStorage, "stat_file", fail)
    follower._backoff = __import__("edl.backoff").backoff.Backoff(0.01, 0.02)
    follower.start()
    follower.finish()
    assert follower.wait_ended(DEADLINE_S)
    assert master.read() == [b"1", b"2"]


def test_follower_ends_with_its_error(log: Path, following: tuple[Follower, Master]) -> None:
    follower, master = following
    append(log, b"1\n2\n")
    follower.start()
    deadline = time.monotonic() + DEADLINE_S
    while not master.units:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    log.write_bytes(b"")
    with pytest.raises(SourceError, match="rotated"):
        follower.wait_ended(DEADLINE_S)
    assert isinstance(follower.error, SourceError)
    assert not master.ended, "a source that broke has not ended"


def test_follower_that_is_closed(log: Path, following: tuple[Follower, Master]) -> None:
    follower, master = following
    append(log, b"1\n2\n")
    follower.start()
    follower.close()
    assert not master.ended


def test_what_does_not_grow_is_not_followed() -> None:
    dataset = open_dataset("range:5")
    with pytest.raises(SettingsError, match="does not grow"):
        Follower(Master(dataset), "data", dataset)


@pytest.mark.parametrize("settings", [{"shuffle": True}, {"shuffle_within": True}, {"epochs": 2}, {"epochs": 0}])
def test_streams_are_not_shuffled(log: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="has no end"):
        open_dataset(f"follow:{log}", ShardSettings(**settings))


def test_same_stream(log: Path) -> None:
    append(log, b"1\n2\n")
    dataset = opened(str(log), shard_size=2)
    master = Master(dataset)
    Follower(master, "data", dataset).follow_once()
    assert same_data(opened(str(log), shard_size=2).spec, master.describe_dataset("data"))
    assert not same_data(opened(str(log), shard_size=3).spec, master.describe_dataset("data"))
