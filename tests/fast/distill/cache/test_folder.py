"""The cache's folder: bounds, several processes, disks and files that fail, and what is read of a whole folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edl import mounts, sqlite_file
from edl.distill.cache import CacheKey, SoftLabelCache, load_labels
from edl.distill.cache import folder as module
from edl.errors import ConflictError, SettingsError, TemporaryError
from tests.fast.distill.cache.conftest import KEY, OTHER, found, put, rows
from tests.fast.distill.cache.test_sequences import labels, named
from tests.fast.distill.sequences.language_model import sequences

LM = CacheKey("lm", "1", ("logprobs",), top_k=4)
MIB = 1 << 20
WIDE = 1000  # 4 KB a row, of which about 160 fit into 1 MiB


def nbytes(path: Path) -> int:
    return (path / "labels.sqlite").stat().st_size


def test_oldest_labels_of_all_keys_go_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for ids, key in ((range(90), OTHER), (range(90), KEY), (range(100, 190), KEY)):
        put(tmp_path, ids, key, WIDE, disk_bytes=MIB)
    assert not all(found(tmp_path, range(90), OTHER, WIDE))
    assert all(found(tmp_path, [*range(90), *range(100, 190)], KEY, WIDE))
    assert not caplog.messages
    put(tmp_path, range(300, 420), KEY, WIDE, disk_bytes=MIB)
    assert all(found(tmp_path, range(300, 420), KEY, WIDE))
    assert not all(found(tmp_path, range(60), KEY, WIDE))
    (warning,) = caplog.messages
    assert f"raise disk_bytes={MIB}" in warning
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.keys() == [KEY]


def test_a_bound_that_was_lowered(tmp_path: Path) -> None:
    put(tmp_path, range(400), KEY, WIDE)
    assert nbytes(tmp_path) > 3 * MIB // 2
    put(tmp_path, [400], KEY, WIDE, disk_bytes=MIB)
    assert nbytes(tmp_path) <= MIB
    assert found(tmp_path, [0, 399, 400], KEY, WIDE) == [False, True, True]


def test_the_bound_holds_for_two_writers(tmp_path: Path) -> None:
    """At every moment; one has small labels, whose ids change many pages of the index."""

    def write(key: CacheKey, width: int, factor: int) -> None:
        for start in range(0, 200, 20):
            ids = [number * factor % 997 for number in range(start, start + 20)]
            put(tmp_path, ids, key, width, disk_bytes=MIB)

    threads = [threading.Thread(target=write, args=args) for args in ((KEY, WIDE, 1), (OTHER, 600, 331))]
    for thread in threads:
        thread.start()
    largest = 0
    while any(thread.is_alive() for thread in threads):
        with contextlib.suppress(FileNotFoundError):  # before the first has made it
            largest = max(largest, nbytes(tmp_path))
    assert max(largest, nbytes(tmp_path)) <= MIB
    assert nbytes(tmp_path) > MIB // 2
    last = [number * 331 % 997 for number in range(180, 200)]
    assert all(found(tmp_path, range(180, 200), KEY, WIDE)) or all(found(tmp_path, last, OTHER, 600)), "the newest"
    with SoftLabelCache(0, tmp_path, MIB) as cache:
        assert cache.stats().disk_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_label_above_the_bound_evicts_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, range(10))
    with SoftLabelCache(4 * MIB, tmp_path, MIB) as cache:
        big = CacheKey("wide", "1", ("logits",))
        cache.view(big).put([1], {"logits": np.zeros((1, 300_000), np.float32)})
        with pytest.raises(TemporaryError, match=r"1 rows .* a label of 1200008 bytes is too large for disk_bytes"):
            cache.flush()
        cache.flush()  # told once
        assert cache.stats().failed_writes == 1
    assert all(found(tmp_path, range(10)))
    (warning,) = caplog.messages
    assert "1 rows were not written" in warning


@pytest.mark.parametrize("cause", ["lock", "full"])
def test_a_failed_flush_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    """A process that holds the lock for ever hangs nobody, nor does a full disk."""
    monkeypatch.setattr(module, "_BUSY_S", 0.2)
    with SoftLabelCache(MIB, tmp_path) as cache:
        holder = sqlite3.connect(tmp_path / "labels.sqlite", isolation_level=None)
        if cause == "lock":
            holder.execute("BEGIN IMMEDIATE")
        else:
            cache.folder._writing.file().sqlite.execute("PRAGMA max_page_count = 8")  # type: ignore[union-attr]
        cache.view(KEY).put(range(100), rows(range(100), WIDE))
        with pytest.raises(TemporaryError, match=r"another process has been writing for 0.2 s|disk is full"):
            cache.flush()
        holder.close()
        monkeypatch.undo()
        cache.folder._writing.close()  # type: ignore[union-attr]
        cache.view(KEY).put([1], rows([1], WIDE))
        cache.flush()
    assert found(tmp_path, [1, 2], KEY, WIDE) == [True, False]


def test_rows_are_others_at_once(tmp_path: Path) -> None:
    """Another cache of the folder sees them, though it has looked before they came."""
    with SoftLabelCache(0, tmp_path) as cache, SoftLabelCache(0, tmp_path) as other:
        view = other.view(KEY)
        for ids in ([1, 2], [3, 4]):
            assert not view.get(ids).mask.any()
            cache.view(KEY).put(ids, rows(ids))
            assert view.get(ids).complete


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data(), of_texts=st.booleans())
def test_damage_gives_no_wrong_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject, of_texts: bool
) -> None:
    """Whichever bytes of the file are changed or cut off, a label that is still found is the sample's own."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 1 << (bits - 1))  # the same file each time
    shutil.rmtree(tmp_path, ignore_errors=True)
    texts = sequences(6, longest=5)
    key, ids = (LM, named(range(6), texts)) if of_texts else (KEY, ["a", "bc", "größe"])
    with SoftLabelCache(0, tmp_path) as cache:
        cache.view(key).put(ids, labels(texts) if of_texts else rows([1, 2, 3], 4))
    with SoftLabelCache(MIB, tmp_path) as cache:
        whole: Any = cache.view(key).get(ids)
    file = tmp_path / "labels.sqlite"
    damaged = bytearray(file.read_bytes())
    used = [at for at, byte in enumerate(damaged) if byte]
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.sampled_from(used))] = data.draw(st.integers(0, 255))
    file.write_bytes(damaged[: data.draw(st.sampled_from([None, None, len(damaged) // 2, len(damaged) - 1]))])
    try:
        with SoftLabelCache(0, tmp_path) as cache:
            cache.keys()
            got: Any = cache.view(key).get(ids)
    except SettingsError:  # the database is damaged as a whole, and says so
        return
    for name, expected in whole.outputs.items() if got.mask.any() else ():
        if of_texts:
            assert got.outputs[name].values.tolist() == expected.values[got.row_mask].tolist()
            assert got.outputs[name].ids.tolist() == expected.ids[got.row_mask].tolist()
        else:
            np.testing.assert_array_equal(got.outputs[name], expected[got.mask])


def test_damaged_label_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, range(200))
    file = tmp_path / "labels.sqlite"
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(rows([150])["logits"].tobytes()) + 20] ^= 0x40
    file.write_bytes(damaged)
    with SoftLabelCache(0, tmp_path) as cache:
        view = cache.view(KEY)
        assert not view.get([150, 150]).mask.any()
        assert np.flatnonzero(~view.contains(range(200))).tolist() == [150]
        assert cache.stats().damaged_rows >= 1
    assert len([words for words in caplog.messages if "damaged" in words]) == 1, "one line for all of them"
    assert set(range(200)) - set(load_labels(tmp_path).ids) == {150}
    put(tmp_path, [150])
    assert load_labels(tmp_path).ids == tuple(range(200))
    with SoftLabelCache(0, tmp_path) as cache, contextlib.closing(sqlite3.connect(file)) as db:
        assert cache.view(KEY).get([7]).mask.all()
        with db:  # as an index that is damaged gives the number of another label
            db.execute("DELETE FROM label WHERE id = 8")
            db.execute("UPDATE label SET id = 8 WHERE id = 7")
        assert not cache.view(KEY).get([8]).mask.any()


def test_a_folder_that_goes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reader goes on without it, and with it once it is there again."""
    path = tmp_path / "labels"
    with SoftLabelCache(0, path) as cache:
        view = cache.view(KEY)
        view.put([1], rows([1]))
        cache.flush()
        shutil.rmtree(path)
        assert not view.get([1]).mask.any()
        view.put([1], rows([1]))
        with pytest.raises(TemporaryError, match=r"could not be written: .*the folder was deleted"):
            cache.flush()
        assert any("cannot be read now" in words for words in caplog.messages)
        path.mkdir()
        view.put([2], rows([2]))
        cache.flush()
        assert view.get([1, 2]).mask.tolist() == [False, True]


@pytest.mark.parametrize("cause", ["read-only", "full"])
def test_a_folder_without_room_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    def is_full(_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    put(tmp_path, [1])
    if cause == "full":
        monkeypatch.setattr(sqlite_file, "_opening", is_full)
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.view(KEY).get([1]).complete
        cache.view(KEY).put([2], rows([2]))
        with pytest.raises(TemporaryError, match="readonly"):
            cache.flush()
        monkeypatch.undo()
        cache.view(KEY).put([3], rows([3]))
        if cause == "full":
            cache.flush()
            assert cache.view(KEY).get([1, 3]).complete, "it has room again"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("labels.sqlite")] == ["labels.sqlite"]


def test_folders_that_machines_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are refused for writing, and read where nobody writes."""
    put(tmp_path, [1])
    monkeypatch.setattr(mounts, "file_system", lambda *_: "nfs4")
    with pytest.raises(SettingsError, match=r"is on nfs4, a shared file system.*EDL_SHARED_FILE=1"):
        SoftLabelCache(0, tmp_path)
    assert load_labels(tmp_path).ids == (1,)
    monkeypatch.setenv("EDL_SHARED_FILE", "1")
    put(tmp_path, [2])
    assert all(found(tmp_path, [1, 2]))


def test_what_is_no_folder_of_labels_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "files", [1])
    with contextlib.closing(sqlite3.connect(tmp_path / "files" / "labels.sqlite")) as database:
        database.execute("PRAGMA user_version = 1")  # as when labels were in files beside the database
    for call in (lambda: SoftLabelCache(0, tmp_path / "files"), lambda: load_labels(tmp_path / "files")):
        with pytest.raises(SettingsError, match=r"files.* has format 1, not 3: another release"):
            call()
    (tmp_path / "files" / "labels.sqlite").write_bytes(b"text" * 1000)
    with pytest.raises(SettingsError, match=r"is damaged .*delete this one"):
        SoftLabelCache(0, tmp_path / "files")


# All of a folder


def test_of_several_keys_one_must_be_chosen(tmp_path: Path) -> None:
    put(tmp_path, [1])
    put(tmp_path / "other", [2], OTHER)
    with pytest.raises(SettingsError, match="several keys"):
        load_labels([tmp_path, tmp_path / "other"])
    put(tmp_path, [2], OTHER)
    with pytest.raises(SettingsError, match=r"several keys(.|\n)*version='1'(.|\n)*"):
        load_labels(tmp_path)
    assert load_labels(tmp_path, OTHER).ids == (2,)
    with pytest.raises(SettingsError, match="no intact labels of CacheKey"):
        load_labels(tmp_path, CacheKey("resnet", "3", ("logits",)))


def test_several_folders_are_read_together(tmp_path: Path) -> None:
    """Machines that wrote to folders of their own; of several labels that of the last folder counts, not the newest."""
    parts = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    put(parts[1], [1, 2, 3])
    with SoftLabelCache(0, parts[0]) as cache:
        cache.view(KEY).put([3, 4], rows([3.5, 4.5]))
    parts[2].mkdir()
    for order, third in ((parts, 3.0), (parts[::-1], 3.5)):
        labels = load_labels(order)
        assert labels.ids == (1, 2, 3, 4)
        assert labels.outputs["logits"][:, 0].tolist() == [1, 2, third, 4.5]  # type: ignore[index]
    with SoftLabelCache(0, tmp_path / "together") as cache:
        for part in parts[::-1]:
            cache.add_folder(part)
        assert cache.view(KEY).get(range(1, 5)).outputs["logits"][:, 0].tolist() == [1, 2, 3.5, 4.5]  # type: ignore[index]
    together = load_labels(tmp_path / "together")
    assert together.ids == (1, 2, 3, 4)
    with pytest.raises(SettingsError, match=r"no label for sample 7 \(2 of 3 are missing\)"):
        together.rows([1, 7, 8])
    with pytest.raises(SettingsError, match="at least one"):
        load_labels([])
    with pytest.raises(SettingsError, match=r"d' is not a folder"):
        load_labels([parts[0], tmp_path / "d"])
    with SoftLabelCache(0, parts[2]) as cache:
        cache.view(KEY).put([9], {"logits": np.zeros((1, 4), np.float32)})
    with pytest.raises(
        SettingsError, match=r"c' are 'logits' float32 \[4\], but those in earlier folders are 'logits' float32 \[100\]"
    ):
        load_labels(parts)


def test_labels_of_discarded_data_are_refused(tmp_path: Path) -> None:
    """However late: a process may be stopped while another discards its labels, or deletes its folder."""
    with SoftLabelCache(0, tmp_path) as late, SoftLabelCache(0, tmp_path) as other:
        mine, theirs = late.view(KEY), other.view(KEY)
        my_folder, their_folder = late.folder, other.folder
        assert my_folder is not None
        assert their_folder is not None
        for mark in "ac":
            assert my_folder.data_set(mine.space) == ("" if mark == "a" else "b")
            my_folder.note_data_set(mine.space, mark, relabel=True)
            mine.put([1], rows([1]))
            late.flush()
            if mark == "c":
                shutil.rmtree(tmp_path)
                tmp_path.mkdir()
            assert their_folder.data_set(theirs.space) == ("a" if mark == "a" else "")
            their_folder.note_data_set(theirs.space, "b", relabel=True)
            theirs.put([2], rows([2]))
            other.flush()
            mine.put([1, 2], rows([8, 9]))
            with pytest.raises(TemporaryError, match="now belongs to another run"):
                late.flush()
            with pytest.raises(ConflictError, match="now belongs to another run"):
                my_folder.check_data_set(mine.space)
            with pytest.raises(ConflictError, match="now belongs to another run"):
                my_folder.note_data_set(mine.space, "d")
            their_folder.check_data_set(theirs.space)
            assert found(tmp_path, [1, 2]) == [False, True]


@pytest.mark.parametrize("path", [None, 3, "", ["a", None]])
def test_a_path_of_labels_is_checked(path: Any) -> None:
    with pytest.raises(SettingsError, match="does not name a folder of labels"):
        load_labels(path)


def test_a_folder_without_labels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="edl label"):
        load_labels(tmp_path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(SettingsError, match="not a folder"):
        load_labels(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
    put(tmp_path, range(2000))
    file = tmp_path / "labels.sqlite"
    data = file.read_bytes()
    file.write_bytes(data[:16384] + bytes([255]) * 8192 + data[24576:])  # the page of the keys
    with pytest.raises(SettingsError, match="damaged"):
        load_labels(tmp_path)
