"""Data that change under a run: their shards are given up with the file's name, and done when it is put back."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from edl.errors import PoisonedShardsError
from edl.master import MasterClient, MasterServer, MasterSettings, ShardReader, ShardSettings, open_dataset

TIMEOUT_S = 30.0


def test_changed_file_is_given_up(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text("".join(f"{number}-{line}\n" for line in range(100)))
    store = f"sqlite:///{tmp_path}/store.sqlite"
    dataset = open_dataset(f"lines:{folder}/*.txt", ShardSettings(shard_size=10, max_failures=2), encoding="utf-8")
    with contextlib.ExitStack() as stack:
        settings = MasterSettings(store=store, journal=f"sqlite:///{tmp_path}/journal.sqlite")
        master = stack.enter_context(MasterServer("job", settings, {"data": dataset.spec}))
        assert master.wait_leading(TIMEOUT_S)
        client = stack.enter_context(MasterClient("job", store))
        before = (folder / "2.txt").read_text()
        (folder / "2.txt").write_text(before.replace("2-33\n", "2-34\n"))
        samples: list[str] = []
        with ShardReader(client, "data") as reader, pytest.raises(PoisonedShardsError, match="1 shards"):
            samples.extend(reader.samples())
        assert len(samples) == 390, "other shards of the file are as they were"
        (poisoned,) = client.status()["datasets"][0]["poisoned"]
        for failure in poisoned["failures"]:
            assert "2.txt' is not as it was indexed: its bytes 140 to 190 are others" in failure["reason"]
        (folder / "2.txt").write_text(before)
        assert client.retry_poisoned("data") == 1
        with ShardReader(client, "data") as reader:
            samples += list(reader.samples())
    assert sorted(samples) == sorted(f"{number}-{line}" for number in range(4) for line in range(100))
