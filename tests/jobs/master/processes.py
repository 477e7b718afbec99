"""Masters and workers as processes of their own, forked from a server that has imported everything: quick to start."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from typing import Any

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
