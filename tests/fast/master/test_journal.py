"""What every journal promises, over a file and over a store; and what happens where either fails or is another's."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import struct
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from edl.discovery import Store, open_store
from edl.errors import ClosedError, DiscoveryError, EDLError, JournalError, LeaseLostError, ProtocolError, SettingsError
from edl.master.journal import Journal, SqliteJournal, open_journal
from edl.sqlite_file import SqliteFile
from tests.waiting import DEADLINE_S, wait_until


class Place(ABC):
    """One journal, and means to harm it."""

    def __init__(self, url: str, store_url: str = "") -> None:
        self.url = url
        self.store_url = store_url
        self._opened = contextlib.ExitStack()
        self.store: Store | None = self._opened.enter_context(open_store(store_url)) if store_url else None

    def open(self, timeout_s: float = 5.0, store: Store | None = None) -> Journal:
        return self._opened.enter_context(open_journal(self.url, store=store or self.store, timeout_s=timeout_s))

    def close(self) -> None:
        self._opened.close()

    @abstractmethod
    def damage(self, what: str) -> None:
        """Change a byte of the third `record` or the `snapshot`; or the second record is `lost`."""


class FilePlace(Place):
    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}")
        self.path = path

    def damage(self, what: str) -> None:
        statement = {
            "record": "UPDATE record SET data = X'00' || substr(data, 2) WHERE number = 3",
            "snapshot": "UPDATE state SET snapshot = X'00' || substr(snapshot, 2)",
            "lost": "DELETE FROM record WHERE number = 2",
        }[what]
        with contextlib.closing(sqlite3.connect(self.path, timeout=10)) as connection, connection:
            assert connection.execute(statement).rowcount == 1


class StorePlace(Place):
    def __init__(self, store_url: str, job: str) -> None:
        super().__init__(f"store:{job}", store_url)
        self.folder = f"journals/{job}/"

    def damage(self, what: str) -> None:
        folder = self.folder + ("snapshots/" if what == "snapshot" else "records/")
        entry = self.store.list(folder)[-1]
        if what == "lost":
            assert self.store.delete(entry.key.removesuffix("2") + "1")
        else:
            self.store.put(entry.key, entry.value[:-1] + bytes([entry.value[-1] ^ 1]))

    def head(self) -> bytes:
        return self.store.get(f"{self.folder}head").value


def remove_database(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@pytest.fixture(params=["file", "store"])
def place(request: pytest.FixtureRequest, stack: contextlib.ExitStack, url: str, tmp_path: Path) -> Place:
    is_file = request.param == "file"
    found = FilePlace(tmp_path / "folder" / "journal.sqlite") if is_file else StorePlace(url, "job")
    return stack.enter_context(contextlib.closing(found))


RECORD = struct.Struct("!QQQ")
"""The number of a group, of the record in it, and how many records the group has."""


def count(snapshot: bytes | None, records: list[bytes]) -> int:
    """How many groups there are; an AssertionError if any is torn, repeated or left out."""
    done = 0 if snapshot is None else int(snapshot.split(b" ")[0])
    expected = 0
    for record in records:
        group, number, size = RECORD.unpack_from(record)
        assert (group, number) == (done, expected), "a group is torn, repeated or left out"
        expected += 1
        if expected == size:
            done, expected = done + 1, 0
    assert expected == 0, "a group is torn"
    return done


def write_until_killed(url: str, store_url: str, seed: str) -> None:
    """Print a line when `append` or `snapshot` has returned, and never before."""
    choice = random.Random(seed)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store(store_url)) if store_url else None
        journal = stack.enter_context(open_journal(url, store=store))
        journal.begin_term()
        group = count(*journal.load())
        print("begun", group, flush=True)
        while True:
            size = choice.randint(1, 8)
            padding = bytes(choice.choice([0, 100, 60_000]))
            journal.append([RECORD.pack(group, number, size) + padding for number in range(size)])
            group += 1
            print("group", group, flush=True)
            if choice.random() < 0.2:
                journal.snapshot(b"%d " % group + bytes(choice.choice([0, 400_000])))
                print("snapshot", group, flush=True)


ROOT = Path(__file__).parents[3]
KILLS = 2


def begun(place: Place, timeout_s: float = 5.0) -> Journal:
    journal = place.open(timeout_s)
    journal.begin_term()
    return journal


@pytest.mark.parametrize("sizes", [[1, 0, 2], [7] * 1000, [450_000], [189_988, 1, 1]])
def test_groups_come_back_as_they_were(place: Place, sizes: list[int]) -> None:
    choice = random.Random(str(sizes))
    records = [choice.randbytes(size) for size in sizes]
    journal = begun(place)
    journal.append([b"before"])
    journal.append([])
    journal.append(records)
    journal.append([b"behind"])
    expected = (None, [b"before", *records, b"behind"])
    assert journal.load() == expected
    assert begun(place).load() == expected


@pytest.mark.parametrize("size", [0, 400_000])
def test_snapshot_replaces_records(place: Place, size: int) -> None:
    states = [random.Random(number).randbytes(size) for number in range(3)]
    journal = begun(place)
    journal.snapshot(states[0])
    assert journal.load() == (states[0], [])
    journal.append([b"1", b"2"])
    assert journal.load() == (states[0], [b"1", b"2"])
    journal.snapshot(states[1])
    journal = begun(place)
    journal.append([b"behind"])
    assert begun(place).load() == (states[1], [b"behind"])
    journal = begun(place)
    journal.snapshot(states[2])
    journal.append([b"3"])
    assert begun(place).load() == (states[2], [b"3"])


def test_terms_grow_and_records_go_on(place: Place) -> None:
    expected: list[bytes] = []
    for term in range(1, 5):
        journal = place.open()
        for write in (lambda: journal.append([b"x"]), lambda: journal.snapshot(b"x")):  # noqa: B023 - called here
            with pytest.raises(LeaseLostError, match="no term was begun"):
                write()
        assert journal.begin_term() == term
        assert journal.load()[1] == expected
        for number in range(term):
            journal.append([b"%d %d" % (term, number)])
            expected.append(b"%d %d" % (term, number))
        journal.close()
        journal.close()
    for use in (journal.begin_term, journal.load, lambda: journal.append([b"x"]), lambda: journal.snapshot(b"x")):
        with pytest.raises(ClosedError):
            use()
    assert begun(place).load() == (None, expected)


def test_earlier_writer_is_fenced(place: Place) -> None:
    first = begun(place)
    first.append([b"first"])
    second = begun(place)
    for _ in range(2):
        for write in (lambda: first.append([b"late"]), lambda: first.snapshot(b"late")):
            with pytest.raises(LeaseLostError, match="term"):
                write()
        second.append([b"second"])
    second.snapshot(b"state")
    second.append([b"behind"])
    with pytest.raises(LeaseLostError, match="term"):
        first.append([b"late"])
    assert second.load() == begun(place).load() == (b"state", [b"behind"])
    first.begin_term()  # it may come back, with a new term
    first.append([b"again"])
    with pytest.raises(LeaseLostError, match="term"):
        second.append([b"late"])
    assert first.load() == (b"state", [b"behind", b"again"])


@pytest.mark.parametrize("what", ["record", "snapshot", "lost"])
def test_damage_is_found(place: Place, what: str) -> None:
    journal = begun(place)
    journal.append([b"old"])
    journal.snapshot(b"state")
    journal.append([b"one"])
    journal.append([b"two"])
    place.damage(what)
    with pytest.raises(ProtocolError, match=r"journal .*(damaged|missing)"):
        begun(place, timeout_s=0.3).load()


def test_forked_journal_is_refused(place: Place) -> None:
    """The child can do nothing with it, and harms nothing when it ends."""
    journal = begun(place)
    journal.append([b"parent"])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answers = []
        for use in (journal.begin_term, journal.load, lambda: journal.append([b"x"]), lambda: journal.snapshot(b"x")):
            try:
                use()
                answers.append("done")
            except EDLError as exc:
                answers.append(type(exc).__name__)
        journal.close()
        os.write(writing, " ".join(answers).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "ClosedError ClosedError ClosedError ClosedError"
    os.waitpid(child, 0)
    journal.append([b"still"])
    assert journal.load() == begun(place).load() == (None, [b"parent", b"still"])


def test_killed_writer_loses_nothing(place: Place) -> None:
    choice = random.Random(3)
    answered = 0
    for kill in range(KILLS):
        command = [sys.executable, "-m", "tests.fast.master.test_journal", place.url, place.store_url, str(kill)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline().split()
                assert line, "it began"
                assert int(line[1]) >= answered
                for _ in range(choice.randint(1, 20)):
                    answered = int(process.stdout.readline().split()[1])
            finally:
                process.kill()
            for rest in process.stdout.read().splitlines():
                if rest.count(" ") == 1 and rest.split()[0] in ("group", "snapshot"):
                    answered = max(answered, int(rest.split()[1]))
        journal = begun(place)
        found = count(*journal.load())
        assert answered <= found <= answered + 1, "a group more may be there: it was not answered yet"
        answered = found
        journal.close()
    assert answered >= KILLS


class Disturbed:
    """A store of which some calls are disturbed: `before` and `after` see the method's name and the key."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.before: Callable[[str, str], None] = lambda method, key: None
        self.after: Callable[[str, str], None] = lambda method, key: None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(key: str, *arguments: Any) -> Any:
            self.before(name, key)
            answer = method(key, *arguments)
            self.after(name, key)
            return answer

        return call if name in ("get", "list", "put", "compare_and_set", "delete") else method


@pytest.fixture
def stored(stack: ExitStack, url: str) -> StorePlace:
    return stack.enter_context(closing(StorePlace(url, "job")))


@pytest.fixture
def disturbed(stored: StorePlace) -> Any:
    return Disturbed(stored.store)


def keys(stored: StorePlace) -> set[str]:
    return {entry.key for entry in stored.store.list("journals/") if entry.key != f"{stored.folder}head"}


def named(stored: StorePlace) -> set[str]:
    """Keys that the head names as the journal's."""
    head = json.loads(stored.head())
    runs = [*head["records"], *([head["snapshot"][:3]] if head["snapshot"] else [])]
    return {
        f"{stored.folder}{folder}/{number // 128:08d}/{number % 128:03d}"
        for folder, first, stop in runs
        for number in range(first, stop)
    }


def test_values_are_small_and_swept(stored: StorePlace) -> None:
    """Below Consul's limit; and what a snapshot replaced is deleted after a while."""
    journal = stored.open()
    journal.begin_term()
    for number in range(60):
        journal.append([bytes(10_000), bytes(500_000 if number % 20 == 0 else 7)])
    journal.snapshot(bytes(700_000))
    journal.append([bytes(300_000)])
    assert all(len(entry.value) <= 200_000 for entry in stored.store.list("journals/"))
    wait_until(lambda: keys(stored) == named(stored), "a sweep")
    assert len(keys(stored)) == 4 + 2
    for number in range(40):
        journal.snapshot(b"%d" % number)
    wait_until(lambda: keys(stored) == named(stored), "a sweep")
    assert len(stored.head()) < 10_000, "what was swept is named no more"


@pytest.mark.parametrize("write", ["append", "snapshot", "begin_term"])
def test_lost_answer_is_no_second_write(stored: StorePlace, disturbed: Any, write: str) -> None:
    """The store did what it was asked, and then its answer was lost."""
    journal = stored.open(store=disturbed)
    journal.begin_term()
    lost = []

    def lose(method: str, key: str) -> None:
        if method in ("compare_and_set", "put") and len(lost) < 3:
            lost.append(key)
            raise DiscoveryError("the answer is lost")

    disturbed.after = lose
    if write == "append":
        journal.append([b"1"])
        journal.append([b"2"])
        assert stored.open().load() == (None, [b"1", b"2"])
    elif write == "snapshot":
        journal.snapshot(b"state")
        assert stored.open().load() == (b"state", [])
    else:
        assert journal.begin_term() == 2
        journal.append([b"1"])
    assert len(lost) == 3 if write != "begin_term" else lost


def test_own_late_write_is_found(stored: StorePlace, disturbed: Any) -> None:
    """The store does what the first request asks after it was asked again, and shows it late: no other master did."""
    journal = stored.open(store=disturbed)
    journal.begin_term()
    journal.append([b"1"])
    head = f"{stored.folder}head"
    held: list[tuple[Any, ...]] = []
    compare_and_set, get = disturbed._store.compare_and_set, disturbed._store.get
    stale = get(head)
    looks: list[str] = []

    def delayed(key: str, *arguments: Any) -> Any:
        if not held:
            held.append((key, *arguments))
            raise DiscoveryError("timed out, and is under way")
        if len(held) == 1:
            held.append(())
            compare_and_set(*held[0])
        return compare_and_set(key, *arguments)

    def look(key: str) -> Any:
        looks.append(key)
        return stale if len(looks) == 1 else get(key)

    class Delaying:
        compare_and_set = staticmethod(delayed)
        get = staticmethod(look)

        def __getattr__(self, name: str) -> Any:
            return getattr(stored.store, name)

    disturbed._store = Delaying()
    journal.append([b"2"])
    journal.append([b"3"])
    assert len(held) == 2
    assert stored.open().load() == (None, [b"1", b"2", b"3"])


def test_writers_that_begin_alike_differ(stored: StorePlace, disturbed: Any) -> None:
    """Two write the same term over the same head, and one of them does not hear that it came second."""
    second = stored.open()

    def overtake(method: str, key: str) -> None:
        if method == "compare_and_set":
            disturbed.before = lambda method, key: None
            second.begin_term()
            raise DiscoveryError("it was not written")

    disturbed.before = overtake
    first = stored.open(store=disturbed)
    assert first.begin_term() == 2
    first.append([b"first"])
    with pytest.raises(LeaseLostError):
        second.append([b"second"])
    assert stored.open().load() == (None, [b"first"])


@pytest.mark.parametrize("write", ["append", "snapshot"])
def test_paused_writer_comes_too_late(stored: StorePlace, disturbed: Any, write: str) -> None:
    """It stood still between its values and the head, while another took over and replaced everything."""
    first = stored.open(store=disturbed)
    first.begin_term()
    first.append([b"1"])
    second = stored.open()

    def pause(method: str, key: str) -> None:
        if method == "compare_and_set" and (write == "append" or seen.append(key) or len(seen) == 2):
            disturbed.before = lambda method, key: None
            second.begin_term()
            assert second.load() == (None, [b"1"])
            second.append([b"2"])
            second.snapshot(b"state")
            second.append([b"3"])

    seen: list[str] = []
    disturbed.before = pause
    with pytest.raises(LeaseLostError, match="another master has begun a term; this journal object is for term 1"):
        first.append([b"late"]) if write == "append" else first.snapshot(b"late")
    second.append([b"4"])
    assert second.load() == stored.open().load() == (b"state", [b"3", b"4"])
    second.snapshot(b"next")
    second.snapshot(b"last")
    first.close()
    wait_until(lambda: keys(stored) == named(stored), "a sweep")


def test_store_is_away_for_a_while(stored: StorePlace, disturbed: Any) -> None:
    """A writer asks again until its `timeout_s`; then nothing follows the error."""
    failures: list[str] = []

    def fail(method: str, key: str) -> None:
        if len(failures) < most:
            failures.append(method)
            raise DiscoveryError("away")

    most = 3
    journal = stored.open(store=disturbed, timeout_s=DEADLINE_S)
    journal.begin_term()
    disturbed.before = fail
    journal.append([b"1"])
    journal.append([b"2"])
    assert journal.load() == (None, [b"1", b"2"])
    impatient = stored.open(store=disturbed, timeout_s=0.1)
    impatient.begin_term()
    most = 10**9
    for _ in range(2):
        with pytest.raises(JournalError, match="journals/job: cannot append: away"):
            impatient.append([b"3"])
    with pytest.raises(JournalError, match="journals/job: cannot append: away"):
        impatient.load()


@pytest.mark.parametrize("value", [b"", b"[]", b'{"format":1}', b'{"format":2,"term":"x"}', b"\xff\x00"])
def test_foreign_head_is_refused(stored: StorePlace, value: bytes) -> None:
    stored.store.put(f"{stored.folder}head", value)
    with pytest.raises(ProtocolError, match="journals/job"):
        stored.open().begin_term()
    assert stored.head() == value


def test_value_that_shows_late_is_waited_for(stored: StorePlace, disturbed: Any) -> None:
    """As Consul may answer while its leadership changes hands."""
    journal = stored.open()
    journal.begin_term()
    journal.append([b"1"])
    journal.append([b"2"])
    entry = stored.store.list(f"{stored.folder}records/")[-1]
    stored.store.delete(entry.key)
    looks = []

    def look(method: str, key: str) -> None:
        if method == "list":
            looks.append(key)
            if len(looks) == 3:
                stored.store.put(entry.key, entry.value)

    disturbed.before = look
    assert stored.open(store=disturbed).load() == (None, [b"1", b"2"])


PROGRAM = """
import resource, sys
from edl.errors import JournalError
from edl.master.journal import open_journal

url = f"sqlite:///{sys.argv[1]}/journal.sqlite"
journal = open_journal(url)
journal.begin_term()
journal.snapshot(b"state")
journal.append([b"kept"])
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
written = 0
words = ""
try:
    while True:
        journal.append([b"%d" % written, bytes(30_000), b"%d" % written])
        written += 1
except JournalError as exc:
    words = str(exc)
    assert not exc.busy
assert "cannot " in words and ("full" in words or "I/O" in words), words
assert written > 0
for use in (lambda: journal.append([b"x"]), journal.load, lambda: journal.snapshot(b"x"), journal.begin_term):
    try:
        use()
        raise AssertionError("it goes on after an error")
    except JournalError as exc:
        assert str(exc) == words
journal.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with open_journal(url) as journal:
    snapshot, records = journal.load()
    assert snapshot == b"state" and records[0] == b"kept"
    assert len(records) == 1 + 3 * written, "a group is torn"
print("borne")
"""


def test_full_disk_tears_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "borne\n", done.stderr


def test_commits_are_written_through(tmp_path: Path) -> None:
    """FULL is a number: 2. With less, a loss of power takes what was answered last."""
    with SqliteJournal(str(tmp_path / "journal.sqlite"), timeout_s=5.0) as journal:
        assert journal._file.sqlite.execute("PRAGMA synchronous").fetchone() == (2,)
        assert journal._file.sqlite.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_journal_in_kubernetes_is_explained() -> None:
    with pytest.raises(SettingsError, match=r"no longer supported.*edl://edl-store.edl:29400.*store:JOB"):
        open_journal("kubernetes://lab")


def test_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.sqlite"
    url = f"sqlite:///{path}"
    open_journal(url).close()
    open_journal(f"sqlite:///{tmp_path}/other.sqlite").close()
    prepare = SqliteFile._prepare
    replaced = []

    def prepare_then_replace(file: SqliteFile) -> None:
        prepare(file)
        if not replaced:
            remove_database(path)
            replaced.append((tmp_path / "other.sqlite").rename(path))

    monkeypatch.setattr(SqliteFile, "_prepare", prepare_then_replace)
    with open_journal(url) as journal:
        assert replaced
        journal.begin_term()
        journal.append([b"x"])
    with open_journal(url) as journal:
        assert journal.load() == (None, [b"x"]), "what was answered is lost"


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database\n" * 100)
    with contextlib.closing(sqlite3.connect(tmp_path / "database")) as connection:
        connection.execute("CREATE TABLE mine (x)")
    open_journal(f"sqlite:///{tmp_path}/newer").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "newer")) as connection:
        connection.execute("PRAGMA user_version = 3")
    (tmp_path / "folder").mkdir()
    for name, words in {
        "text": "not a database",
        "database": "another program's database",
        "newer": "format 3, not 2",
        "folder": "unable to open",
        "text/below": "folder cannot be created",
    }.items():
        with pytest.raises(SettingsError, match=words):
            open_journal(f"sqlite:///{tmp_path}/{name}")
    assert (tmp_path / "text").read_text().startswith("this is no database")


@pytest.mark.parametrize(
    "url",
    ["", "x", "sqlite://host/path", "sqlite:///", "sqlite:///a?b", "store:job", "consul://host:8500"],
)
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="journal"):
        open_journal(url)
    with pytest.raises(SettingsError, match="timeout_s"):
        open_journal("sqlite:///x", timeout_s=0)


if __name__ == "__main__":
    write_until_killed(*sys.argv[1:])
