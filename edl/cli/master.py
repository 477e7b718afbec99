"""`edl master`: hand out a job's data to its workers in shards, without losing any.

Besides the master, the command runs an advisor, which decides how many teachers and workers are wanted. The command
connects the job's ledger (`edl.collective`) with the advisor (`edl.master.scaling`), because these two packages do not
import each other.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from prometheus_client import CollectorRegistry

from edl.collective.goodput import JobSummary, read_job
from edl.command_line import CommandParser, Once, duration, port
from edl.datasets import Dataset, Follower, FollowSettings, ShardSettings, open_dataset
from edl.discovery import Store, open_store
from edl.discovery.served.addresses import is_loopback
from edl.end_signals import collect_signals
from edl.errors import ConflictError, ProtocolError, SettingsError
from edl.log_output import log_to_stderr
from edl.master.client import MasterClient
from edl.master.naming import read_report, report_key
from edl.master.scaling.advisor import ScalingAdvisor, WorkerAdvice
from edl.master.scaling.teachers import TeacherScalingSettings
from edl.master.scaling.workers import ThroughputHistory, WorkerObservation, WorkLeft, decide_workers
from edl.master.server import MasterServer, MasterSettings
from edl.protocol.master import DatasetSpec
from edl.quoting import did_you_mean, listed
from edl.settings import Credentials, DiscoverySettings

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.2
"""Poll interval for a signal, the end of the job or a failure."""
_ASK_S: Final = 10.0
"""Timeout for a leading master to put poisoned shards back, or to record that a source has grown."""
_POISONED, _BY_SIGNAL = 3, 128
"""Exit codes: 3 if shards were given up; after a signal, 128 plus the signal's number, as in a shell."""

_OPTION_OF: Final = {
    **dict.fromkeys(("kind", "location", "units"), "--data"),
    **{name: "--" + name.replace("_", "-") for name in ("shard_size", "epochs", "shuffle", "seed", "max_failures")},
    **dict.fromkeys(("session_s", "lease_s"), "--session"),
    "commit": "--commit",
}
"""The option that sets a field of the data set's specification."""

_DESCRIPTION = """\
Hands out the data of a job to its workers in shards, each to a single worker at a time. The master journals each action
before it answers: you can kill and restart the master, or any worker, at any moment, and no sample is lost or done
twice. Workers (ShardReader, ShardDataset, edl label --job) find the master in the store, and wait while it is down.

The master ends when all of its data sets are done: with exit code 0, or 3 if shards were given up after repeated
failures (`edl status JOB` says why, `--retry-poisoned` puts them back). The same command continues where an earlier one
was stopped or killed. SIGTERM and Ctrl-C stop the master at once; nothing is lost, and workers wait for the next
master. A second master of the job stands by and takes over within --lease seconds when the first is lost."""

_EXAMPLES = """\
examples:
  edl master labels --data lines:/data/corpus.txt --shard-size 1000
      a text file, 1,000 lines per shard; workers on this machine use ShardReader(MasterClient("labels"), "data")
  edl master train --data 'parquet:/data/part-*.parquet' --epochs 3 --shuffle --seed 7
      three passes over a table, each with its shards in a new order
  edl master train --store consul://10.0.0.7:8500 --host :: --data range:1000000 --shard-size 64
      for workers on other hosts; the same command on another host starts a standby master
  edl master stream --data follow:/var/log/events.jsonl --end-marker /var/log/events.end
      a growing file, until the second file exists
  edl master labels --retry-poisoned
      retries the shards that were given up"""


def main(argv: Sequence[str]) -> int:
    """Run `edl master`."""
    options = _parser().parse_args(argv)
    log_to_stderr("edl master", verbose=options.verbose, log_format=options.log_format)
    url = DiscoverySettings.of(options.store).url
    credentials = Credentials.of_options(vars(options))
    journal = options.journal or _default_journal(url, options.job)
    if options.new and not journal.startswith("sqlite:"):
        raise SettingsError("--new: a journal in the store cannot be set aside; choose another job name")
    if options.retry_poisoned and options.data is None:
        _check_known(options.job, url, credentials, journal)
    settings = MasterSettings(
        store=url,
        journal=journal,
        host=options.host,
        port=options.port,
        lease_s=options.lease,
        begin_anew=options.new,
        retry_poisoned=options.retry_poisoned,
        credentials=credentials,
    )
    if not url.startswith("sqlite:") and is_loopback(options.host):
        logger.warning("workers on other hosts cannot reach %s: pass --host :: to listen for them too", options.host)
    warn_of_open_port(options.host, credentials)
    dataset = _dataset(options)
    specs = {} if dataset is None else {options.name: dataset.spec}
    following = FollowSettings(end_after_s=options.end_after, end_marker=options.end_marker)
    metrics = CollectorRegistry()
    master: MasterServer | None = None
    with collect_signals() as caught, contextlib.ExitStack() as stack:
        # The master starts last: with --new it sets a journal aside, so everything that may fail must come before.
        if options.http_port is not None:
            stack.enter_context(_page(options, url, credentials, metrics))
        if not options.no_advice:
            store = stack.enter_context(open_store(url, credentials=credentials))
            stack.enter_context(_open_advisor(store, options, lambda: master is not None and master.is_leader))
        master = stack.enter_context(MasterServer(options.job, settings, specs, metrics=metrics))
        stream = stack.enter_context(
            contextlib.closing(_StreamFollower(master, options.name, dataset, following, credentials))
        )
        begun = time.monotonic()
        while not caught and master.failure is None:
            stream.check()
            if master.wait_done(_POLL_S) and not options.stay:
                break
            if options.retry_poisoned and master.rival:
                return _retry(options.job, url, credentials, specs)
        if caught:
            logger.warning("stopped by %s; the same command continues from here", signal.Signals(caught[0]).name)
            return _BY_SIGNAL + caught[0]
        if master.failure is not None:
            raise _by_option(master.failure)
        return _conclude(options.job, master.status(), time.monotonic() - begun)


def _page(
    options: argparse.Namespace, url: str, credentials: Credentials, metrics: CollectorRegistry
) -> contextlib.AbstractContextManager[object]:
    """Serve this job's dashboard, with the metrics that only the master has."""
    from edl.dashboard.server import DashboardServer, DashboardSettings  # here, because only a page needs aiohttp

    settings = DashboardSettings(
        url,
        host=options.http_host,
        port=options.http_port,
        job=options.job,
        credentials=credentials,
        store_credentials=credentials,
    )
    page = DashboardServer(settings, [metrics])
    logger.info("the page of job %s is at %s", options.job, page.url)
    return page


class _StreamFollower:
    """While a master leads, follows the data set that the master was started with, if that data set grows."""

    def __init__(
        self,
        master: MasterServer,
        name: str,
        dataset: Dataset | None,
        settings: FollowSettings,
        credentials: Credentials,
    ) -> None:
        self._master = master
        self._name = name
        self._dataset = dataset if dataset is not None and dataset.grows else None
        self._settings = settings
        self._credentials = credentials
        self._client: MasterClient | None = None
        self._follower: Follower | None = None

    def check(self) -> None:
        """Follow the data set only while the master leads; raise the EDLError that ended the follower, if any."""
        if self._dataset is None:
            return
        if not self._master.is_leader:
            self.close()
        elif self._follower is None:
            endpoint, job = self._master.endpoint, self._master.job
            self._client = MasterClient(job, endpoint=endpoint, timeout_s=_ASK_S, credentials=self._credentials)
            self._follower = Follower(self._client, self._name, self._dataset, self._settings)
            self._follower.start()
        elif self._follower.error is not None:
            raise self._follower.error

    def close(self) -> None:
        client, self._client = self._client, None
        follower, self._follower = self._follower, None
        if client is not None:
            client.close()  # first: the follower may be in a call
        if follower is not None:
            follower.close()


def _parser() -> CommandParser:
    parser = CommandParser("edl master", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("job", metavar="JOB", help="name of the job, which workers ask for")
    parser.add_store_option("where workers find the master")
    add("--host", default="127.0.0.1", help="address to listen on; :: for all (default: 127.0.0.1)")
    add("--stay", action="store_true", help="keep running when all is done: workers may create more data sets")
    add("--new", action="store_true", help="start the job over: set the current journal aside")
    add("--retry-poisoned", action="store_true", help="retry shards that were given up")
    add = parser.add_argument_group("data (workers can create it too: MasterClient.create_dataset)").add_argument
    add(
        "--data",
        metavar="SPEC",
        action=Once,
        remedy="a master starts with one data set; a worker can create more (MasterClient.create_dataset)",
        help="range:N, lines:PATH, csv:PATH, parquet:PATH, files:PATTERN, follow:PATH, …",
    )
    add("--shard-size", type=int, metavar="N", help="samples, lines, rows or files per shard (default: by kind)")
    add("--epochs", type=int, default=1, metavar="N", help="passes over the data; 0: no limit (default: 1)")
    add("--shuffle", action="store_true", help="shuffle the shards of each epoch")
    add = parser.add_advanced_group("more about the data").add_argument
    add("--name", default="data", help="name of the data set in the job (default: data)")
    add("--end-marker", default="", metavar="PATH", help="treat the stream as ended when this file exists")
    add("--end-after", type=duration(), metavar="TIME", help="treat the stream as ended after this much silence")
    add("--seed", type=int, default=0, metavar="N", help="shuffle seed (default: 0)")
    add("--max-failures", type=int, default=3, metavar="N", help="give a shard up after N failures (default: 3)")
    silence = "silence before a worker counts as lost (default: 30s)"
    add("--session", type=duration(0.1, 30 * 86400), default=30.0, metavar="TIME", help=silence)
    counts = "when a shard counts as done: when reported, or when a reader's state_dict() covers it (default: report)"
    add("--commit", choices=("report", "checkpoint"), default="report", help=counts)
    add = parser.add_advanced_group("the server").add_argument
    journal = (
        "where progress is kept: sqlite:///path, or store: for the store itself, so that a master on another host can "
        "take over (default: a file beside the store's file; else store:)"
    )
    add("--journal", metavar="URL", help=journal)
    add("--port", type=port, default=0, help="port to listen on (default: any; workers find it in the store)")
    page = "port for a web page and /metrics; 0 for a free port (docs/dashboard.md)"
    add("--http-port", type=port, metavar="N", help=page)
    add("--http-host", default="127.0.0.1", metavar="HOST", help="address of the page (default: 127.0.0.1)")
    takeover = "time after which a standby takes over (default: 5s)"
    add("--lease", type=duration(0.5, 86400), default=5.0, metavar="TIME", help=takeover)
    title = "advice on how many teachers and workers are wanted (docs/scaling.md); nothing is started or stopped here"
    add = parser.add_advanced_group(title).add_argument
    add("--min-teachers", type=int, default=0, metavar="N", help="minimum per service in the store (default: 0)")
    add("--max-teachers", type=int, metavar="N", help="maximum per service in the store (default: no limit)")
    add("--min-workers", type=int, default=1, metavar="N", help="minimum for JOB under `edl run` (default: 1)")
    add("--max-workers", type=int, metavar="N", help="maximum for JOB (default: no advice about workers)")
    add("--no-advice", action="store_true", help="give no advice")
    parser.add_credentials("client", "workers")
    parser.add_log_options()
    return parser


def _dataset(options: argparse.Namespace) -> Dataset | None:
    if options.data is None:
        return None
    settings = ShardSettings(
        shard_size=options.shard_size,
        epochs=options.epochs,
        shuffle=options.shuffle,
        seed=options.seed,
        max_failures=options.max_failures,
        session_s=options.session,
        lease_s=max(options.session, ShardSettings.lease_s),
        commit=options.commit,
    )
    dataset = open_dataset(options.data, settings)
    logger.info("%s: %s", options.name, dataset.describe())
    return dataset


def _default_journal(url: str, job: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "sqlite":
        return "store:"
    file = f"{quote(job, safe='')}.master.sqlite"
    folder = Path("/" + unquote(parts.path).lstrip("/")).parent  # a leading "//" names the same place
    return f"sqlite://{quote(str(folder / file))}"


def _check_known(job: str, url: str, credentials: Credentials, journal: str) -> None:
    """Refuse to retry shards of a job that never had a master: its name was probably mistyped."""
    if journal.startswith("sqlite:") and Path(unquote(urlsplit(journal).path)).exists():
        return
    reports = report_key("")
    with open_store(url, credentials=credentials) as store:
        known = sorted(entry.key.removeprefix(reports) for entry in store.list(reports))
    if job not in known:
        near = did_you_mean(job, known) or f"; known jobs: {listed(known) or 'none'}"
        raise SettingsError(f"--retry-poisoned: no master has run a job named {job!r} here{near}")


def _retry(job: str, url: str, credentials: Credentials, specs: Mapping[str, DatasetSpec]) -> int:
    """Ask the leading master to put poisoned shards back, unless its data sets differ from this command's data sets."""
    with MasterClient(job, url, timeout_s=_ASK_S, credentials=credentials) as client:
        for name, spec in specs.items():
            if client.describe_dataset(name) is not None:
                try:
                    client.create_dataset(name, spec)  # does nothing if the specification is the same
                except ConflictError as exc:
                    raise _by_option(exc) from exc
        names = [str(dataset["name"]) for dataset in client.status()["datasets"]]
        for name in names:
            print(f"{name}: {client.retry_poisoned(name):,} shards put back")
    return 0


def _by_option(failure: BaseException) -> BaseException:
    """Return the error, with the name of each differing field replaced by the option that sets the field."""
    if not isinstance(failure, ConflictError):
        return failure
    fields = "|".join(_OPTION_OF)
    return ConflictError(re.sub(rf"\b({fields})(?= is )", lambda found: _OPTION_OF[found[1]], str(failure)))


def _conclude(job: str, status: dict[str, Any], seconds: float) -> int:
    poisoned = 0
    for dataset in status["datasets"]:
        shards = dataset["shards"]
        poisoned += shards["poisoned"]
        given_up = f", {shards['poisoned']:,} given up" if shards["poisoned"] else ""
        print(f"{dataset['name']}: {dataset['units_done']:,} units done{given_up}, in {seconds:.1f} s")
        for shard in dataset["poisoned"]:
            reasons = "; ".join(f"{failure['holder']}: {failure['reason']}" for failure in shard["failures"])
            print(f"  shard {shard['shard']} ({shard['start']:,} to {shard['stop']:,}): {reasons}")
    if poisoned:
        print(f"`edl master {job} --retry-poisoned` puts them back")
    return _POISONED if poisoned else 0


def default_host(store_url: str) -> str:
    """Return a master's default listen address: only this host if the store is a file, which other hosts cannot open.

    Otherwise, return the address that stands for all IPv6 and IPv4 addresses, because processes on all hosts must be
    able to reach the leading master.
    """
    return "127.0.0.1" if store_url.startswith("sqlite:") else "::"


def warn_of_open_port(host: str, credentials: Credentials) -> None:
    """Log a warning if other hosts can reach a master that requires neither a token nor a certificate."""
    mutual_tls = credentials.cert is not None and credentials.ca is not None
    if is_loopback(host) or credentials.token_file is not None or mutual_tls:
        return
    logger.warning(
        "the master listens on %s without a token: anyone who reaches its port can take and report the job's shards; "
        "set --token-file, or --host ADDRESS (docs/security.md)",
        host,
    )


# --- Advice ---

_SAMPLE_S: Final = 10.0
"""Interval between samples of a job's rate: workers average their own rates over several seconds."""
_PAUSE_S: Final = 30.0
"""Assumed cost of resizing a job, until it has been measured."""
_PAUSES: Final = ("rendezvous", "load", "rollback")
"""Categories of the time that resizing a job costs: workers meet, load the state, and repeat lost work."""


def _open_advisor(store: Store, options: argparse.Namespace, leads: Callable[[], bool]) -> ScalingAdvisor:
    settings = TeacherScalingSettings(least=options.min_teachers, most=options.max_teachers)
    workers = None
    if options.max_workers is not None:
        if not 1 <= options.min_workers <= options.max_workers:
            raise SettingsError(
                f"--min-workers {options.min_workers} --max-workers {options.max_workers}: expected 1 or more, and the"
                " maximum not below the minimum"
            )
        workers = WorkerAdviser(store, options.job, options.min_workers, options.max_workers, leads)
    return ScalingAdvisor(store, settings, workers=workers)


class WorkerAdviser:
    """Decides a job's number of workers from the ledger of its agents, while `leads` says that this master leads."""

    def __init__(
        self,
        store: Store,
        job: str,
        least: int,
        most: int,
        leads: Callable[[], bool] = lambda: True,
        *,
        sample_s: float = _SAMPLE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._job = job
        self._least = least
        self._most = most
        self._leads = leads
        self._sample_s = sample_s
        self._clock = clock
        self._history = ThroughputHistory()
        self._left = WorkLeft()
        self._generation = -1
        self._sampled_s = float("-inf")
        self._advice: WorkerAdvice | None = None

    def __call__(self) -> WorkerAdvice | None:
        """Return how many workers a job should have; None if it does not run, has no rate, or a rival leads."""
        if not self._leads():
            self._advice = None
            return None
        now_s = time.monotonic()
        if now_s - self._sampled_s < self._sample_s:
            return self._advice
        self._sampled_s = now_s
        self._advice = None
        try:
            summary = read_job(self._store, self._job, self._clock())
        except (SettingsError, ProtocolError):  # the job does not exist yet, or a different version wrote it
            return None
        settled = summary.generation == self._generation  # else the rate may be the previous size's
        self._generation = summary.generation
        rate = summary.samples_per_s or summary.steps_per_s
        if summary.state != "running" or summary.world_size < 1 or not rate:
            return None
        if settled:
            self._history = self._history.record_rate(summary.world_size, rate, now_s)
        else:
            self._left.resize()
        decision = decide_workers(self._observe(summary, rate, now_s))
        self._advice = WorkerAdvice(self._job, summary.world_size, decision)
        return self._advice

    def _observe(self, summary: JobSummary, rate: float, now_s: float) -> WorkerObservation:
        report = read_report(self._store, self._job)
        datasets = report.get("datasets") if report is not None else None
        rows = [row for row in datasets if isinstance(row, dict)] if isinstance(datasets, list) else []
        left_s = self._left.look(rows, now_s)
        paused_s = sum(summary.seconds[category] for category in _PAUSES)
        return WorkerObservation(
            workers=summary.world_size,
            min_workers=self._least,
            max_workers=self._most,
            history=self._history,
            now_s=now_s,
            remaining=None if left_s is None else left_s * rate,  # the master's units may differ from the job's
            pause_s=paused_s / (summary.generation + 1) or _PAUSE_S,
            age_s=summary.elapsed_s,
            moves=max(summary.generation, 0),
        )
