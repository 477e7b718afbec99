"""`edl master` as a user runs it: its ends, its signals, its words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edl.errors import PoisonedShardsError
from edl.master import MasterClient, ShardReader
from tests.fast.master.processes import until

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(stack: ExitStack, url: str) -> Iterator[Start]:
    def run(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "edl", "master", "job", "--store", url, "--lease", "0.5", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        stack.callback(process.communicate)
        stack.callback(process.kill)
        return process

    return run


def finish(process: subprocess.Popen[str], seconds: float = 30.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def await_leader(client: MasterClient) -> None:
    """Wait for the master that was started: a reader that finds none for 5 s goes by what the one before has done."""
    assert client.describe_dataset("data") is not None


def test_it_ends_when_all_is_done(start: Start, client: MasterClient, url: str) -> None:
    process = start("--data", "range:1000", "--shard-size", "50", "--name", "numbers", "--epochs", "2")
    with ShardReader(client, "numbers") as reader:
        assert sum(len(shard) for shard in reader) == 2000
    code, out, err = finish(process)
    assert code == 0, err
    assert "numbers: 2,000 units done" in out
    assert "leads job 'job'" in err
    again = start("--data", "range:1000", "--shard-size", "50", "--name", "numbers", "--epochs", "2")
    assert finish(again)[0] == 0, "what is done is done"


def test_poisoned_shards_show_and_come_back(start: Start, client: MasterClient) -> None:
    data = ("--data", "range:100", "--shard-size", "50", "--max-failures", "1")
    process = start(*data)
    reader = ShardReader(client, "data", holder="w7", explicit=True)
    shard = next(reader)
    reader.report_failed(shard, "bad pixels")
    reader.report_done(next(reader))
    with pytest.raises(PoisonedShardsError, match="edl status job"):
        next(reader)
    reader.close()
    code, out, _ = finish(process)
    assert code == 3
    assert f"shard {shard.shard}" in out
    assert "w7: bad pixels" in out
    assert "--retry-poisoned" in out
    process = start(*data, "--retry-poisoned")
    await_leader(client)
    with ShardReader(client, "data") as reader:
        assert [found.shard for found in reader] == [shard.shard]
    assert finish(process)[0] == 0


def test_poisoned_shards_come_back_live(start: Start, client: MasterClient) -> None:
    process = start("--data", "range:100", "--shard-size", "50", "--max-failures", "1", "--stay")
    reader = ShardReader(client, "data", explicit=True)
    reader.report_failed(next(reader), "bad")
    code, out, err = finish(start("--retry-poisoned"))
    assert code == 0, err
    assert "data: 1 shards put back" in out
    assert sum(len(shard) for shard in _all(reader)) == 100
    reader.close()
    assert process.poll() is None, "it stays"


def _all(reader: ShardReader) -> Iterator[Any]:
    for shard in reader:
        reader.report_done(shard)
        yield shard


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_it_and_loses_nothing(
    start: Start, client: MasterClient, number: signal.Signals, code: int
) -> None:
    data = ("--data", "range:1000", "--shard-size", "50", "--log-format", "json")
    process = start(*data)
    with ShardReader(client, "data") as reader:
        first = [next(reader) for _ in range(7)]
        process.send_signal(number)
        found, _, err = finish(process)
        assert found == code
        assert "Traceback" not in err, err
        lines = [json.loads(line) for line in err.splitlines()]
        assert any("goes on from here" in line["message"] for line in lines)
        following = start(*data)
        rest = list(reader)
    assert len(first) + len(rest) == 20
    assert finish(following)[0] == 0


def test_a_standby_says_so_and_takes_over(start: Start, client: MasterClient) -> None:
    # A shorter lease may be over before the second one stands by.
    data = ("--data", "range:1000", "--shard-size", "50", "--lease", "3")
    first = start(*data)
    assert client.describe_dataset("data") is not None
    second = start(*data)
    assert second.stderr is not None
    until(lambda: "stands by" in str(second.stderr.readline()))  # type: ignore[union-attr]
    with ShardReader(client, "data") as reader:
        count = len([next(reader) for _ in range(5)])
        os.kill(first.pid, signal.SIGKILL)
        count += len(list(reader))
    assert count == 20
    assert finish(second)[0] == 0


def test_begin_anew(start: Start, client: MasterClient, tmp_path: Path) -> None:
    data = ("--data", "range:100", "--shard-size", "50")
    for extra in ((), ("--new",)):
        process = start(*data, *extra)
        await_leader(client)
        with ShardReader(client, "data") as reader:
            assert sum(len(shard) for shard in reader) == 100
        assert finish(process)[0] == 0
    assert len(list(tmp_path.glob("job.master.sqlite.2*"))) >= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "range:0x"), "range"),
        (("--data", "lines:/no/such/file"), "/no/such/file"),
        (("--host", "256.1.1.1"), "256.1.1.1"),
        (("--journal", "nonsense://x"), "nonsense"),
        (("--new", "--journal", "store:"), "choose another name"),
    ],
)
def test_wrong_options_are_explained(start: Start, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = finish(start(*arguments))
    assert code == 2, err
    assert words in err
    assert "Traceback" not in err


def test_its_help_teaches(start: Start) -> None:
    code, out, _ = finish(start("--help"))
    assert code == 0
    for words in ("exit code 0", "SIGTERM", "--retry-poisoned", "stands by", "ShardReader", "--journal"):
        assert words in out
