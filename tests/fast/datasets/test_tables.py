"""Tables by rows: CSV as the csv module reads it, Parquet with no row group read twice, and changed files refused."""

from __future__ import annotations

import csv
import io
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.datasets import ShardSettings, files, load_dataset, open_dataset
from edl.datasets.parquet import ParquetDataset
from edl.errors import SettingsError, SourceError
from tests.fast.datasets.leases import Lease, leases, read_all


def written(folder: Path, text: str, name: str = "table.csv") -> str:
    (folder / name).write_bytes(text.encode())
    return f"csv:{folder / name}"


def test_several_files_have_a_header_each(tmp_path: Path) -> None:
    written(tmp_path, "\ufeffa,b\n1,2\n3,4", "1.csv")
    written(tmp_path, "a,b\n", "2.csv")
    written(tmp_path, "a,b\n5,6\n\n", "3.csv")
    for shard_size in (1, 2, 64):
        dataset = open_dataset(f"csv:{tmp_path}/*.csv", ShardSettings(shard_size=shard_size))
        assert [list(row.values()) for row in read_all(dataset)] == [["1", "2"], ["3", "4"], ["5", "6"]]
        assert list(read_all(dataset)[0]) == ["a", "b"], "the byte order mark is no part of a name"
    written(tmp_path, "b,a\n1,2\n", "4.csv")
    with pytest.raises(SettingsError, match=r"4\.csv.*separate data set"):
        open_dataset(f"csv:{tmp_path}/*.csv")


def test_columns_are_chosen(tmp_path: Path) -> None:
    location = written(tmp_path, "a;b;c\n1;2;3\n")
    assert read_all(open_dataset(location, delimiter=";", columns=["c", "a"])) == [{"c": "3", "a": "1"}]
    with pytest.raises(SettingsError, match="no column"):
        open_dataset(location, delimiter=";", columns=["d"])


def test_files_without_a_header(tmp_path: Path) -> None:
    location = written(tmp_path, "1|'2\n'\n3|4\n")
    options = {"delimiter": "|", "quotechar": "'", "header": False}
    assert read_all(open_dataset(location, **options)) == [["1", "2\n"], ["3", "4"]]
    assert read_all(open_dataset(location, **options, names=["x", "y"]))[1] == {"x": "3", "y": "4"}
    location = written(tmp_path, 'id\ttext\n1\t"open\n2\t"\n')
    rows = read_all(open_dataset(location, ShardSettings(shard_size=1), delimiter="\t", quotechar=None))
    assert [row["text"] for row in rows] == ['"open', '"']


@settings(max_examples=100)
@given(
    rows=st.lists(st.lists(st.text(st.sampled_from('a,"\n\ré'), max_size=5), min_size=1, max_size=3), max_size=6),
    shard_size=st.integers(1, 3),
    block=st.integers(3, 20),
    bare=st.text(st.sampled_from('a,"\n'), max_size=8),
)
def test_records_are_those_of_the_csv_module(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], shard_size: int, block: int, bare: str
) -> None:
    """Whatever is in the fields, and wherever blocks and shards end; other text gives the same, or is refused."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    location = written(tmp_path_factory.mktemp("csv"), text.getvalue() + bare)
    expected = [row for row in csv.reader(io.StringIO(text.getvalue() + bare, newline="")) if row]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_BLOCK_NBYTES", block)
        try:
            found = read_all(open_dataset(location, ShardSettings(shard_size=shard_size), header=False))
        except (SettingsError, SourceError):
            assert bare or not expected or "\r" in text.getvalue()
        else:
            assert found == expected


@pytest.mark.parametrize("row", ["1", "1,2,3"])
def test_ragged_record_is_an_error(tmp_path: Path, row: str) -> None:
    with pytest.raises(SettingsError, match=r"table\.csv.*cannot find the records"):
        open_dataset(written(tmp_path, 'a,b\n1,"open\n2,3\n'))
    for odd in ('5" disk,"', '"a" b,2', 'a""b,2'):
        with pytest.raises(SettingsError, match=r"table\.csv.*at b'a,b.*, only part of a field is in quotes"):
            open_dataset(written(tmp_path, f"a,b\n{odd}\n"))
    dataset = open_dataset(written(tmp_path, f"a,b\n1,2\n{row}\n"), ShardSettings(shard_size=1))
    assert list(dataset.read(Lease(0, 0, 0, 1))) == [{"a": "1", "b": "2"}]
    with pytest.raises(SourceError, match=r"table\.csv.*but there are 2 columns"):
        list(dataset.read(Lease(0, 1, 1, 2)))


@pytest.mark.parametrize("text", ["", "\n\n", "a,b\n", "a,a\n1,2\n"])
def test_table_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"has no rows|each needs its own name"):
        open_dataset(written(tmp_path, text))


@pytest.mark.parametrize(
    "options",
    [
        *[{"delimiter": value} for value in (",,", "\n", '"', "é", None)],
        *[{"quotechar": value} for value in ("", ",", 5)],
        *[{"encoding": None}, {"names": ["a"]}, {"columns": "a"}, {"sep": ";"}],
    ],
)
def test_useless_options_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        open_dataset(written(tmp_path, "a,b\n1,2\n"), **options)


def test_undecodable_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(b"a,b\n1,2\n3,\xff\n")
    dataset = open_dataset(f"csv:{tmp_path}/table.csv")
    with pytest.raises(SourceError, match=r"table\.csv.*not utf-8"):
        read_all(dataset)
    assert read_all(open_dataset(f"csv:{tmp_path}/table.csv", encoding="latin-1"))[1]["b"] == "ÿ"


def write(path: Path, first: int, rows: int, extra: str = "text") -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    numbers = list(range(first, first + rows))
    table = pyarrow.table({"id": numbers, extra: [f"é{at}" for at in numbers]})
    parquet.write_table(table, path, row_group_size=10)


def test_columns_and_tables(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 40)
    chosen = ShardSettings(shard_size=15, shuffle_within=True)
    dataset = load_dataset(open_dataset(f"parquet:{tmp_path}/a.parquet", chosen, columns=["id"]).spec)
    assert isinstance(dataset, ParquetDataset)
    for lease in [*leases(dataset), Lease(0, 1, 19, 30)]:
        ids = dataset.sample_ids(lease)
        assert dataset.read_table(lease).to_pydict() == {"id": ids}
        assert list(dataset.read(lease)) == [{"id": at} for at in ids]
    with pytest.raises(SettingsError, match=r"columns=.*'name'"):
        open_dataset(f"parquet:{tmp_path}/a.parquet", columns=["name"])


def test_other_columns_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 4)
    write(tmp_path / "b.parquet", 0, 4, extra="other")
    with pytest.raises(SettingsError, match=r"b\.parquet' has different columns than .*a\.parquet"):
        open_dataset(f"parquet:{tmp_path}/*.parquet")


@pytest.mark.parametrize("data", [b"", b"text\n" * 10, b"PAR1" + b"\0" * 20 + b"\xff\xff\0\0PAR1"])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.parquet' is not a Parquet file"):
        open_dataset(f"parquet:{tmp_path}/a.parquet")


def test_replaced_table_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, 0, 40)
    dataset = open_dataset(f"parquet:{path}")
    samples = dataset.read(Lease(0, 0, 0, 10))
    next(samples)
    write(path, 1, 40)
    with pytest.raises(SourceError, match=r"a\.parquet' has changed since it was indexed"):
        list(dataset.read(Lease(0, 1, 10, 20)))
    os.truncate(path, 100)
    with pytest.raises(SourceError, match=r"a\.parquet' has changed since it was indexed: it has 100 bytes"):
        list(load_dataset(dataset.spec).read(Lease(0, 1, 10, 20)))


def test_missing_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", 0, 4)
    dataset = open_dataset(f"parquet:{tmp_path}/a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(SettingsError, match=r"elastic-distill\[tables\]"):
        open_dataset(f"parquet:{tmp_path}/a.parquet")
    with pytest.raises(SettingsError, match=r"elastic-distill\[tables\]"):
        read_all(dataset)
