"""Sets of files: stable ids, and files that are no more what they were."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from edl.errors import ProtocolError, SettingsError, SourceError
from edl.master.datasets import ShardSettings, load_dataset, open_dataset
from edl.master.datasets.file_sets import describe_files
from edl.master.datasets.index import pack_part
from edl.master.datasets.storage import FileStat, open_storage
from edl.protocol.master import DatasetSpec
from tests.fast.master.datasets.leases import Lease, leases, read_all


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b/2.jpg", "b/1.jpg", "a.jpg", "c.png", ".hidden.jpg", "b/100%25.jpg", "b/ü\n.jpg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path


IDS = ["a.jpg", "b/1.jpg", "b/100%25.jpg", "b/2.jpg", "b/ü\n.jpg"]


@pytest.mark.parametrize("pattern", ["{}/**/*.jpg", "files:{}/**/*.jpg"])
def test_files_by_path(folder: Path, pattern: str) -> None:
    location = "files:" + pattern.format(folder).removeprefix("files:")
    dataset = load_dataset(open_dataset(location, ShardSettings(shard_size=2)).spec)
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
    with pytest.raises(SourceError, match="written again"):
        read_all(dataset)
    memory.rm("/edl-files", recursive=True)
    with pytest.raises(SourceError, match="there is no such file"):
        read_all(dataset)
    with pytest.raises(SettingsError, match="no file matches"):
        open_dataset("files:memory://edl-files/*.bin")


def test_changed_files_are_an_error(folder: Path) -> None:
    dataset = open_dataset(f"files:{folder}/*.jpg")
    lenient = open_dataset(f"files:{folder}/*.jpg", check="size")
    (sample,) = lenient.read(Lease(0, 0, 0, 1))
    os.utime(folder / "a.jpg", (1, 1))
    with pytest.raises(SourceError, match=r"a\.jpg' is not as it was indexed: it was written again.*check='size'"):
        read_all(dataset)
    assert len(read_all(lenient)) == 1
    (folder / "a.jpg").write_bytes(b"larger than before")
    with pytest.raises(SettingsError, match="check='md5'"):
        open_dataset(f"files:{folder}", check="md5")
    for changed in (dataset, lenient):
        with pytest.raises(SourceError, match=r"a\.jpg' is not as it was indexed: it has 18 bytes, and had 5"):
            read_all(changed)
    with pytest.raises(SourceError, match="not the 5 bytes"):
        sample.read_bytes()


@pytest.mark.parametrize("name", ["../b/1.jpg", "x/../../b/1.jpg", ".."])
@pytest.mark.parametrize("kind", ["files", "follow"])
def test_names_stay_in_their_folder(folder: Path, kind: str, name: str) -> None:
    """An index comes over the network, and its names are opened."""
    root = f"{folder}/b/"
    head = {"of": "files", "root": root, "check": "size"}
    part = pack_part(describe_files(head, [name], [FileStat(8, "")]))
    spec = DatasetSpec(kind=kind, location=root, shard_size=1, units=1, index=part)
    with pytest.raises(ProtocolError, match="which is not at"):
        load_dataset(spec)


def test_chained_urls_are_refused() -> None:
    for location in ("zip://x::file:///data.zip", "filecache://s3://b/k::memory://x"):
        with pytest.raises(SettingsError, match="is a chain of URLs"):
            open_storage(location)
