"""One process of a labelling job, from start to end.

Each process can also become the job's master, so the job needs no further processes, and any process may be killed. The
store holds the master's journal, its progress reports, and each process's label folder. The first process writes a
`LabelAgreement`, which identifies the data and the labels, into the master's description of the data set. Every other
process compares this agreement with its own, and is refused if the two differ.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from edl.background import BackgroundLoop
from edl.cli.label import kind_of, model_of, open_screen, print_use
from edl.cli.master import default_host, warn_of_open_port
from edl.cli.output import counted
from edl.datasets.rows import IndexedData, SampleId
from edl.discovery import Store, open_store
from edl.distill.cache import CacheKey, SoftLabelCache
from edl.distill.cache.folder import LabelFolder, Namespace
from edl.distill.labelling import (
    DataFingerprint,
    DataGuard,
    LabelPlan,
    LabelProgress,
    RowShard,
    ShardLabeller,
    ShardSource,
)
from edl.end_signals import exit_on_sigterm
from edl.errors import ConflictError, DiscoveryError, NoMasterError, PermanentError, ProtocolError, SettingsError
from edl.master.client import MasterClient, ShardReader
from edl.master.naming import read_report
from edl.master.server import MasterServer, MasterSettings
from edl.protocol.master import DatasetSpec
from edl.protocol.tensors import Array
from edl.settings import Credentials, DiscoverySettings

logger = logging.getLogger(__name__)

EXIT_POISONED: Final = 3
"""Exit code, as in `edl master`: the job has ended, and some shards were given up."""
_DATASET: Final = "labels"
"""Name of the data set in the job."""
_MASTER_S: Final = 300.0
"""Longest wait for a master: restarting a store, perhaps on another host, takes minutes."""
_LOOK_S: Final = 0.2
"""Poll interval while waiting for a master."""
_SAY_AFTER_S: Final = 5.0
"""Seconds after which a process that waits for a master says so: a killed master's lease lasts equally long."""
_LEASE_S: Final = 10.0
"""How long a process that cannot lead waits before it raises its error. By then, the 5 s lease of a killed master has
expired."""
_LINGER_S: Final = 3.0
"""How long a finished master waits for the other processes to learn that the job is done: they ask every second."""
_REPORT_S: Final = 1.0
"""Poll interval for the master's report, which is renewed at the same interval."""
_MOST_LISTED: Final = 20
"""Maximum number of given-up shards listed; the rest are only counted."""
_FORMAT: Final = 1
"""Format of a `LabelAgreement`, so that a different version of EDL raises an error instead of misreading it."""
_SHARDS, _LEAST_ROWS, _MOST_ROWS = 64, 32, 1024
"""At least 64 shards, so that a dozen processes end at about the same time. However, a shard has 32 to 1,024
rows, of which 1,024 take between a second and a minute, and never fewer rows than a request."""
_OPTIONS: Final = {
    "model": "--model",
    "version": "--model-version",
    "outputs": "--outputs",
    "top_k": "--top-k",
    "temperature": "--temperature",
    "dtype": "--dtype",
    "dataset": "--dataset",
    "service": "--service or --teachers",
    "inputs": "--inputs",
}
"""The option that sets each field of a key."""


def _shard_rows(rows: int, batch_rows: int) -> int:
    """Return the number of rows per shard: a power of two, or the rows of a request if larger."""
    wanted = max(rows // _SHARDS, 1)
    return max(min(max(1 << (wanted.bit_length() - 1), _LEAST_ROWS), _MOST_ROWS), batch_rows)


@dataclass(frozen=True)
class LabelAgreement:
    """The data of a job and the key of its labels, which includes the model's version."""

    data: DataFingerprint
    key: CacheKey

    def to_json(self) -> str:
        """Return the same text for equal agreements."""
        fields = {"format": _FORMAT, "data": asdict(self.data), "key": json.loads(self.key.to_json())}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> LabelAgreement:
        """Parse the text of `to_json`; ProtocolError if it has a different format."""
        try:
            fields = json.loads(text)
            if fields["format"] != _FORMAT:
                raise ValueError(f"format {fields['format']!r}")
            data, key = (json.dumps(fields[name]) for name in ("data", "key"))
            return cls(DataFingerprint.from_json(data), CacheKey.from_json(key))
        except (ValueError, TypeError, KeyError) as exc:
            raise ProtocolError(f"this version of EDL cannot read the job's description of its labels: {exc}") from exc

    def plan_differences(self, data: DataFingerprint, plan: LabelPlan) -> list[str]:
        """Describe how this process's data and options differ from the job's, as far as known without teachers."""
        spec = plan.output_spec
        here = {
            "outputs": spec.outputs,
            "top_k": spec.top_k,
            "temperature": spec.temperature if spec.top_k is not None else 1.0,
            "dtype": spec.dtype,
            "dataset": plan.dataset,
        }
        named = {"model": plan.teachers.model or spec.model, "version": spec.version}
        here |= {name: value for name, value in named.items() if value}
        return data.differences(self.data, "in the job") + self.key_differences(here)

    def key_differences(self, here: Mapping[str, Any]) -> list[str]:
        """Describe how the key of this process's labels differs from the job's key."""
        there = vars(self.key)
        return [
            f"{_OPTIONS[name]}: {_words_of(value)} here, {_words_of(there[name])} in the job"
            for name, value in here.items()
            if value != there[name]
        ]


def _words_of(value: Any) -> str:
    if value in (None, "", ()):
        return "none"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def run_job(options: argparse.Namespace, guard: DataGuard, plan: LabelPlan, cache: SoftLabelCache) -> int:
    """Take part in the job until it has ended; return the exit code."""
    if not isinstance(guard.data, IndexedData):
        raise SettingsError(
            f"--job needs rows that can be loaded one by one, but {options.data!r} is read in sequence: return "
            "a Dataset with __len__ and __getitem__ (and do not take --ids from its samples), or write arrays to an "
            ".npz file"
        )
    with exit_on_sigterm():  # shards are returned at once
        return _Worker(options, guard, plan, cache).run()


class _Worker:
    def __init__(self, options: argparse.Namespace, guard: DataGuard, plan: LabelPlan, cache: SoftLabelCache) -> None:
        self._options = options
        self._job: str = options.job
        self._guard = guard
        self._plan = plan
        self._cache = cache
        self._key: CacheKey | None = None  # the key of the job's labels

    def run(self) -> int:
        url = DiscoverySettings.of(self._options.store).url
        credentials = self._plan.options.credentials or Credentials.of()
        host = self._options.host or default_host(url)
        warn_of_open_port(host, credentials)
        settings = MasterSettings(store=url, journal="store:", host=host, credentials=credentials)
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(open_store(url, credentials=credentials))
            master = stack.enter_context(MasterServer(self._job, settings))
            client = stack.enter_context(MasterClient(self._job, store, timeout_s=_MASTER_S, credentials=credentials))
            self._await_master(master, client)
            labeller = self._agreed(client)
            if labeller is None:
                print(f"job {self._job} is already done; no teacher was asked")
                return self._conclude(client, store, None)
            with contextlib.closing(labeller):
                progress = self._label(store, client, labeller)
            if master.is_leader:
                master.wait_done(_LINGER_S)
            return self._conclude(client, store, progress)

    def _await_master(self, master: MasterServer, client: MasterClient) -> None:
        begun = time.monotonic()
        warned = False
        while True:
            with contextlib.suppress(NoMasterError):  # the job is done, and the master has just ended
                if master.wait_leading(_LOOK_S) or master.rival:
                    client.status()
                    return
            waited_s = time.monotonic() - begun
            if master.failure is not None and waited_s > _LEASE_S:
                raise master.failure
            if waited_s > _MASTER_S:
                raise NoMasterError(f"no master of job {self._job!r} leads after {_MASTER_S:g} s: is the store up?")
            if waited_s > _SAY_AFTER_S and not warned:
                warned = True
                print(f"waiting for a master of job {self._job}; a lost master is replaced soon", file=sys.stderr)

    def _agreed(self, client: MasterClient) -> ShardLabeller | None:
        """Return a labeller that matches the job's agreement; None if the job is done."""
        while True:
            plan = self._plan
            found = client.describe_dataset(_DATASET)
            agreement = None if found is None else LabelAgreement.from_json(found.location)
            if agreement is not None:
                self._key = agreement.key
                self._refuse(agreement.plan_differences(self._guard.fingerprint, plan))
                if self._options.retry_poisoned:
                    shards = counted(client.retry_poisoned(_DATASET), "shard")
                    print(f"{shards} that had been given up {'is' if shards == '1 shard' else 'are'} being retried")
                labels = _labels_of(client.status())
                if labels is not None and labels["finished"]:
                    return None
                # Ask only for the version that the first process found.
                plan = replace(plan, output_spec=replace(plan.output_spec, version=agreement.key.version))
            labeller = ShardLabeller(self._guard, plan, self._cache)
            try:
                key = labeller.key()
                if agreement is not None:
                    self._refuse(agreement.key_differences(vars(key)))
                    return labeller
                with contextlib.suppress(ConflictError):  # another process was first; its agreement counts
                    client.create_dataset(_DATASET, self._new_dataset(LabelAgreement(self._guard.fingerprint, key)))
            except BaseException:
                labeller.close()
                raise
            labeller.close()

    def _new_dataset(self, agreement: LabelAgreement) -> DatasetSpec:
        rows = agreement.data.rows
        return DatasetSpec(
            kind="labels",
            location=agreement.to_json(),
            units=rows,
            shard_size=self._options.shard or _shard_rows(rows, self._plan.batch_rows),
            epochs=1,
            lease_s=max(self._options.worker_timeout, 60.0),
            session_s=self._options.worker_timeout,
            ignore_expiries=True,  # processes may be killed any number of times
        )

    def _refuse(self, differences: list[str]) -> None:
        if differences:
            raise ConflictError(
                f"job {self._job!r} has other data or options: {'; '.join(differences)}. Use those of its other "
                "workers, or name another job"
            )

    def _label(self, store: Store, client: MasterClient, labeller: ShardLabeller) -> LabelProgress:
        here = LabelProgress()

        def note(progress: LabelProgress) -> None:
            nonlocal here
            here = progress

        def show_report() -> float:
            with contextlib.suppress(DiscoveryError):
                labels = _labels_of(read_report(store, self._job))
                if labels is not None:
                    done, total = labels["units_done"], labels["units"]
                    screen(done, total, labels["units_per_s"], labels["eta_s"], _who(labels, here))
            return _REPORT_S

        with (
            open_screen() as screen,
            contextlib.closing(BackgroundLoop("edl-label-progress", show_report)),
            # `closing`, since leaving the reader with an error would report a failure of each shard that it holds.
            contextlib.closing(ShardReader(client, _DATASET, explicit=True, on_poisoned="warn")) as reader,
        ):
            source = _MasterShards(reader, lambda: _note_folder(store, self._job, self._options.output))
            return labeller.label_shards(source, note)

    def _conclude(self, client: MasterClient, store: Store, progress: LabelProgress | None) -> int:
        labels = self._final_labels(client, store)
        folders = _label_folders(store, self._job)
        missing, gone = self._missing(labels, folders)
        kind = kind_of(self._guard.data)
        if progress is not None and self._key is not None:
            print(
                f"{progress.labelled:,} {kind} labelled here by {model_of(self._key)} in {progress.seconds:.1f} s; "
                f"{progress.known:,} already had a label in {self._options.output}"
            )
        print(f"job {self._job}: {labels['units_done'] - missing:,} of {labels['units']:,} {kind} have a label")
        if self._key is not None and (progress is not None or labels["units_done"]):
            for folder, hosts in folders.items():
                print(f"  {folder} ({', '.join(hosts)})")
            if folders:
                print_use(self._key, [*folders], self._guard.data)
        if missing or gone:
            what = f"labels of {missing:,} {kind} are missing" if missing else "labels are missing"
            where = f"folder {gone[0]} is gone" if gone else "their folder was deleted or used for other data"
            raise ConflictError(f"{what}, though the job had finished them ({where}): label again with another --job")
        if labels["shards"]["poisoned"]:
            _list_poisoned(labels)
            return EXIT_POISONED
        return 0

    def _missing(self, labels: Mapping[str, Any], folders: Mapping[str, list[str]]) -> tuple[int, list[str]]:
        """Return how many labels are gone from disk, and which folders are gone, as far as this host can tell."""
        here = [Path(folder) for folder, hosts in folders.items() if socket.gethostname() in hosts]
        gone = [str(folder) for folder in here if not folder.is_dir()]
        data, key = self._guard.data, self._key
        poisoned = labels["poisoned"]
        assert isinstance(data, IndexedData)
        if (
            key is None
            or not here
            or any(hosts != [socket.gethostname()] for hosts in folders.values())
            or len(poisoned) < labels["shards"]["poisoned"]  # more than a report lists
        ):
            return 0, gone
        there: set[SampleId] = set()
        for path in here:
            if path.is_dir():
                with contextlib.closing(LabelFolder(path, read_only=True)) as folder:
                    space = Namespace(key)
                    if self._guard.fits(folder.data_set(space)):
                        there.update(folder.ids(space))

        def is_there(ids: list[SampleId], _: object) -> Array:
            return np.fromiter((sample in there for sample in ids), np.bool_, len(ids))

        missing = data.unknown(is_there)
        for shard in poisoned:
            missing = missing[(missing < shard["start"]) | (missing >= shard["stop"])]
        return len(missing), gone

    def _final_labels(self, client: MasterClient, store: Store) -> Mapping[str, Any]:
        """Return the last report about the labels. The master's process may have ended since then."""
        with contextlib.suppress(DiscoveryError):
            labels = _labels_of(read_report(store, self._job))
            if labels is not None and labels["finished"]:
                return labels
        labels = _labels_of(client.status())
        if labels is None:
            raise PermanentError(
                f"the store lost the progress of job {self._job!r}; the labels in the folder are kept: run the "
                "same command with another --job"
            )
        return labels


class _MasterShards(ShardSource):
    """Shards that a reader gets from the master. `on_done` is called once, before a done shard is first reported."""

    def __init__(self, reader: ShardReader, on_done: Callable[[], None]) -> None:
        self._reader: Final = reader
        self._on_done: Callable[[], None] | None = on_done

    def take(self, timeout_s: float) -> RowShard | None:
        shard = self._reader.take(timeout_s)
        if shard is not None:
            return RowShard(shard.start, shard.stop, shard)
        if self._reader.away_s > _MASTER_S:
            raise NoMasterError(
                f"no master has answered for {_MASTER_S:g} s. All labels so far are on disk: run the same command "
                "again when the store responds"
            )
        return None

    @property
    def finished(self) -> bool:
        return self._reader.finished

    def report_done(self, shard: RowShard) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done()
        # Does not wait: after a lost report the rows are only looked up again.
        self._reader.report_done(shard.lease, wait=False)

    def report_failed(self, shard: RowShard, reason: str) -> None:
        self._reader.report_failed(shard.lease, reason, wait=False)


def _labels_of(report: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    datasets = report.get("datasets") if report is not None else None
    found = [each for each in datasets or () if isinstance(each, dict) and each.get("name") == _DATASET]
    return found[0] if found else None


def _who(labels: Mapping[str, Any], here: LabelProgress) -> str:
    poisoned = labels["shards"]["poisoned"]
    parts = [counted(len(labels["holders"]), "worker"), *([f"{counted(poisoned, 'shard')} given up"] * bool(poisoned))]
    return ", ".join([*parts, f"{here.labelled:,} rows here from {counted(here.teachers_live, 'teacher')}"])


def _list_poisoned(labels: Mapping[str, Any]) -> None:
    poisoned = labels["shards"]["poisoned"]
    print(f"{counted(poisoned, 'shard')} given up, with rows that no teacher could label:", file=sys.stderr)
    listed = labels["poisoned"][:_MOST_LISTED]
    for shard in listed:
        failures = shard["failures"]
        last = failures[-1] if failures else {"reason": "", "holder": "?"}
        print(
            f"  rows {shard['start']} to {shard['stop'] - 1}, {counted(len(failures), 'failure')}, the last by "
            f"{last['holder']}: {last['reason']}",
            file=sys.stderr,
        )
    if poisoned > len(listed):
        print(f"  and {poisoned - len(listed):,} more", file=sys.stderr)
    print("The same command with --retry-poisoned retries them.", file=sys.stderr)


def _note_folder(store: Store, job: str, folder: str) -> None:
    """Record in the store that a folder on this host has labels of the job, so that every process can list it."""
    value = json.dumps({"host": socket.gethostname(), "folder": os.path.realpath(folder)}).encode()
    try:
        store.put(f"{_folders_key(job)}{hashlib.blake2b(value, digest_size=8).hexdigest()}", value)
    except DiscoveryError as exc:  # an outage of the store is no reason to stop
        logger.warning("the store has no record that %s has labels of the job: %s", folder, exc)


def _label_folders(store: Store, job: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        for entry in store.list(_folders_key(job)):
            try:
                value = json.loads(entry.value)
                found.setdefault(str(value["folder"]), []).append(str(value["host"]))
            except (ValueError, TypeError, KeyError):
                logger.warning("invalid record in the store at %s", entry.key)
    except DiscoveryError as exc:
        logger.warning("the folders of the job are unknown: %s", exc)
    return {folder: sorted(hosts) for folder, hosts in sorted(found.items())}


def _folders_key(job: str) -> str:
    return f"label_folders/{job}/"
