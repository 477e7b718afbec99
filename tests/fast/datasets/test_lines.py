"""Text by lines: every line once, every byte read at most once, and nothing wrong in silence."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edl.datasets import ShardSettings, files, load_dataset, open_dataset
from edl.datasets import text as text_module
from edl.errors import SettingsError, SourceError
from edl.protocol.master import DatasetSpec
from tests.fast.datasets.leases import Lease, read_all

TEXTS = st.lists(
    st.one_of(st.sampled_from([b"\n", b"\r\n", b"\r", b"\x00", b"\xef\xbb\xbf", b"\xff", b'"']), st.binary(max_size=6))
).map(b"".join)


class CountingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system in memory that counts how often each byte of a file is read."""

    protocol = "counting"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    counts: Counter[tuple[str, int]] = Counter()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("counting:/"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        self.counts.update((self._strip_protocol(path), (start or 0) + at) for at in range(len(data)))
        return data


@pytest.fixture(scope="module")
def counting() -> type[CountingFileSystem]:
    fsspec.register_implementation("counting", CountingFileSystem, clobber=True)
    return CountingFileSystem


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks end within lines, and shards are larger than what is read at once."""
    monkeypatch.setattr(files, "_BLOCK_NBYTES", 5)
    monkeypatch.setattr(text_module, "_MOST_SEGMENT", 16)


def written(folder: Path, data: bytes, name: str = "text") -> str:
    path = folder / name
    path.write_bytes(data)
    return f"lines:{path}"


def lines_of(text: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in text.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


@settings(max_examples=60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4).filter(any), shard_size=st.integers(1, 9), small=st.booleans())
def test_every_byte_once(counting: type[CountingFileSystem], texts: list[bytes], shard_size: int, small: bool) -> None:
    """For any bytes, the shards' samples one after another are the lines of the files."""
    assume(not any(text.startswith(tuple(text_module._COMPRESSED)) for text in texts))
    counting.store.clear()
    memory = counting()
    for number, text in enumerate(texts):
        memory.pipe_file(f"/folder/{number}.txt", text)
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(files, "_BLOCK_NBYTES", 5)
            patch.setattr(text_module, "_MOST_SEGMENT", 16)
        sharded = ShardSettings(shard_size=shard_size)
        spec = open_dataset("lines:counting://folder/*.txt", sharded, keep_ends=True).spec
        dataset = load_dataset(DatasetSpec.FromString(spec.SerializeToString()))
        counting.counts.clear()
        samples = read_all(dataset)
        most = max(counting.counts.values())
    assert samples == [line for text in texts for line in lines_of(text)]
    assert most == 1, "a byte was read twice"
    assert dataset.units == len(samples)
    plain = [line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line for line in samples]
    assert read_all(open_dataset("lines:counting://folder/*.txt", sharded)) == plain


def test_text_is_decoded_where_asked(tmp_path: Path) -> None:
    location = written(tmp_path, b"\xef\xbb\xbfgr\xc3\xbc\xc3\x9fe\r\n\xef\xbb\xbfb\x0bc\x00\xe2\x80\xa8d\n")
    assert read_all(open_dataset(location))[0] == b"\xef\xbb\xbfgr\xc3\xbc\xc3\x9fe"
    assert read_all(open_dataset(location, encoding="utf-8")) == ["\ufeffgrüße", "\ufeffb\x0bc\x00\u2028d"]
    for shard_size in (1, 2):
        dataset = open_dataset(location, ShardSettings(shard_size=shard_size), encoding="utf-8-sig")
        assert read_all(dataset) == ["grüße", "\ufeffb\x0bc\x00\u2028d"], "a mark elsewhere is data"
    location = written(tmp_path, b"fine\nnot \xff fine\n")
    with pytest.raises(SourceError, match=r"text.*not \\xff fine.*errors='replace'"):
        read_all(open_dataset(location, encoding="utf-8"))
    assert read_all(open_dataset(location, encoding="utf-8", errors="replace"))[1] == "not \ufffd fine"


@pytest.mark.parametrize("encoding", ["utf-16", "no-such", 5, "cp037"])
def test_useless_encodings_are_refused(tmp_path: Path, encoding: object) -> None:
    with pytest.raises(SettingsError, match="encoding="):
        open_dataset(written(tmp_path, b"a\n"), encoding=encoding)
    with pytest.raises(SettingsError, match="errors='shrug'"):
        open_dataset(written(tmp_path, b"a\n"), encoding="utf-8", errors="shrug")


# What has changed since it was indexed.


@pytest.mark.parametrize("changed", [b"a\nb\nc\n", b"a\nb\nc\nd\ne\n", b"", b"a\nb\nX\nd\n", b"a\nbbc\nd\n"])
@pytest.mark.parametrize("small", [False, True])
def test_changed_file_is_an_error(tmp_path: Path, changed: bytes, small: bool, request: pytest.FixtureRequest) -> None:
    if small:
        request.getfixturevalue("small_blocks")
    dataset = open_dataset(written(tmp_path, b"a\nb\nc\nd\n"), ShardSettings(shard_size=4))
    written(tmp_path, changed)
    with pytest.raises(SourceError, match=r"text.*(has changed|truncated).*create the data set again"):
        list(dataset.read(Lease(0, 0, 0, 4)))
    dataset = open_dataset(written(tmp_path, b"a\nb\nc\nd\n"), ShardSettings(shard_size=2))
    written(tmp_path, b"a\nb\nX\nd\n")
    os.utime(tmp_path / "text", (1, 1))
    assert list(dataset.read(Lease(0, 0, 0, 2))) == [b"a", b"b"], "only what is different is refused"
    with pytest.raises(SourceError, match="changed since it was indexed: its bytes 4 to 8 differ"):
        list(dataset.read(Lease(0, 1, 2, 4)))


def test_file_that_grows_is_not_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = written(tmp_path, b"a\n" * 40)
    real = text_module.read_blocks

    def grow(path: str, start: int, stop: int) -> Any:
        with (tmp_path / "text").open("ab") as file:
            file.write(b"x")
        return real(path, start, stop)

    monkeypatch.setattr(text_module, "read_blocks", grow)
    with pytest.raises(SourceError, match=r"changed while it was indexed.*'follow:"):
        open_dataset(location)


# What is not there, or is something else.


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot find .*nothing.*at the same path"):
        open_dataset(f"lines:{tmp_path}/nothing")
    with pytest.raises(SettingsError, match="no file matches"):
        open_dataset(f"lines:{tmp_path}/*.txt")
    with pytest.raises(SettingsError, match="nosuchscheme"):
        open_dataset("lines:nosuchscheme://x/y")
    dataset = open_dataset(written(tmp_path, b"a\n"))
    (tmp_path / "text").unlink()
    with pytest.raises(SourceError, match=r"text' cannot be read on this machine: No such file"):
        read_all(dataset)
    (tmp_path / "text").mkdir()
    with pytest.raises(SourceError, match="is a folder, not a file"):
        read_all(dataset)
    (tmp_path / "b.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(SourceError, match=r"b\.txt.*No such file"):
        open_dataset(f"lines:{tmp_path}/*.txt")


def test_folder_becomes_its_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    written(tmp_path, b"1\n", "b.txt")
    written(tmp_path / "sub", b"2\n", "a.txt")
    written(tmp_path, b"3\n", ".hidden")
    (tmp_path / "sub" / "up").symlink_to(tmp_path)  # links are followed, and a link back up ends
    assert read_all(open_dataset(f"lines:{tmp_path}")) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("head", "name"), [(b"\x1f\x8b\x08\x00", "gzip"), (b"PK\x03\x04", "zip"), (b"\x28\xb5\x2f\xfd", "zstd")]
)
def test_compressed_text_is_refused(tmp_path: Path, head: bytes, name: str) -> None:
    with pytest.raises(SettingsError, match=f"compressed \\({name}\\).*Unpack"):
        open_dataset(written(tmp_path, head + b"\nabc\n"))
