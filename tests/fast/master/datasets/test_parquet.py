"""Parquet by rows: every row once, no row group read twice by a reader, and changed files refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from edl.errors import SettingsError, SourceError
from edl.master.datasets import ShardSettings, load_dataset, open_dataset
from edl.master.datasets.tables import ParquetDataset
from tests.fast.master.datasets.leases import Lease, leases, read_all

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")


def write(path: Any, first: int, rows: int, group: int = 10, **options: Any) -> None:
    numbers = list(range(first, first + rows))
    table = pyarrow.table(
        {
            "id": pyarrow.array(numbers, pyarrow.int64()),
            "text": pyarrow.array([f"é{at}" for at in numbers], pyarrow.string()),
        }
    )
    parquet.write_table(table, path, row_group_size=group, **options)


def test_columns_and_tables(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 40)
    settings = ShardSettings(shard_size=15, shuffle_within=True)
    dataset = load_dataset(open_dataset(f"parquet:{tmp_path}/a.parquet", settings, columns=["id"]).spec)
    assert isinstance(dataset, ParquetDataset)
    for lease in [*leases(dataset), Lease(0, 1, 19, 30)]:
        ids = dataset.sample_ids(lease)
        assert dataset.read_table(lease).to_pydict() == {"id": ids}
        assert list(dataset.read(lease)) == [{"id": at} for at in ids]
    with pytest.raises(SettingsError, match=r"columns=.*'name'"):
        open_dataset(f"parquet:{tmp_path}/a.parquet", columns=["name"])


def test_other_columns_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 4)
    parquet.write_table(pyarrow.table({"id": [1.5], "text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(SettingsError, match=r"b\.parquet' has other columns than .*a\.parquet"):
        open_dataset(f"parquet:{tmp_path}/*.parquet")


@pytest.mark.parametrize("data", [b"", b"text\n" * 10, b"PAR1" + b"\0" * 20 + b"\xff\xff\0\0PAR1"])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.parquet' is no Parquet file"):
        open_dataset(f"parquet:{tmp_path}/a.parquet")


def test_replaced_table_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, 0, 40)
    dataset = open_dataset(f"parquet:{path}")
    samples = dataset.read(Lease(0, 0, 0, 10))
    next(samples)
    write(path, 1, 40)
    with pytest.raises(SourceError, match=r"a\.parquet' is not as it was indexed"):
        list(dataset.read(Lease(0, 1, 10, 20)))
    os.truncate(path, 100)
    with pytest.raises(SourceError, match=r"a\.parquet' is not as it was indexed: it has 100 bytes"):
        list(load_dataset(dataset.spec).read(Lease(0, 1, 10, 20)))


def test_missing_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", 0, 4)
    dataset = open_dataset(f"parquet:{tmp_path}/a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(SettingsError, match=r"elastic-distill\[tables\]"):
        open_dataset(f"parquet:{tmp_path}/a.parquet")
    with pytest.raises(SettingsError, match=r"elastic-distill\[tables\]"):
        read_all(dataset)
