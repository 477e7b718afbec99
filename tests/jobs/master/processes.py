"""Masters and workers as processes of their own, forked from a server that has imported everything: quick to start."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
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
        store=f"sqlite:///{folder}/store.sqlite",
        journal=journal or f"sqlite:///{folder}/journal.sqlite",
        lease_s=LEASE_S,
    )
    datasets = {name: DatasetSpec.FromString(spec) for name, spec in (specs or {}).items()}
    with MasterServer("job", settings, datasets) as master:
        while not master.wait_done(0.5):
            if master.failure is not None:
                sys.exit(f"failed: {master.failure}")


def lead_and_die(folder: str, appends: int) -> None:
    """A master that is killed between the journal and the answer, after so many groups of commands."""
    from edl.master.journal.sqlite import SqliteJournal

    append = SqliteJournal.append
    count = 0

    def deadly(self: SqliteJournal, records: Any) -> None:
        nonlocal count
        append(self, records)
        count += 1
        if count == appends:
            os.kill(os.getpid(), signal.SIGKILL)

    SqliteJournal.append = deadly  # type: ignore[method-assign]
    lead(folder)


def work(folder: str, name: str, dataset: str = "d", pause_s: float = 0.0) -> None:
    """A worker that writes each shard into its ledger before it reports it, and what came of the report after."""
    _log(f"worker {name}", folder)
    ledger = os.open(f"{folder}/ledger.{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    # Masters that are killed within half a second may be missed for minutes by a process that gets no turn.
    client = MasterClient("job", f"sqlite:///{folder}/store.sqlite", timeout_s=600)
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


def train(folder: str, name: str, limit: int, every: int, pause_s: float, seen: str, saving: bool = False) -> None:
    """Count samples, in a checkpoint with the reader; after `limit` of them be killed in the middle of a step.

    With `saving` that is in the middle of the checkpoint that follows: the master has the mark, the disk has not.

    The process's state is the counts, which a checkpoint replaces as a whole, as a model's would be.
    """
    path = Path(folder) / f"checkpoint.{name}"
    counts: dict[str, int] = {}
    with (
        MasterClient("job", f"sqlite:///{folder}/store.sqlite", timeout_s=600) as client,
        ShardReader(client, "d", holder=name, prefetch=2) as reader,
    ):
        if path.exists():
            saved = json.loads(path.read_text())
            reader.load_state_dict(saved["reader"])
            counts = saved["counts"]
        else:
            reader.start_over()
        step = 0

        def save() -> None:
            state = {"reader": reader.state_dict(), "counts": counts}
            if saving and step >= limit:
                os.kill(os.getpid(), signal.SIGKILL)
            path.with_suffix(".new").write_text(json.dumps(state))
            path.with_suffix(".new").rename(path)

        with open(seen, "a", buffering=1) as log:  # noqa: PTH123
            for sample in reader.samples():
                counts[str(sample)] = counts.get(str(sample), 0) + 1
                log.write(f"{name} {sample}\n")
                step += 1
                if step == limit and not saving:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step % every == 0:
                    save()
                time.sleep(pause_s)
        save()
