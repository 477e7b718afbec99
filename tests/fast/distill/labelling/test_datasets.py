"""Data sets by name: array files, `Dataset`s, iterables, and only the rows that are wanted."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from edl.distill.datasets import LabelDataset, open_data
from edl.distill.datasets.kinds import SequenceData
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


def but(*known: Any) -> Callable[[Sequence[Any]], Any]:
    return lambda ids: np.array([sample in known for sample in ids], bool)


def rows(data: LabelDataset, *known: Any, batch: int = 4) -> tuple[list[Any], np.ndarray, list[int]]:  # type: ignore[type-arg]
    """All ids, all values of the only input, and the sizes of the batches."""
    (name,) = data.inputs
    batches = list(data.batches(batch, but(*known)))
    ids = [sample for ids, _ in batches for sample in ids]
    values = np.concatenate([inputs[name] for _, inputs in batches]) if batches else np.empty((0, 3))
    assert all(len(ids) == len(inputs[name]) for ids, inputs in batches)
    return ids, values, [len(ids) for ids, _ in batches]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_give_the_wanted_rows(tmp_path: Path, save: Any) -> None:
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


def test_npy_files_and_ids_beside_them(tmp_path: Path) -> None:
    x = np.arange(30, dtype=np.uint8).reshape(10, 3)
    np.save(tmp_path / "x.npy", np.asfortranarray(x))
    np.save(tmp_path / "ids.npy", np.arange(100, 110))
    data = open_data(str(tmp_path / "x.npy"), ["image"], ids=str(tmp_path / "ids.npy"))
    ids, values, _ = rows(data, 100)
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


def test_dataset_loads_for_missing_labels(module: str) -> None:
    """A dataset is loaded only where labels are missing."""
    data = open_data(f"{module}:dataset", ["image"])
    ids, values, sizes = rows(data, *range(7))
    assert ids == [7, 8, 9]
    assert values[:, 0].tolist() == [7, 8, 9]
    assert sizes == [3]
    assert sys.modules["samples_of_mine"].loaded == [7, 8, 9]
    assert data.rows == 10


def test_workers_load_a_dataset_in_order(module: str) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    data = open_data(f"{module}:Numbers", ["image"], workers=2)
    ids, values, sizes = rows(data, 2)
    assert ids == [0, 1, *range(3, 10)]
    assert values[:, 0].tolist() == ids
    assert sizes == [4, 4, 1]
    assert sys.modules["samples_of_mine"].loaded == []


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
    ("no.such.module:x", ["x"], None, 0, "there is no module 'no'"),
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
        (["x"], "twice", "there twice"),
        (["x"], "y", r"expected one integer or string for 3 rows"),
        (["x"], "f", "float64"),
        (["s"], None, "arrays without rows: s"),
    ]:
        with pytest.raises(SettingsError, match=words):
            open_data(str(path), inputs, ids)
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
        ("arrays", ["x", "y"], None, "it has no parts"),
        ("tuples", ["x"], "0", "sample 0: its id is array"),
        ("repeated", ["x"], "1", "sample 10: a sample before it has the id 0 too"),
    ]:
        with pytest.raises(SourceError, match=words):
            list(open_data(f"{module}:{name}", inputs, ids).batches(4, but()))


def test_fingerprint_tells_data_apart(tmp_path: Path, module: str) -> None:
    """The same rows have the same fingerprint; another length, content, id or dtype another one."""
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
    """Rows that are not the same when loaded twice say nothing; rows that cannot be loaded are like one another."""
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
    broken = DataFingerprint.of(SequenceData(Broken(), fields))
    assert broken.rows_checksum
    assert broken.inputs == ("x",)
