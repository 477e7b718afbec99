"""What happens to files: a full disk, limits, locks, files that are removed, replaced or something else."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from edl.errors import JournalError, SettingsError
from edl.master.journal import SqliteJournal, open_journal
from edl.sqlite_file import SqliteFile
from tests.fast.master.journal.conftest import remove_database

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


@pytest.mark.parametrize("change", ["removed", "replaced", "wal"])
def test_file_is_taken_away(tmp_path: Path, change: str) -> None:
    """What is written into a file that is nobody's any more would be lost: it is not answered."""
    path = tmp_path / "journal.sqlite"
    with open_journal(f"sqlite:///{path}") as journal:
        journal.begin_term()
        journal.append([b"x"])
        if change == "removed":
            remove_database(path)
        elif change == "replaced":
            remove_database(path)
            with open_journal(f"sqlite:///{path}") as other:
                other.begin_term()
        else:
            path.with_name(path.name + "-wal").unlink()
        with pytest.raises(JournalError, match="removed or replaced"):
            journal.append([b"y"])
        with pytest.raises(JournalError, match="removed or replaced"):
            journal.append([b"z"])


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


def test_lock_of_another_has_a_deadline(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with open_journal(f"sqlite:///{path}", timeout_s=0.1) as journal:
        journal.begin_term()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(JournalError, match=r"cannot append: .*locked") as caught:
                journal.append([b"x"])
            assert caught.value.busy
            with (
                open_journal(f"sqlite:///{path}", timeout_s=0.1) as second,
                pytest.raises(JournalError, match="locked") as caught,
            ):
                second.begin_term()
            assert caught.value.busy
    with open_journal(f"sqlite:///{path}") as journal:
        assert journal.load() == (None, [])


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database\n" * 100)
    with contextlib.closing(sqlite3.connect(tmp_path / "database")) as connection:
        connection.execute("CREATE TABLE mine (x)")
    open_journal(f"sqlite:///{tmp_path}/newer").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "newer")) as connection:
        connection.execute("PRAGMA user_version = 2")
    (tmp_path / "folder").mkdir()
    for name, words in {
        "text": "not a database",
        "database": "another program's database",
        "newer": "format 2, not 1",
        "folder": "unable to open",
        "text/below": "folder cannot be made",
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
