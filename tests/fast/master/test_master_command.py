"""`edl master` as a user runs it: its ends, its signals, its words."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edl.cli import main
from edl.discovery import Store
from edl.errors import PoisonedShardsError
from edl.load_reporting import read_wanted
from edl.master import MasterClient, ShardReader
from tests.fast.master.scaling.test_advisor import publish
from tests.waiting import DEADLINE_S, wait_until

Start = Callable[..., "subprocess.Popen[str]"]
DATA = ("--data", "range:100", "--shard-size", "50", "--max-failures", "1")


@pytest.fixture
def start(stack: ExitStack, url: str) -> Iterator[Start]:
    def run(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "edl", "master", "job", "--store", url, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        stack.callback(process.communicate)
        stack.callback(process.kill)
        return process

    return run


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def await_leader(client: MasterClient) -> None:
    """Wait for the master that was started: a reader that finds none for 5 s goes by what the one before has done."""
    assert client.describe_dataset("data") is not None


def test_poisoned_shards_show_and_come_back(start: Start, client: MasterClient, tmp_path: Path) -> None:
    """A master ends when all is done, with a code of its own where shards were given up; `--new` begins anew."""
    process = start(*DATA)
    reader = ShardReader(client, "data", holder="w7", explicit=True)
    shard = next(reader)
    reader.report_failed(shard, "bad pixels")
    reader.report_done(next(reader))
    with pytest.raises(PoisonedShardsError, match="edl status job"):
        next(reader)
    reader.close()
    code, out, err = finish(process)
    assert code == 3
    assert "leads job 'job'" in err
    for words in (f"shard {shard.shard}", "w7: bad pixels", "--retry-poisoned"):
        assert words in out
    process = start(*DATA, "--retry-poisoned")
    await_leader(client)
    with ShardReader(client, "data") as reader:
        assert [found.shard for found in reader] == [shard.shard]
    code, out, _ = finish(process)
    assert code == 0
    assert "data: 100 units done" in out
    process = start(*DATA, "--new")
    await_leader(client)
    with ShardReader(client, "data") as reader:
        assert sum(len(shard) for shard in reader) == 100
    assert finish(process)[0] == 0
    assert len(list(tmp_path.glob("job.master.sqlite.2*"))) >= 1
    assert finish(start(*DATA))[0] == 0, "what is done is done"


def test_poisoned_shards_come_back_live(start: Start, client: MasterClient, store: Store) -> None:
    """Of a master that stays, and also says how many teachers are wanted."""
    process = start(*DATA, "--stay", "--min-teachers", "2")
    publish(store, demand=10.0)
    reader = ShardReader(client, "data", explicit=True)
    reader.report_failed(next(reader), "bad")
    for other, words in ((("--data", "range:7"), "--data is"), ((*DATA, "--session", "40"), "--session is 30.0")):
        code, _, err = finish(start("--retry-poisoned", *other))
        assert (code, f"a different specification: {words}" in err) == (1, True), err
    code, out, err = finish(start("--retry-poisoned"))
    assert code == 0, err
    assert "data: 1 shards put back" in out
    found = 0
    for shard in reader:
        reader.report_done(shard)
        found += len(shard)
    assert found == 100
    reader.close()
    wanted = wait_until(lambda: read_wanted(store, "teachers", "s")) or {}
    assert (wanted["count"], wanted["now"]) == (2, 1), "the least that the command says"
    assert process.poll() is None, "it stays"


def test_signals_lose_nothing(start: Start, client: MasterClient) -> None:
    """One that is told to end says so, and another goes on, at once where it stands by."""
    data = ("--data", "range:1000", "--shard-size", "50", "--log-format", "json", "--lease", "60")
    with ShardReader(client, "data") as reader:
        found = []
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            process = start(*data)
            found += [next(reader) for _ in range(4)]
            process.send_signal(number)
            ended, _, err = finish(process)
            assert (ended, "Traceback" in err) == (code, False), err
            assert any("continues from here" in json.loads(line)["message"] for line in err.splitlines())
        first = start(*data)
        await_leader(client)
        second = start(*data)
        assert any("stands by" in line for line in second.stderr)
        found.append(next(reader))
        first.terminate()
        found += reader
    assert sorted(shard.start for shard in found) == list(range(0, 1000, 50))
    assert finish(second)[0] == 0


def test_growing_text_ends_or_breaks(start: Start, client: MasterClient, tmp_path: Path) -> None:
    log = tmp_path / "events.log"
    log.write_text("".join(f"line {number}\n" for number in range(7)))
    common = ("--data", f"follow:{log}", "--shard-size", "10")
    process = start(*common, "--end-after", "0.5")
    with ShardReader(client, "data") as reader:
        assert list(reader.samples()) == [f"line {number}".encode() for number in range(7)]
    code, _, err = finish(process)
    assert code == 0, err
    process = start(*common, "--new")
    with log.open("a") as file:
        file.write("more\n" * 3)
    await_leader(client)
    with ShardReader(client, "data") as reader:
        assert len(next(reader)) == 10
        log.write_text("another line\n")
        code, _, err = finish(process)
    assert code not in (0, 3)
    assert "rotated" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "range:0x"), "range"),
        (("--journal", "nonsense://x"), "nonsense"),
        (("--new", "--journal", "store:"), "choose another job name"),
        (("--new", "--data", "lines:/no/such/file"), "/no/such/file"),
        (("--new", "--data", "range:10", "--name", "two\nlines"), "two"),
        (("--data", "kubernetes://x"), "a URL needs the kind of its data"),
        (("--data", "range:10", "--data", "range:20"), "--data range:20: range:10 was already given"),
        (("--store", "edl://localhost:29400"), "a command uses one store"),
        (("--port", "99999"), "--port 99999: expected a port"),
        (("--http-port", "-1"), "--http-port -1: expected a port"),
        (("--lease", "0"), "--lease 0: expected a duration from 0.5s"),
        (("--session", "nan"), "--session nan: expected a duration"),
        (("--new", "--host", "256.1.1.1"), "master: cannot listen at 256.1.1.1"),
        (("--new", "--token-file", "/no/such/file"), "/no/such/file"),
        (("--retry-poisoned", "--journal", "store:"), "no master has run a job named 'job' here; known jobs: none"),
        (("--new", "--min-workers", "5", "--max-workers", "1"), "--max-workers 1"),
    ],
)
def test_wrong_options_are_explained(
    url: str, tmp_path: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typo beside `--new` sets nothing aside."""
    journal = tmp_path / "job.master.sqlite"
    journal.write_bytes(b"what is done")
    assert main(["master", "job", "--store", url, *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(re.findall(r"\n", err)) <= 3
    assert journal.read_bytes() == b"what is done"
