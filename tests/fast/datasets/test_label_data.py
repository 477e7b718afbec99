"""Data sets by name: array files, `Dataset`s, iterables, and only the rows that are wanted; texts in files."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from edl.datasets import LabelDataset, open_data
from edl.datasets.rows import Batch, RaggedData, SequenceData
from edl.distill.labelling import DataFingerprint
from edl.errors import SettingsError, SourceError

SAMPLES = """
import numpy as np
try:
    import torch.utils.data as data
    Base = data.Dataset
except ImportError:
    Base = object

loaded = []

class Numbers(Base):
    def __init__(self, rows=10):
        self.rows = rows
    def __len__(self):
        return self.rows
    def __getitem__(self, at):
        if not 0 <= at < self.rows:
            raise IndexError(at)
        loaded.append(at)
        return np.full(3, at, np.float32), {"label": at}

def dataset():
    return Numbers()

def tuples():
    for at in range(10):
        yield np.full(3, at, np.float32), f"id-{at}"

def mappings():
    return [{"pixels": np.full(3, at, np.float32), "name": f"id-{at}", "n": np.int64(at)} for at in range(10)]

def repeated():
    for at in range(50):
        yield np.full(3, at, np.float32), at % 10

def arrays():
    return [np.full(3, at, np.float32) for at in range(10)]

def ragged():
    return [np.zeros(3), np.zeros(3), np.zeros(4)]

def loader():
    return data.DataLoader(Numbers(), batch_size=2)

class Stream(Base if Base is object else data.IterableDataset):
    def __iter__(self):
        return iter(arrays())

ready = arrays()
booleans = [{"x": [1, True]}]
number = 5
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "samples_of_mine.py"
    path.write_text(SAMPLES)
    return str(path)


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("samples_of_mine", "edl_data_samples_of_mine"):
        sys.modules.pop(name, None)


def but(*known: Any) -> Callable[[Sequence[Any], Any], Any]:
    return lambda ids, inputs: np.array([sample in known for sample in ids], bool)


def rows(data: LabelDataset, *known: Any, batch: int = 4) -> tuple[list[Any], np.ndarray, list[int]]:  # type: ignore[type-arg]
    """All ids, all values of the only input, and the sizes of the batches."""
    (name,) = data.inputs
    batches = list(data.batches(batch, but(*known)))
    ids = [sample for ids, _ in batches for sample in ids]
    values = np.concatenate([inputs[name] for _, inputs in batches]) if batches else np.empty((0, 3))
    assert all(len(ids) == len(inputs[name]) for ids, inputs in batches)
    return ids, values, [len(ids) for ids, _ in batches]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_array_files_give_the_wanted_rows(tmp_path: Path, save: Any) -> None:
    x = np.arange(30, dtype=np.float32).reshape(10, 3)
    save(tmp_path / "d.npz", x=x, other=np.zeros(4), key=np.array([f"k{n}" for n in range(10)]))
    data = open_data(str(tmp_path / "d.npz"), ["image=x"])
    assert (data.inputs, data.rows) == (("image",), 10)
    ids, values, sizes = rows(data, 0, 5, 6)
    assert ids == [1, 2, 3, 4, 7, 8, 9]
    np.testing.assert_array_equal(values, x[ids])
    assert sizes == [4, 3]
    by_key = open_data(str(tmp_path / "d.npz"), ["x"], ids="key")
    assert rows(by_key, "k3")[0] == ["k0", "k1", "k2", *(f"k{n}" for n in range(4, 10))]
    assert rows(by_key, *(f"k{n}" for n in range(10)))[0] == []
    np.save(tmp_path / "x.npy", np.asfortranarray(x))
    np.save(tmp_path / "ids.npy", np.arange(100, 110))
    ids, values, _ = rows(open_data(str(tmp_path / "x.npy"), ["image"], ids=str(tmp_path / "ids.npy")), 100)
    assert ids == list(range(101, 110))
    np.testing.assert_array_equal(values, x[1:])


@pytest.mark.parametrize("suffix", ["npz", "npy"])
def test_large_files_are_mapped_not_read(tmp_path: Path, suffix: str) -> None:
    big = np.zeros((1000, 10_000), np.float32)  # 40 MB
    path = tmp_path / f"big.{suffix}"
    np.save(path, big) if suffix == "npy" else np.savez(path, x=big)
    del big
    tracemalloc.start()
    data = open_data(str(path), ["x"])
    next(iter(data.batches(8, but())))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20


@pytest.mark.parametrize("suffix", ["npz", "npy"])
def test_file_cut_while_it_is_read(tmp_path: Path, suffix: str) -> None:
    """The system would end the process with SIGBUS, without a word."""
    path = tmp_path / f"d.{suffix}"
    x = np.zeros((1000, 100))
    np.save(path, x) if suffix == "npy" else np.savez(path, x=x)
    np.savez(tmp_path / "t.npz", x=x, begins=[0, 1000])
    rows, texts = open_data(str(path), ["x"]), open_data(str(tmp_path / "t.npz"), ["x"], offsets="begins")
    for opened, file in ((rows, path), (texts, tmp_path / "t.npz")):
        os.truncate(file, 10_000)
        with pytest.raises(SourceError, match=rf"{file.name}' is missing, or shorter than when it was opened"):
            list(opened.batches(8, but()))


@pytest.mark.parametrize("workers", [0, 2])
def test_dataset_loads_for_missing_labels(module: str, workers: int) -> None:
    if workers:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    data = open_data(f"{module}:Numbers", ["image"], workers=workers)
    ids, values, sizes = rows(data, 2)
    assert ids == [0, 1, *range(3, 10)]
    assert values[:, 0].tolist() == ids
    assert sizes == [4, 4, 1]
    assert sys.modules["samples_of_mine"].loaded == ([] if workers else ids)
    assert data.rows == 10


@pytest.mark.parametrize(
    ("name", "inputs", "ids", "expected"),
    [
        ("tuples", ["image"], "1", [f"id-{n}" for n in range(10)]),
        ("mappings", ["pixels"], "n", list(range(10))),
        ("ready", ["image"], None, list(range(10))),
        ("Stream", ["image"], None, list(range(10))),
        ("dataset", ["image=0"], None, list(range(10))),
    ],
)
def test_samples_may_be_of_three_kinds(
    module: str, name: str, inputs: list[str], ids: str | None, expected: list[Any]
) -> None:
    data = open_data(f"{module}:{name}", inputs, ids)
    for _ in range(2):  # a second pass starts again
        found, values, _ = rows(data)
        assert found == expected
        assert values[:, 0].tolist() == list(range(10))
    found, values, sizes = rows(data, *expected[1:8], batch=3)
    assert found == [expected[0], *expected[8:]]
    assert values[:, 0].tolist() == [0, 8, 9]
    assert sizes == [3]


def test_module_of_working_folder_is_found(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(module).parent)
    assert rows(open_data("samples_of_mine:arrays", ["image"]))[0] == list(range(10))


BAD: list[tuple[str, list[str], str | None, int, str]] = [
    ("nothing", ["x"], None, 0, "expected FILE.npz"),
    ("/no/such.npz", ["x"], None, 0, "No such file"),
    ("no.such.module:x", ["x"], None, 0, "no module named 'no'"),
    ("{}:missing", ["x"], None, 0, "has no 'missing'"),
    ("{}:number", ["x"], None, 0, "is a int"),
    ("{}:loader", ["x"], None, 0, "return the Dataset.*--workers"),
    ("{}:tuples", ["x"], None, 2, "--workers 2.*must be indexed"),
    ("{}:dataset", ["x"], None, -1, "--workers -1"),
    ("{}:dataset", ["=x"], None, 0, "--inputs '=x'"),
]


@pytest.mark.parametrize(("name", "inputs", "ids", "workers", "words"), BAD)
def test_what_is_no_data_set_is_named(
    module: str, name: str, inputs: list[str], ids: str | None, workers: int, words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        open_data(name.format(module), inputs, ids, workers)


def test_bad_arrays_are_named(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, x=np.zeros((3, 2)), y=np.zeros((4, 2)), twice=np.array([1, 1, 2]), f=np.zeros(3), s=np.float32(1))
    for inputs, ids, words in [
        (["z"], None, "no array 'z', only f, s, twice, x, y"),
        (["x", "y"], None, "different numbers of rows"),
        (["x"], "twice", "the id 1 appears twice"),
        (["x"], "y", r"expected one integer or string for 3 rows"),
        (["x"], "f", "float64"),
        (["s"], None, "arrays without rows: s"),
    ]:
        with pytest.raises(SettingsError, match=words):
            open_data(str(path), inputs, ids)
    renamed = path.rename(tmp_path / "d.npy")
    with pytest.raises(SettingsError, match="rename it to"):
        open_data(str(renamed), ["x"], None)
    np.savez(path, x=np.array([{}, {}], object))
    with pytest.raises(SettingsError, match=r"cannot be read.*allow_pickle"):
        open_data(str(path), ["x"])
    path.write_bytes(b"PK nonsense")
    with pytest.raises(SettingsError, match=r"d\.npz.*cannot be read"):
        open_data(str(path), ["x"])
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))
    with pytest.raises(SettingsError, match="one array, for one input"):
        open_data(str(tmp_path / "x.npy"), ["a", "b"])


def test_bad_samples_are_named(module: str) -> None:
    for name, inputs, ids, words in [
        ("ragged", ["x"], None, r"sample 2: input 'x' has shape \[4\].*\[3\]"),
        ("tuples", ["x=pixels"], None, "sample 0 .*name a position, not 'pixels'"),
        ("mappings", ["x"], None, "sample 0 has no field for input 'x'.*KeyError"),
        ("arrays", ["x", "y"], None, ", without parts"),
        ("booleans", ["x"], None, r"sample 0, input 'x' mixes booleans with other values: \[1, True\]"),
        ("tuples", ["x"], "0", "sample 0: its id is array"),
        ("repeated", ["x"], "1", "sample 10: an earlier sample also has the id 0"),
    ]:
        with pytest.raises(SourceError, match=words):
            list(open_data(f"{module}:{name}", inputs, ids).batches(4, but()))


def test_fingerprint_tells_data_apart(tmp_path: Path, module: str) -> None:
    x = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    other = x.copy()
    other[701] += 1  # a row that is not looked at, which the file's own checksum shows

    def of(array: Any, save: Any = np.savez, **more: Any) -> DataFingerprint:
        save(tmp_path / "d.npz", x=array, **more)
        return DataFingerprint.of(cast(Any, open_data(str(tmp_path / "d.npz"), ["x"], "ids" if more else None)))

    first = of(x)
    assert first == of(x, np.savez_compressed)
    assert (first.rows, first.inputs) == (1000, ("x float32[3]",))
    assert len({first, of(x[:999]), of(other), of(x + 1), of(x.astype(np.float64)), of(x, ids=np.arange(1, 1001))}) == 6
    assert of(other).rows_checksum == first.rows_checksum
    samples = DataFingerprint.of(cast(Any, open_data(f"{module}:dataset", ["image"])))
    assert samples == DataFingerprint.of(cast(Any, open_data(f"{module}:Numbers", ["image"])))
    assert samples.rows_checksum


def test_fingerprint_of_random_rows_is_empty() -> None:
    chance = np.random.default_rng(1)

    class Augmented:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, at: int) -> Any:
            return chance.random(3)

    class Broken(Augmented):
        def __getitem__(self, at: int) -> Any:
            raise OSError("no such file")

    fields = {"x": lambda sample: sample}
    assert DataFingerprint.of(SequenceData(Augmented(), fields)).rows_checksum == ""
    assert DataFingerprint.of(SequenceData(Broken(), fields)).rows_checksum


# Sequences: JSON lines, list columns of Parquet, arrays with offsets.

TEXTS = [[5, 3, 9], [7], [], [2, 2, 8, 1]]
NAMES = ["a", "b\0", "", "ü\u2028"]


def texts_in(data: Any) -> dict[Any, list[int]]:
    batches: list[Batch] = list(data.batches(2, but()))
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
    (_, fields), *_ = data.batches(9, but())
    assert fields["ids"][0].dtype == np.int32


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1, 2]", "line 2: expected an object such as"),
        ('{"input_ids": [1]', "line 2: Expecting"),
        ('{"ids": [1]}', "line 2: it has no 'input_ids', only 'ids'"),
        ('{"input_ids": "a text"}', "line 2: 'input_ids' is not a list of numbers"),
        ('{"input_ids": [[1], [2, 3]]}', "line 2: 'input_ids' contains lists of different lengths"),
        ('{"input_ids": [1, null]}', "line 2: 'input_ids' is not a list of numbers: it contains None"),
        ('{"input_ids": [1, true]}', "line 2: 'input_ids' is not a list of numbers: it contains True"),
        ('{"input_ids": [true]}', "'ids' has values of different shapes or types: bool [], integers []"),
        ('{"input_ids": [[1, 2]]}', "'ids' has values of different shapes or types: integers [2], integers []"),
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
    with pytest.raises(SettingsError, match="the id 1 appears twice"):
        open_data(str(path), ["x"], "id")
    path.write_text('{"id": 1, "x": [1], "y": [1, 2]}')
    with pytest.raises(SettingsError, match=r"line 1: each token needs one value.*\{'x': 1, 'y': 2\}"):
        open_data(str(path), ["x", "y"])
    path.write_text("\n")
    with pytest.raises(SettingsError, match="has no sequences"):
        open_data(str(path), ["x"])
    with pytest.raises(SettingsError, match="No such file"):
        open_data(str(tmp_path / "no.jsonl"), ["x"])
    with pytest.raises(SettingsError, match="requires --offsets: name the array"):
        open_data(str(tmp_path / "no.npz"), ["x"], sequences=True)
    with pytest.raises(SettingsError, match=r"only for sequences in an \.npz file"):
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
    for key, words in (
        ("text", "row 1: 'text' is not a list of numbers"),
        ("no", "no column 'no', only input_ids"),
    ):
        with pytest.raises(SettingsError, match=words):
            open_data(str(path), [key])
    with pytest.raises(SettingsError, match=r"row 1: each token needs one value.*\{'input_ids': 3, 'one': 1\}"):
        open_data(str(path), ["input_ids", "one"])
    parquet.write_table(pyarrow.table({"x": pyarrow.array([[1, None]])}), path)
    with pytest.raises(SettingsError, match="row 1: 'x' is not a list of numbers"):
        open_data(str(path), ["x"])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SettingsError, match=r"t\.parquet.*footer"):
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
