"""The Python blocks of docs/master.md, in order, with the masters and the names that they speak of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("EDL_DISCOVERY", f"sqlite:///{tmp_path}/store.sqlite")
    with contextlib.ExitStack() as stack:
        yield Place(tmp_path, stack)


def block(begin: str) -> str:
    (found,) = (block.text for block in blocks(PAGE) if block.language == "python" and begin in block.text)
    return found


def test_workers_of_the_page(place: Place) -> None:
    place.lead("labels", data="range:1000")
    done: list[int] = []
    place.run(block("    for shard in reader:"), process=lambda start, stop: done.extend(range(start, stop)))
    assert sorted(done) == list(range(1000))
    pytest.importorskip("torch", reason="the block needs PyTorch")
    assert place.run(block("from torch.utils.data import DataLoader"))["loader"].num_workers == 2


def test_dataset_of_the_page(place: Place) -> None:
    place.lead("labels")
    (place.folder / "corpus.txt").write_text("grün\n" * 2500)
    place.run(block('client.create_dataset("corpus"'))
    with MasterClient("labels") as client, ShardReader(client, "corpus") as reader:
        assert list(reader.samples()) == ["grün"] * 2500


def test_calls_of_the_page(place: Place) -> None:
    place.lead("train")
    steps: list[int] = []
    place.run(block("from edl.master import MasterClient, ShardingClient"), step=steps.extend)
    assert sorted(steps) == list(range(1280))
    assert os.environ["EDL_DISCOVERY"]
