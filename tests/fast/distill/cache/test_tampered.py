"""Any bytes, and anything else, in a cache's folder: it is left out with a word, and nothing else happens."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edl.distill.cache import SoftLabelCache, load_labels
from edl.distill.cache.segment import BadSegmentError, FileHandles, Segment
from edl.errors import SettingsError
from tests.fast.distill.cache.cached_rows import KEY, put, rows, segments

WAIT_S = 30.0
NAME = "00000000000000000001-1-aa.safetensors"


def file_of(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


def whole(**changes: Any) -> dict[str, Any]:
    """The header of a file of format 1, which has no checksums, over 64 bytes: two ids and two rows of 12 floats."""
    metadata = {"format": "edl-soft-labels/1", "namespace": KEY.folder, "top_k": "{}"}
    header = {
        "__metadata__": metadata,
        "sample_ids": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
        "logits": {"dtype": "F32", "shape": [2, 6], "data_offsets": [16, 64]},
    }
    for name, change in changes.items():
        if name in metadata:
            metadata[name] = change
        else:
            header[name] = change  # type: ignore[assignment]
    return header


def logits(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 6], "data_offsets": [16, 64], **changes}


DATA = np.array([1, 2], "<i8").tobytes() + np.repeat(np.array([1, 2], "<f4"), 6).tobytes()
BAD_HEADERS: dict[str, Any] = {
    "nested": nested(100_000),
    "nested lists": b"[" * 100_000,
    "a huge number": b'{"a": ' + b"9" * 10_000 + b"}",
    "no UTF-8": b"\xff\xfe{}",
    "a name twice": b'{"a": 1, "a": 2}',
    "nested top_k": whole(top_k="[" * 100_000),
    "top_k of nothing": whole(top_k='{"y": [1.0, 10]}'),
    "top_k of floats": whole(top_k='{"logits": [1.0, 10]}'),
    "classes that are none": whole(top_k='{"logits": [1.0, "many"]}'),
    "metadata are a list": whole(__metadata__=[1]),
    "a huge shape": whole(logits=logits(shape=[2, 2**62])),
    "shapes that overflow": whole(logits=logits(shape=[2, 2**63, 2**63, 0])),
    "a negative shape": whole(logits=logits(shape=[2, -6])),
    "a shape of floats": whole(logits=logits(shape=[2.0, 6.0])),
    "a shape of text": whole(logits=logits(shape=["2", "6"])),
    "a shape of true": whole(logits=logits(shape=[2, 12, True], dtype="F16")),
    "100 axes": whole(logits=logits(shape=[2, 6, *[1] * 100])),
    "rows of nothing": whole(logits=logits(shape=[2, 0], data_offsets=[16, 16])),
    "places that overlap": whole(logits=logits(data_offsets=[0, 48])),
    "a hole": whole(logits=logits(shape=[2, 5], data_offsets=[24, 64])),
    "places backwards": whole(logits=logits(data_offsets=[64, 16])),
    "places of floats": whole(logits=logits(data_offsets=[16.0, 64.0])),
    "places beyond": whole(logits=logits(shape=[2, 60], data_offsets=[16, 496])),
    "other rows": whole(logits=logits(shape=[3, 4])),
    "no rows axis": whole(logits=logits(shape=[])),
    "no such type": whole(logits=logits(dtype="F8_E4M3")),
    "a type of lists": whole(logits=logits(dtype=[])),
    "ids of floats": whole(sample_ids={"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}),
    "no columns": {name: entry for name, entry in whole().items() if name != "logits"},
    "ids without end": {
        **whole(),
        "sample_ids": {"dtype": "I64", "shape": [2**40], "data_offsets": [0, 2**43]},
    },
}


def found(path: Path, wanted: Any) -> list[bool]:
    with SoftLabelCache(0, path) as cache:
        return [bool(there) for there in cache.view(KEY).get(wanted).mask]


def in_time(function: Callable[[], Any]) -> Any:
    """What it returns, if it does so in time."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as exc:  # noqa: BLE001 - looked at below
            results.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it hangs"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def test_unchanged_header_is_good(tmp_path: Path) -> None:
    (tmp_path / KEY.folder).mkdir()
    (tmp_path / KEY.folder / NAME).write_bytes(file_of(json.dumps(whole()).encode(), DATA))
    assert found(tmp_path, [1, 2, 3]) == [True, True, False]


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_header_that_makes_no_sense(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    header = BAD_HEADERS[name]
    put(tmp_path, [7])
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / KEY.folder / NAME).write_bytes(file_of(text, DATA))
    assert found(tmp_path, [1, 2, 7]) == [False, False, True]
    (record,) = caplog.records
    assert NAME in record.getMessage()
    assert len(record.getMessage()) < 1000, "its bytes do not fill the log"
    load_labels(tmp_path)


def test_sparse_file_larger_than_memory(tmp_path: Path) -> None:
    (tmp_path / KEY.folder).mkdir()
    header = whole(
        sample_ids={"dtype": "I64", "shape": [2**36], "data_offsets": [0, 2**39]},
        logits={"dtype": "F32", "shape": [2**36, 1], "data_offsets": [2**39, 2**39 + 2**38]},
    )
    text = json.dumps(header).encode()
    file = tmp_path / KEY.folder / NAME
    file.write_bytes(file_of(text))
    os.truncate(file, 8 + len(text) + 2**39 + 2**38)
    assert found(tmp_path, [0]) == [False]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
PLACES = [("logits", "shape"), ("logits", "dtype"), ("logits", "data_offsets"), ("sample_ids", "shape")]
PLACES += [("sample_ids", "data_offsets"), ("__metadata__", "top_k"), ("__metadata__", "format"), ("logits", "")]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(place=st.sampled_from(PLACES), value=JSON | st.lists(st.integers(-3, 70), max_size=3), cut=st.integers(0, 64))
def test_headers_with_anything_in_them(tmp_path: Path, place: tuple[str, str], value: Any, cut: int) -> None:
    header = whole()
    if place[1]:
        header[place[0]][place[1]] = value
    else:
        header[place[0]] = value
    file = tmp_path / NAME
    file.write_bytes(file_of(json.dumps(header).encode(), DATA[: 64 - cut] if cut % 5 == 0 else DATA))
    handles = FileHandles()
    with contextlib.suppress(BadSegmentError):
        segment = Segment.open(file, KEY.folder, handles)
        records = segment.read(handles, 0, len(segment.ids))
        segment.layout.restore(segment.layout.unpack(b"".join(filter(None, records)), len(records)))


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.binary(max_size=200) | st.builds(file_of, st.binary(max_size=100), st.binary(max_size=100)))
def test_any_bytes_are_no_label(tmp_path: Path, data: bytes) -> None:
    place = tmp_path / KEY.folder
    place.mkdir(exist_ok=True)
    (place / NAME).write_bytes(data)
    (place / "key.json").write_bytes(data)
    assert found(tmp_path, [0, 1]) == [False, False]
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.keys() == []
    with pytest.raises(SettingsError):
        load_labels(tmp_path)


@pytest.mark.parametrize("name", [NAME, "key.json"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "dangling", "device", "socket"])
def test_what_is_no_file_hangs_nobody(tmp_path: Path, name: str, kind: str) -> None:
    put(tmp_path, [7])
    path = tmp_path / KEY.folder / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        import socket

        short = Path(os.path.relpath(path))  # a socket's path has 107 bytes at most
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(min(str(path), str(short), key=len)))
    else:
        path.symlink_to({"loop": path, "dangling": "nowhere", "device": "/dev/zero"}[kind])
    assert in_time(lambda: found(tmp_path, [1, 7])) == [False, True]
    with contextlib.suppress(SettingsError):
        in_time(lambda: load_labels(tmp_path))
    with SoftLabelCache(0, tmp_path) as cache:
        in_time(cache.keys)
        in_time(cache.stats)


def test_a_damaged_key_is_written_anew(tmp_path: Path) -> None:
    put(tmp_path, [7])
    path = tmp_path / KEY.folder / "key.json"
    for damage in (b"", b"{", b"[" * 100_000):
        path.write_bytes(damage)
        put(tmp_path, [8])
        assert load_labels(tmp_path).ids == (7, 8)


def test_a_copy_on_another_machine_is_read(tmp_path: Path) -> None:
    """As rsync leaves it in the middle: files cut short, its own temporary ones, other times."""
    put(tmp_path / "a", range(10))
    put(tmp_path / "a", range(10, 20))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first, second = segments(tmp_path / "b")
    data = second.read_bytes()
    second.rename(second.with_name(f".{second.name}.x7Ab"))
    assert found(tmp_path / "b", [0, 10]) == [True, False]
    second.write_bytes(data[: len(data) // 2])
    assert found(tmp_path / "b", [0, 10]) == [True, False]
    second.write_bytes(data)
    os.utime(second, (0, 0))
    os.utime(first, (2**33, 2**33))
    assert found(tmp_path / "b", [0, 10]) == [True, True]
    assert (load_labels(tmp_path / "b").rows(range(20))["logits"] == rows(range(20))["logits"]).all()
