"""`ShardDataset` under PyTorch's `DataLoader`, with workers however they are started."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter

import pytest

from edl.errors import SettingsError
from edl.master import MasterClient

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from edl.master.client.torch import ShardDataset  # noqa: E402
from tests.fast.master.conftest import Lead, shards  # noqa: E402
from tests.waiting import DEADLINE_S, wait_until  # noqa: E402


def test_every_sample_comes_once(led: Lead, client: MasterClient, url: str) -> None:
    master = led(100, shard_size=20)
    dataset = ShardDataset("job", "d", url, timeout_s=DEADLINE_S, holder="trainer")
    loader = DataLoader(pickle.loads(pickle.dumps(dataset)), batch_size=16)  # as workers that are spawned get it
    found = Counter(int(sample) for batch in loader for sample in batch)
    assert found == Counter(range(100))
    assert master.wait_done(DEADLINE_S)
    assert client.status()["datasets"][0]["shards"]["done"] == 5


def test_a_checkpointed_set_is_refused(led: Lead, client: MasterClient, url: str) -> None:
    """A `ShardDataset` has no position that a checkpoint could hold: what it had read would be lost with a process."""
    led(100, commit="checkpoint")
    with pytest.raises(SettingsError, match="ShardReader in the training process"):
        next(iter(ShardDataset("job", "d", url, timeout_s=DEADLINE_S)))
    assert client.status()["datasets"][0]["shards"]["todo"] == 10


PROGRAM = """
import sys
from torch.utils.data import DataLoader
from edl.master import MasterClient, ShardReader
from edl.master.client.torch import ShardDataset
"""


def run(program: str, url: str, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + program, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


FORKING = """
dataset = ShardDataset("job", "d", sys.argv[1], timeout_s=90)
loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
print(*sorted(int(sample) for sample in loader))
"""


def test_forked_workers_make_channels(led: Lead, url: str) -> None:
    """In a program that has not used gRPC itself."""
    led(100)
    done = run(FORKING, url)
    assert done.returncode == 0, done.stderr
    assert [int(sample) for sample in done.stdout.split()] == list(range(100))


FAILING = """
class Images(list):
    def __getitem__(self, number):
        return 1 // (number - 13)

dataset = ShardDataset("job", "d", sys.argv[1], timeout_s=90, samples=Images(range(100)))
for sample in DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"):
    pass
"""


def test_a_broken_sample_fails_its_shard(led: Lead, client: MasterClient, url: str) -> None:
    """Also where a worker of the loader makes the sample, and dies of it."""
    led(100, max_failures=1)
    done = run(FAILING, url)
    assert "ZeroDivisionError" in done.stderr
    wait_until(lambda: shards(client)["poisoned"] == 1, "the failure")


SUSPENDED = """
def samples():
    with MasterClient("job", sys.argv[1], timeout_s=90) as client, ShardReader(client, "d") as reader:
        yield from reader.samples()

kept = [samples(), iter(DataLoader(ShardDataset("job", "d", sys.argv[1], timeout_s=90), batch_size=None))]
print([int(next(iterator)) % 10 for iterator in kept])
"""


def test_a_suspended_iterator_ends(led: Lead, url: str) -> None:
    """With its process: at shutdown no thread runs that `close` could wait for."""
    led(100)
    done = run(SUSPENDED, url, DEADLINE_S / 2)
    assert (done.returncode, done.stdout) == (0, "[0, 0]\n"), done.stderr


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_of_a_user_of_grpc_is_told(led: Lead, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a hang: gRPC's threads are not in the child, nor are those that had SQLite's locks at the fork."""
    led(100)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the child opens a Store, in which it may wait for a thread that it does not have")

    monkeypatch.setattr("edl.master.client.master_client.open_store", refuse)
    loader = DataLoader(
        ShardDataset("job", "d", url, timeout_s=DEADLINE_S), num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(SettingsError, match="forkserver"):
        list(loader)
