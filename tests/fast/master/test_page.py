"""The Python blocks of docs/master.md, in order, with the masters and the names that they speak of."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import types
from pathlib import Path
from typing import Any

import pytest

from edl.background import start_call
from edl.master import MasterClient, MasterServer, MasterSettings, ShardReader, ShardSettings, open_dataset
from tests.jobs.test_readme import ROOT, blocks
from tests.waiting import DEADLINE_S

PAGE = ROOT / "docs" / "master.md"


class Place:
    """A folder with a store, masters in this process, and the names that blocks use."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack

    def lead(self, job: str, **data: str) -> MasterServer:
        settings = MasterSettings(
            store=f"sqlite:///{self.folder}/store.sqlite", journal=f"sqlite:///{self.folder}/{job}.sqlite"
        )
        specs = {name: open_dataset(location, ShardSettings(shard_size=100)).spec for name, location in data.items()}
        master = self._stack.enter_context(MasterServer(job, settings, specs))
        assert master.wait_leading(DEADLINE_S)
        return master

    def run(self, text: str, **names: Any) -> dict[str, Any]:
        for path in ("/data/", "/var/log/"):
            text = text.replace(path, f"{self.folder}/")
        exec(compile(text, PAGE.name, "exec"), names)  # noqa: S102 - the page's own
        return names


@pytest.fixture
def place(stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("EDL_DISCOVERY", f"sqlite:///{tmp_path}/store.sqlite")
    return Place(tmp_path, stack)


def block(begin: str) -> str:
    (found,) = (block.text for block in blocks(PAGE) if block.language == "python" and begin in block.text)
    return found


def test_all_blocks_are_run() -> None:
    """A block that is added gets a test here."""
    python = [found for found in blocks(PAGE) if found.language == "python"]
    ran = set(re.findall(r"block\((['\"].*?['\"])[,)]", Path(__file__).read_text()))
    assert len(ran) == len(python), f"{len(python)} blocks, of which {ran} are run"


def test_workers_of_the_page(place: Place) -> None:
    place.lead("labels", data="range:1000")
    done: list[int] = []
    place.run(block("    for shard in reader:"), process=lambda start, stop: done.extend(range(start, stop)))
    assert sorted(done) == list(range(1000))
    pytest.importorskip("torch", reason="the block needs PyTorch")
    assert place.run(block("from torch.utils.data import DataLoader"))["loader"].num_workers == 2


def test_state_of_the_page(place: Place) -> None:
    pytest.importorskip("torch", reason="the block needs PyTorch")
    import torch

    from edl.collective import State

    place.lead("train")
    with MasterClient("train") as client, ShardReader(client, "data", holder="rank 0") as reader:
        client.create_dataset("data", open_dataset("range:300", ShardSettings(shard_size=100, commit="checkpoint")))
        model = torch.nn.Linear(1, 1)
        trained: list[int] = []
        saved: list[Any] = []
        place.run(
            block("state = State(model=model, optimizer=optimizer, reader=reader)"),
            State=State,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            reader=reader,
            train=trained.append,
            time_to_save=lambda: len(trained) == 150,
            checkpointer=types.SimpleNamespace(save=lambda state: saved.append(reader.state_dict())),
        )
    assert trained == list(range(300))
    assert len(saved) == 2


def test_dataset_of_the_page(place: Place) -> None:
    place.lead("labels")
    (place.folder / "corpus.txt").write_text("grün\n" * 2500)
    place.run(block('client.create_dataset("corpus"'))
    with MasterClient("labels") as client, ShardReader(client, "corpus") as reader:
        assert list(reader.samples()) == ["grün"] * 2500


def test_stream_of_the_page(place: Place) -> None:
    place.lead("stream", other="range:5")
    log = place.folder / "events.jsonl"
    log.write_text("".join(f"{number}\n" for number in range(700)))
    text = block("from edl.datasets import Follower, FollowSettings")
    following = start_call("edl-test", lambda: place.run(text))
    with MasterClient("stream") as client, ShardReader(client, "events") as reader:
        samples = reader.samples()
        found = [int(next(samples)) for _ in range(300)]
        with log.open("a") as file:
            file.writelines(f"{number}\n" for number in range(700, 1400))
        (place.folder / "events.end").touch()
        found += map(int, samples)
    following.result(DEADLINE_S)
    assert sorted(found) == list(range(1400))


def test_source_of_the_page(place: Place) -> None:
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE orders (number INTEGER, what TEXT)")
    database.executemany("INSERT INTO orders VALUES (?, 'tea')", [(number,) for number in range(30)])
    orders = place.run(block("class Orders:"), database=database)["Orders"]()
    dataset = open_dataset("source:orders", ShardSettings(shard_size=10), samples=orders)
    lease = types.SimpleNamespace(epoch=0, shard=1, start=10, stop=20)
    assert list(dataset.read(lease)) == [(number, "tea") for number in range(10, 20)]  # type: ignore[arg-type]
    assert not orders.ended()
    assert orders.count() == 30
