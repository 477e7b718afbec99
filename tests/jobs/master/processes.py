"""Masters and workers as processes of their own, forked from a server that has imported everything: quick to start."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from edl.errors import LeaseLostError
from edl.master.client import MasterClient, ShardReader
from edl.master.server import MasterServer, MasterSettings
from tests.waiting import DEADLINE_S

CONTEXT = multiprocessing.get_context("forkserver")

CONTEXT.set_forkserver_preload(["tests.jobs.master.processes"])

LEASE_S = 0.5


@contextlib.contextmanager
def running(target: Callable[..., None], *arguments: Any) -> Iterator[ForkServerProcess]:
    """A process that is killed at the end of the block, if it has not ended."""
    process = start(target, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.join(DEADLINE_S)


def start(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    process = CONTEXT.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _log(name: str, folder: str) -> None:
    logging.basicConfig(
        filename=f"{folder}/log", level=logging.INFO, format=f"%(asctime)s {name} %(process)d %(message)s"
    )


def lead(folder: str, journal: str | None = None, specs: dict[str, bytes] | None = None) -> None:
    """A master of job "job", with everything in a folder, until it is killed or all is done."""
    from edl.protocol.master import DatasetSpec

    _log("master", folder)
    settings = MasterSettings(
        store=f"sqlite:///{folder}/discovery.sqlite",
        journal=journal or f"sqlite:///{folder}/journal.sqlite",
        lease_s=LEASE_S,
    )
    datasets = {name: DatasetSpec.FromString(spec) for name, spec in (specs or {}).items()}
    with MasterServer("job", settings, datasets) as master:
        while not master.wait_done(0.5):
            if master.failure is not None:
                sys.exit(f"failed: {master.failure}")


def work(folder: str, name: str, dataset: str = "d", pause_s: float = 0.0) -> None:
    """A worker that writes each shard into its ledger before it reports it, and what came of the report after."""
    _log(f"worker {name}", folder)
    ledger = os.open(f"{folder}/ledger.{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    # Masters that are killed within half a second may be missed for minutes by a process that gets no turn.
    client = MasterClient("job", f"sqlite:///{folder}/discovery.sqlite", timeout_s=600)
    reader = ShardReader(client, dataset, holder=name, explicit=True, on_poisoned="warn")
    for shard in reader:
        if pause_s:
            time.sleep(pause_s)
        os.write(ledger, f"did {shard.id} {shard.term} {shard.epoch} {shard.start} {shard.stop}\n".encode())
        try:
            reader.report_done(shard)
        except LeaseLostError:
            os.write(ledger, f"refused {shard.id}\n".encode())
        else:
            os.write(ledger, f"accepted {shard.id}\n".encode())
    reader.close()
    client.close()
    os.write(ledger, b"end\n")


class Did(NamedTuple):
    """A shard that a worker did, and what it knows of its report: None if it was killed before it heard."""

    lease: int
    epoch: int
    start: int
    stop: int
    accepted: bool | None


def read_ledgers(folder: Path) -> list[Did]:
    return [entry for path in sorted(folder.glob("ledger.*")) for entry in _read(path)]


def _read(path: Path) -> Iterator[Did]:
    lines = [line.split() for line in path.read_text().splitlines()]
    answers = {int(parts[1]): parts[0] == "accepted" for parts in lines if parts[0] in ("accepted", "refused")}
    for parts in lines:
        if parts[0] == "did":
            lease, _, epoch, start, stop = map(int, parts[1:])
            yield Did(lease, epoch, start, stop, answers.get(lease))


def counted(entries: list[Did]) -> Counter[tuple[int, int]]:
    """How often each (epoch, sample) was counted, by leases that were accepted.

    A lease's number is never given twice, and a shard is given again only where no lease of it was accepted: of a
    shard's leases in the ledgers the last is the one that counted, where its worker was killed before it heard.
    """
    last: dict[tuple[int, int], Did] = {}
    for entry in entries:
        key = (entry.epoch, entry.start)
        if key not in last or entry.lease > last[key].lease:
            last[key] = entry
    counts: Counter[tuple[int, int]] = Counter()
    for entry in entries:
        is_last = last[entry.epoch, entry.start] is entry
        assert not (entry.accepted and not is_last), f"{entry} was accepted, and its shard was given again"
        assert not (entry.accepted is False and is_last), f"{entry} was refused, and its shard was not given again"
        if entry.accepted or (entry.accepted is None and is_last):
            counts.update((entry.epoch, sample) for sample in range(entry.start, entry.stop))
    return counts
