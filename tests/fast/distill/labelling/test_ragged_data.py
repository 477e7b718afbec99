"""Data sets of sequences: JSON lines, list columns of Parquet, arrays with offsets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill.datasets import open_data
from edl.distill.datasets.kinds import Batch
from edl.distill.datasets.ragged import RaggedData
from edl.distill.labelling import DataFingerprint
from edl.errors import SettingsError

TEXTS = [[5, 3, 9], [7], [], [2, 2, 8, 1]]
NAMES = ["a", "b\0", "", "ü\u2028"]


def nobody(ids: Any) -> Any:
    return np.zeros(len(ids), np.bool_)


def texts_in(data: Any) -> dict[Any, list[int]]:
    batches: list[Batch] = list(data.batches(2, nobody))
    return {name: ids.tolist() for names, fields in batches for name, ids in zip(names, fields["ids"], strict=True)}


def write_jsonl(path: Path, newline: str = "\n", head: bytes = b"", texts: Any = TEXTS) -> Path:
    lines = [
        json.dumps({"id": name, "input_ids": text}, ensure_ascii=False) for name, text in zip(NAMES, texts, strict=True)
    ]
    path.write_bytes(head + newline.join([*lines[:2], "", *lines[2:]]).encode())
    return path


@pytest.mark.parametrize(("newline", "head"), [("\n", b""), ("\r\n", b"\xef\xbb\xbf")])
def test_json_lines(tmp_path: Path, newline: str, head: bytes) -> None:
    """Also as Windows writes them; blank lines are none, and U+2028 in a string ends no line."""
    path = write_jsonl(tmp_path / "t.jsonl", newline, head)
    data = open_data(str(path), ["ids=input_ids"], "id")
    assert isinstance(data, RaggedData)
    assert (data.rows, data.empty) == (4, 1)
    assert texts_in(data) == {"a": [5, 3, 9], "b\0": [7], "ü\u2028": [2, 2, 8, 1]}
    assert texts_in(open_data(str(path), ["ids=input_ids"])) == {0: [5, 3, 9], 1: [7], 3: [2, 2, 8, 1]}
    (_, fields), *_ = data.batches(9, nobody)
    assert fields["ids"][0].dtype == np.int32


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1, 2]", "line 2: it has a list, and must have an object"),
        ('{"input_ids": [1]', "line 2: Expecting"),
        ('{"ids": [1]}', "line 2: it has no 'input_ids', only 'ids'"),
        ('{"input_ids": "a text"}', "line 2: 'input_ids' is no list of numbers"),
        ('{"input_ids": [[1], [2, 3]]}', "line 2: 'input_ids' has lists of different lengths"),
        ('{"input_ids": [1, null]}', "line 2: 'input_ids' is no list of numbers"),
        ('{"input_ids": [[1, 2]]}', "'ids' has values of different shapes or types"),
        ("\udcff", "line 2: "),
    ],
)
def test_odd_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"input_ids": [1, 2]}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(SettingsError, match=r"t\.jsonl") as caught:
        open_data(str(path), ["ids=input_ids"])
    assert words in str(caught.value)


def test_odd_ids_and_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for found, words in ((None, "id None"), (True, "id True"), ([1], r"id \[1\]"), (1.0, "id 1.0")):
        path.write_text(json.dumps({"id": found, "x": [1]}))
        with pytest.raises(SettingsError, match=words):
            open_data(str(path), ["x"], "id")
    path.write_text('{"id": 1, "x": [1]}\n{"id": 1, "x": [2]}')
    with pytest.raises(SettingsError, match="some ids are there twice"):
        open_data(str(path), ["x"], "id")
    path.write_text('{"id": 1, "x": [1], "y": [1, 2]}')
    with pytest.raises(SettingsError, match="sequence 0 has 2 values of 'y', and 1 of 'x'"):
        open_data(str(path), ["x", "y"])
    path.write_text("\n")
    with pytest.raises(SettingsError, match="has no sequences"):
        open_data(str(path), ["x"])
    with pytest.raises(SettingsError, match="No such file"):
        open_data(str(tmp_path / "no.jsonl"), ["x"])
    with pytest.raises(SettingsError, match="name the array of where each begins"):
        open_data(str(tmp_path / "no.npz"), ["x"], sequences=True)
    with pytest.raises(SettingsError, match=r"belongs to sequences in an \.npz file"):
        open_data(str(path), ["x"], offsets="begins")


def test_parquet_lists(tmp_path: Path) -> None:
    """Lists, large lists, and null, in several row groups; the same checksum as of the same tokens elsewhere."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    for kind in (pyarrow.list_(pyarrow.int64()), pyarrow.large_list(pyarrow.int32())):
        lists = pyarrow.array([[5, 3, 9], [7], None, [2, 2, 8, 1]], kind)
        table = pyarrow.table({"input_ids": lists, "id": NAMES, "one": [[1]] * 4, "text": NAMES})
        parquet.write_table(table, path, row_group_size=3)
        data: Any = open_data(str(path), ["ids=input_ids"], "id")
        assert (data.rows, data.empty) == (4, 1)
        assert texts_in(data) == {"a": [5, 3, 9], "b\0": [7], "ü\u2028": [2, 2, 8, 1]}
        lines: Any = open_data(str(write_jsonl(tmp_path / "t.jsonl")), ["ids=input_ids"], "id")
        assert DataFingerprint.of(lines) == DataFingerprint.of(data)
    for key, words in (("text", "must be a list of numbers"), ("no", "has no column 'no', only input_ids, id")):
        with pytest.raises(SettingsError, match=words):
            open_data(str(path), [key])
    with pytest.raises(SettingsError, match="sequence 0 has 1 values of 'one', and 3 of 'input_ids'"):
        open_data(str(path), ["input_ids", "one"])
    parquet.write_table(pyarrow.table({"x": pyarrow.array([[1, None]])}), path)
    with pytest.raises(SettingsError, match="has null in it, which is no token"):
        open_data(str(path), ["x"])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SettingsError, match="cannot be read"):
        open_data(str(path), ["x"])


def test_arrays_with_offsets(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    tokens = np.array([5, 3, 9, 7, 2, 2, 8, 1])
    np.savez(path, tokens=tokens, begins=[0, 3, 4, 4, 8], name=["a", "b", "c", "d"])
    data: Any = open_data(str(path), ["ids=tokens"], "name", offsets="begins")
    assert texts_in(data) == {"a": [5, 3, 9], "b": [7], "d": [2, 2, 8, 1]}
    for begins in ([0, 3, 7], [1, 3, 8], [0, 5, 3, 8], [0.0, 8.0], [[0, 8]], [8]):
        np.savez(path, tokens=tokens, begins=begins)
        with pytest.raises(SettingsError, match="offsets"):
            open_data(str(path), ["ids=tokens"], offsets="begins")
