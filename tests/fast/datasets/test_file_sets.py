"""Sets of files, ranges and sequences: stable ids, an order within a shard, and data that are not what they were."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from edl.datasets import ShardSettings, load_dataset, open_data, open_dataset
from edl.datasets import dataset as dataset_module
from edl.datasets.dataset import pack_part, unpack_parts
from edl.errors import ProtocolError, SettingsError, SourceError
from edl.permutation import Permutation
from edl.protocol.master import DatasetSpec
from tests.fast.datasets.leases import Lease, leases, read_all


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b/2.jpg", "b/1.jpg", "a.jpg", "c.png", ".hidden.jpg", "b/100%25.jpg", "b/ü\n.jpg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path


IDS = ["a.jpg", "b/1.jpg", "b/100%25.jpg", "b/2.jpg", "b/ü\n.jpg"]


def test_files_by_path(folder: Path) -> None:
    dataset = load_dataset(open_dataset(f"files:{folder}/**/*.jpg", ShardSettings(shard_size=2)).spec)
    (folder / "0.jpg").write_bytes(b"new files are no part of it")
    assert [sample.id for sample in read_all(dataset)] == IDS
    assert [name for lease in leases(dataset) for name in dataset.sample_ids(lease)] == IDS
    assert [sample.read_bytes().decode() for sample in read_all(dataset)] == IDS
    assert [sample.nbytes for sample in read_all(dataset)] == [len(name.encode()) for name in IDS]


def test_folder_is_all_of_its_files(folder: Path) -> None:
    (folder / "empty").touch()
    samples = read_all(open_dataset(f"files:{folder}"))
    ids = [sample.id for sample in samples]
    assert samples[-1].read_bytes() == b""
    assert ids == sorted([*IDS, "c.png", "empty"])
    single = open_dataset(f"files:{folder}/b/1.jpg")
    assert [sample.id for sample in read_all(single)] == ["1.jpg"]
    relative = open_dataset(f"files:{os.path.relpath(folder)}/**/*.jpg", ShardSettings(shuffle_within=True, seed=4))
    assert relative.spec.location == f"{folder}/**/*.jpg", "workers may be in another folder"
    shuffled = [sample.id for sample in read_all(relative)]
    assert shuffled != IDS
    assert sorted(shuffled) == IDS
    assert relative.sample_ids(leases(relative)[0]) == shuffled


def test_files_on_another_storage() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a/1.bin", "a/b/2.bin", "a/.x.bin"):
        memory.pipe_file(f"/edl-files/{name}", name.encode())
    for pattern in ("files:memory://edl-files/**/*.bin", "files:memory://edl-files"):
        dataset = load_dataset(open_dataset(pattern).spec)
        assert [sample.id for sample in read_all(dataset)] == ["a/1.bin", "a/b/2.bin"]
        assert [sample.read_bytes() for sample in read_all(dataset)] == [b"a/1.bin", b"a/b/2.bin"]
    memory.pipe_file("/edl-files/a/1.bin", b"a/9.bin")
    with pytest.raises(SourceError, match="rewritten"):
        read_all(dataset)
    memory.rm("/edl-files", recursive=True)
    with pytest.raises(SourceError, match="file not found"):
        read_all(dataset)
    with pytest.raises(SettingsError, match="no file matches"):
        open_dataset("files:memory://edl-files/*.bin")


def test_changed_files_are_an_error(folder: Path) -> None:
    dataset = open_dataset(f"files:{folder}/*.jpg")
    lenient = open_dataset(f"files:{folder}/*.jpg", check="size")
    (sample,) = lenient.read(Lease(0, 0, 0, 1))
    os.utime(folder / "a.jpg", (1, 1))
    with pytest.raises(SourceError, match=r"a\.jpg' has changed since it was indexed: it was rewritten.*check='size'"):
        read_all(dataset)
    assert len(read_all(lenient)) == 1
    (folder / "a.jpg").write_bytes(b"larger than before")
    with pytest.raises(SettingsError, match="check='md5'"):
        open_dataset(f"files:{folder}", check="md5")
    for changed in (dataset, lenient):
        with pytest.raises(SourceError, match=r"a\.jpg' has changed since it was indexed: it has 18 bytes, but had 5"):
            read_all(changed)
    with pytest.raises(SourceError, match="no longer 5 bytes"):
        sample.read_bytes()


def test_chained_urls_are_refused() -> None:
    for location in ("zip://x::file:///data.zip", "filecache://s3://b/k::memory://x"):
        with pytest.raises(SettingsError, match="is a chain of URLs"):
            open_dataset(f"lines:{location}")


def test_bombs_are_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "_MOST_UNPACKED", 1000)
    part = pack_part({}, {"n": np.zeros(10_000, np.int64)})
    assert len(part) < 200
    with pytest.raises(ProtocolError, match="larger than"):
        unpack_parts(part)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("shard_size", value) for value in (0, 1.5, True)],
        *[("epochs", -1), ("seed", 1 << 64), ("max_failures", 0)],
        *[("lease_s", 0), ("lease_s", float("nan")), ("session_s", -1), ("commit", "now")],
    ],
)
def test_useless_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(SettingsError, match=field):
        ShardSettings(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "location", ["range:", "range:0", "range:1e3", "range:٣", f"range:{1 << 63}", "5", "", "nokind:x"]
)
def test_useless_locations_are_refused(location: str) -> None:
    with pytest.raises(SettingsError, match=r"range|expected|no module"):
        open_dataset(location)
    with pytest.raises(SettingsError, match="'encodin'"):
        open_dataset("range:5", encodin="utf-8")
    with pytest.raises(SettingsError, match="'cassette'"):
        load_dataset(DatasetSpec(kind="cassette", shard_size=1))


def test_shuffle_is_within_the_shard() -> None:
    spec = open_dataset("range:100", ShardSettings(shard_size=30, shuffle_within=True, seed=3)).spec
    dataset = load_dataset(spec)
    first, second = read_all(dataset, epoch=0), read_all(dataset, epoch=1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert sorted(first[:30]) == list(range(30)), "a shard has its own units"
    assert [unit for lease in leases(dataset) for unit in dataset.sample_ids(lease)] == first
    whole, rest = list(dataset.read(Lease(2, 1, 30, 60))), list(dataset.read(Lease(2, 1, 41, 60)))
    assert rest == whole[11:], "a reader that goes on within a shard reads what the one before it has not"


def test_permutation_never_changes() -> None:
    """Two versions of EDL may read a shard together: the order is part of the protocol."""
    order = Permutation(1000, b"1/2/3").values(0, 1000)
    assert sorted(order) == list(range(1000))
    assert Permutation(8, b"1/2/3").values(0, 8) == [4, 5, 0, 7, 2, 6, 3, 1]
    assert order[990:] == Permutation(1000, b"1/2/3").values(990, 1000)
    shuffled = open_dataset("range:8", ShardSettings(shard_size=8, shuffle_within=True, seed=1))
    assert list(shuffled.read(Lease(0, 0, 0, 8))) == Permutation(8, b"1/0/0").values(0, 8)


def test_another_order_is_refused() -> None:
    """A shard that was half read in that order would be continued at the wrong units."""
    spec = open_dataset("range:8", ShardSettings(shuffle_within=True)).spec
    for order in (True, 3):
        spec.index = pack_part({"named": False, "shuffle_within": order}, {})
        with pytest.raises(SettingsError, match="in a different order: create it again"):
            load_dataset(spec)


def test_samples_of_a_sequence() -> None:
    letters = list("abcdefghij")
    spec = open_dataset("range:letters", ShardSettings(shard_size=4), samples=letters).spec
    again = pickle.loads(pickle.dumps(load_dataset(spec, samples=letters)))
    assert read_all(again) == letters
    assert again.spec == spec
    with pytest.raises(SourceError, match="9 samples here, but had 10"):
        load_dataset(spec, samples=letters[1:])


def test_no_code_is_imported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master's words never choose what a worker imports."""
    (tmp_path / "made_up_rows.py").write_text("def make():\n    return [value * value for value in range(20)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = open_dataset("made_up_rows:make", ShardSettings(shard_size=6)).spec
    assert (spec.kind, spec.location, spec.units) == ("range", "made_up_rows:make", 20)
    sys.modules.pop("made_up_rows")
    with pytest.raises(SettingsError, match="samples='made_up_rows:make'"):
        load_dataset(spec)
    assert "made_up_rows" not in sys.modules
    (tmp_path / "factory.py").write_text("make = lambda: {1: 2}\n")
    with pytest.raises(SettingsError, match="expected a sequence"):
        open_dataset(f"{tmp_path}/factory.py:make")
    assert read_all(load_dataset(spec, samples="made_up_rows:make")) == [value * value for value in range(20)]
    assert len(read_all(open_dataset(f"{tmp_path}/made_up_rows.py:make"))) == 20


@pytest.mark.parametrize("opening", [open_dataset, lambda name: open_data(name, ["x"])])
def test_file_finds_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_rows.py").write_text("def make():\n    return [1, 2, 3]\n")
    (tmp_path / "importing_rows.py").write_text("from neighbour_rows import make\n")
    opened = opening(f"{tmp_path}/importing_rows.py:make")
    for name in ("neighbour_rows", "importing_rows"):
        sys.modules.pop(name)
    assert opened.describe().endswith("(3 samples)") if opening is open_dataset else opened.rows == 3


def test_damaged_index() -> None:
    """Whatever byte differs, wherever it is cut off: an error of EDL's, and nothing else."""
    spec = open_dataset("range:8", ShardSettings(shuffle_within=True)).spec
    index = spec.index
    for at in range(len(index)):
        for damaged in (index[:at] + bytes([index[at] ^ 1]) + index[at + 1 :], index[: max(1, at)]):
            spec.index = damaged
            with pytest.raises(ProtocolError, match="the index of the data set cannot be read"):
                load_dataset(spec)
