"""A worker of a labelling job, from its start to its end.

Each worker is a candidate for the job's master as well, so that no other process is needed, and any may be killed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, Final

from edl.cli._credentials import default_host, warn_of_open_port
from edl.cli.label.conclusion import model_of, print_use
from edl.cli.label.folders import label_folders, note_folder
from edl.cli.label.job_progress import DATASET, JobProgress, labels_of
from edl.cli.label.job_spec import LabelJobSpec, shard_rows
from edl.cli.label.screen import counted, open_screen
from edl.cli.label.shards import MasterShards
from edl.datasets.rows import IndexedData, LabelDataset
from edl.discovery import Store, open_store
from edl.distill.cache import CacheKey, SoftLabelCache
from edl.distill.labelling import DataFingerprint, LabelPlan, LabelReport, ShardLabeller
from edl.errors import ConflictError, DiscoveryError, NoMasterError, SettingsError
from edl.master.client import MasterClient, ShardReader
from edl.master.naming import election_key
from edl.master.reports import read_report
from edl.master.server import MasterServer, MasterSettings
from edl.protocol.master import DatasetSpec
from edl.settings import Credentials, DiscoverySettings

__all__ = ["EXIT_POISONED", "run_job"]

logger = logging.getLogger(__name__)

EXIT_POISONED: Final = 3
"""As `edl master`'s: the job has ended, and some shards were given up."""
_MASTER_S: Final = 300.0
"""How long to wait for a master: a store that is started again, on another host perhaps, takes minutes."""
_LOOK_S: Final = 0.2
"""Between two looks whether there is a master."""
_SAY_AFTER_S: Final = 5.0
"""Waiting for a master that is worth a line: as long as the lease of one that was killed."""
_LEASE_S: Final = 10.0
"""After so long the place of a master that was killed is free, and a process that cannot lead may say why: leases of
masters are 5 s."""
_LINGER_S: Final = 3.0
"""How long the master waits at the end for the other workers to hear that all is done: they ask every second."""
_MOST_LISTED: Final = 20
"""Shards given up that are listed; of more a person wants the number."""


def run_job(options: argparse.Namespace, plan: LabelPlan, data: LabelDataset, cache: SoftLabelCache) -> int:
    """Take part in the job until it has ended; return the exit code.

    Args:
        options: of the command line.
        plan: what to ask for.
        data: the data set.
        cache: where this worker keeps labels.

    Raises:
        SettingsError: the data cannot be shared, or the store's URL cannot be used.
        ConflictError: the job labels other data, or otherwise.
        NoMasterError: there is no master, and none could be started here.
        EDLError: this worker cannot go on; others can.
    """
    if not isinstance(data, IndexedData):
        raise SettingsError(
            f"--job needs rows that can be loaded singly, and {options.data!r} is read in sequence: return "
            "a Dataset with __len__ and __getitem__ (and no --ids from its samples), or write arrays to an .npz file"
        )
    with _terminated_by_signal():
        return _Worker(options, plan, data, cache).run()


class _Worker:
    def __init__(self, options: argparse.Namespace, plan: LabelPlan, data: IndexedData, cache: SoftLabelCache) -> None:
        self._options = options
        self._job: str = options.job
        self._plan = plan
        self._data = data
        self._cache = cache
        self._url = DiscoverySettings.of(options.store).url
        self._fingerprint = DataFingerprint.of(data)
        if options.no_data_check:
            self._fingerprint = replace(self._fingerprint, rows_checksum="", file_checksum="")
        self._key: CacheKey | None = None  # of the job's labels

    def run(self) -> int:
        credentials = self._plan.options.credentials or Credentials.of()
        host = self._options.host or default_host(self._url)
        warn_of_open_port(host, credentials)
        settings = MasterSettings(store=self._url, journal="store:", host=host, credentials=credentials)
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(open_store(self._url, credentials=credentials))
            master = stack.enter_context(MasterServer(self._job, settings))
            client = stack.enter_context(MasterClient(self._job, store, timeout_s=_MASTER_S, credentials=credentials))
            self._await_master(master, store, client)
            if self._options.retry_poisoned:
                self._retry_poisoned(client)
            labeller = self._agreed(client)
            if labeller is None:
                print(f"job {self._job} is done already, and no teacher was asked")
                return self._conclude(client, store, None)
            with labeller:
                report = self._label(store, client, labeller)
            if master.is_leader:
                master.wait_done(_LINGER_S)
            return self._conclude(client, store, report)

    def _await_master(self, master: MasterServer, store: Store, client: MasterClient) -> None:
        """Wait until there is a master: this process's own, or another's.

        Raises:
            NoMasterError: none leads.
            EDLError: why this process cannot lead, where no other does.
        """
        begun = time.monotonic()
        warned = False
        while True:
            if master.wait_leading(_LOOK_S) or _is_led(store, self._job):
                with contextlib.suppress(NoMasterError):  # all was done before, and the master has ended just now
                    client.status()
                    return
            waited_s = time.monotonic() - begun
            if master.failure is not None and waited_s > _LEASE_S:
                raise master.failure
            if waited_s > _MASTER_S:
                raise NoMasterError(f"no master of job {self._job!r} leads after {_MASTER_S:g} s: is the store there?")
            if waited_s > _SAY_AFTER_S and not warned:
                warned = True
                print(f"waiting for a master of job {self._job}; one that was lost is followed soon", file=sys.stderr)

    def _retry_poisoned(self, client: MasterClient) -> None:
        if client.describe_dataset(DATASET) is not None:
            shards = client.retry_poisoned(DATASET)
            print(f"{counted(shards, 'shard')} that had been given up {'is' if shards == 1 else 'are'} tried again")

    def _agreed(self, client: MasterClient) -> ShardLabeller | None:
        """Return a labeller that does what all workers of the job do; None if there is nothing left to do.

        Raises:
            ConflictError: this worker has other data, or other options.
        """
        while True:
            there = client.describe_dataset(DATASET)
            spec = None if there is None else self._checked(there)
            if spec is not None and _is_finished(client.status()):
                return None
            plan = self._plan
            if spec is not None:  # the version that the job's first worker found is asked for, and no other
                plan = replace(plan, output_spec=replace(plan.output_spec, version=spec.key.version))
            labeller = ShardLabeller(self._data, plan, self._cache)
            try:
                key = labeller.key(self._fingerprint)
                if spec is not None:
                    self._refuse(spec.key_differences(key))
                    return labeller
                with contextlib.suppress(ConflictError):  # another was first: as it says
                    client.create_dataset(DATASET, self._new_spec(LabelJobSpec(self._fingerprint, key)))
            except BaseException:
                labeller.close()
                raise
            labeller.close()

    def _new_spec(self, spec: LabelJobSpec) -> DatasetSpec:
        return DatasetSpec(
            kind="labels",
            location=spec.to_json(),
            units=spec.data.rows,
            shard_size=self._options.shard or shard_rows(spec.data.rows, self._plan.batch_rows),
            epochs=1,
            lease_s=max(self._options.worker_timeout, 60.0),
            session_s=self._options.worker_timeout,
            ignore_expiries=True,  # workers may be killed as often as anyone likes
        )

    def _checked(self, there: DatasetSpec) -> LabelJobSpec:
        spec = LabelJobSpec.from_json(there.location)
        self._key = spec.key
        self._refuse([*spec.data_differences(self._fingerprint), *spec.option_differences(self._plan)])
        return spec

    def _refuse(self, differences: list[str]) -> None:
        if differences:
            raise ConflictError(
                f"job {self._job!r} is another one: {'; '.join(differences)}. Run the command as its other workers do, "
                "or name another job"
            )

    def _label(self, store: Store, client: MasterClient, labeller: ShardLabeller) -> LabelReport:
        note = lambda: note_folder(store, self._job, self._options.output)  # noqa: E731
        with (
            open_screen(self._job, "waiting for teachers") as screen,
            contextlib.closing(JobProgress(store, self._job, screen)) as progress,
            # Closed, not left: the labeller has reported what failed, and an error here says nothing of other shards.
            contextlib.closing(ShardReader(client, DATASET, explicit=True, on_poisoned="warn")) as reader,
        ):
            return labeller.run(MasterShards(reader, _MASTER_S, note), progress.note)

    def _conclude(self, client: MasterClient, store: Store, report: LabelReport | None) -> int:
        """Print what was done, here and in all; return the exit code."""
        labels = self._final_labels(client, store)
        kind = "sequences" if self._data.sequences else "rows"
        if report is not None:
            progress = report.progress
            print(
                f"{progress.labelled:,} {kind} labelled here by {model_of(report.key)} in {progress.seconds:.1f} s; "
                f"{progress.known:,} had a label in {self._options.output} before"
            )
        print(f"job {self._job}: {labels['units_done']:,} of {labels['units']:,} {kind} have a label")
        if report is not None or labels["units_done"]:
            self._print_folders(store)
        return self._list_poisoned(labels)

    def _final_labels(self, client: MasterClient, store: Store) -> dict[str, Any]:
        """Return the report of the labels when all is done; the master's own process may have ended for that."""
        with contextlib.suppress(DiscoveryError):
            labels = labels_of(read_report(store, self._job))
            if labels is not None and labels["finished"]:
                return labels
        labels = labels_of(client.status())
        assert labels is not None, "the data set was there"
        return labels

    def _print_folders(self, store: Store) -> None:
        try:
            folders = label_folders(store, self._job)
        except DiscoveryError as exc:
            logger.warning("where all labels of the job are cannot be said: %s", exc)
            return
        if not folders or self._key is None:
            return
        for folder, hosts in folders.items():
            print(f"  {folder} ({', '.join(hosts)})")
        print_use(self._key, [*folders], sequences=self._data.sequences)

    def _list_poisoned(self, labels: dict[str, Any]) -> int:
        poisoned = labels["shards"]["poisoned"]
        if not poisoned:
            return 0
        print(f"{counted(poisoned, 'shard')} given up, with rows that no teacher labels:", file=sys.stderr)
        listed = labels["poisoned"][:_MOST_LISTED]
        for shard in listed:
            failures = shard["failures"]
            last = failures[-1] if failures else {"reason": "", "holder": "?"}
            times = counted(len(failures), "failure")
            print(
                f"  rows {shard['start']} to {shard['stop'] - 1}, {times}, the last by {last['holder']}: "
                f"{last['reason']}",
                file=sys.stderr,
            )
        if poisoned > len(listed):
            print(f"  and {poisoned - len(listed):,} more", file=sys.stderr)
        print("The same command with --retry-poisoned tries them again.", file=sys.stderr)
        return EXIT_POISONED


def _is_led(store: Store, job: str) -> bool:
    try:
        return store.get(election_key(job)) is not None
    except DiscoveryError:
        return False  # asked again soon


def _is_finished(status: dict[str, Any]) -> bool:
    labels = labels_of(status)
    return labels is not None and bool(labels["finished"])


@contextlib.contextmanager
def _terminated_by_signal() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does: shards go back at once. A second signal ends the process at once."""

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
