"""A size or a sequence, cut into shards; the order within a shard."""

from __future__ import annotations

import hashlib
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import SettingsError, SourceError
from edl.master.datasets import ShardSettings, load_dataset, open_dataset
from edl.master.datasets.shuffling import permute_shard
from edl.protocol.master import DatasetSpec
from tests.fast.master.datasets.leases import Lease, leases, read_all


@settings(max_examples=30)
@given(units=st.integers(1, 500), shard_size=st.integers(1, 80))
def test_range_is_read_once(units: int, shard_size: int) -> None:
    dataset = load_dataset(open_dataset(f"range:{units}", ShardSettings(shard_size=shard_size)).spec)
    assert read_all(dataset) == list(range(units))
    assert dataset.units == units


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
    order = permute_shard(1, 2, 3, 1000)
    assert permute_shard(1, 2, 3, 8) == [6, 2, 7, 4, 5, 1, 0, 3]
    digest = hashlib.sha256(str(order).encode()).hexdigest()
    assert digest[:16] == "d1fd4de2af1e5fda"


def test_samples_of_a_sequence() -> None:
    letters = list("abcdefghij")
    spec = open_dataset("range:letters", ShardSettings(shard_size=4), samples=letters).spec
    again = pickle.loads(pickle.dumps(load_dataset(spec, samples=letters)))
    assert read_all(again) == letters
    assert again.spec == spec
    with pytest.raises(SourceError, match="9 samples here, and 10"):
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
