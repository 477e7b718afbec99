"""`edl status` of a job or pool of a cluster: what Kubernetes knows of it, and what its agents report in a store."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from edl.cli._changes import printable
from edl.cli.kube.member_logs.follower import list_pods
from edl.cli.kube.phases import FINAL_PHASES
from edl.cli.kube.targets import Target, find_target
from edl.cli.kube.workload_view import WorkloadEvent, decode_events, workload_view
from edl.dashboard.state.cluster.decoding import decode_workload
from edl.dashboard.state.cluster.schema import KubernetesWorkload
from edl.dashboard.state.jobs import read_job_status
from edl.dashboard.state.reader import shown_url
from edl.dashboard.state.schema import JobStatus, as_json
from edl.discovery import Store, open_store
from edl.errors import EDLError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.resource_types import EVENTS
from edl.quoting import shown
from edl.settings import DiscoverySettings

__all__ = ["WorkloadLook", "WorkloadStatus", "show_workload"]

_EVERY_S: Final = 2.0
"""Between two looks of `--watch`: three requests each."""
_STORE_S: Final = 3.0
"""For the store of a job to answer: it may be one that only pods reach."""

_SERVICE: Final = re.compile(r"edl://([a-z0-9-]+)\.([a-z0-9-]+)(?:\.[a-z0-9.-]+)?:(\d+)")
"""URL of a store behind a service of the cluster, as the chart has it, of letters that are safe in a command."""


@dataclass(frozen=True)
class WorkloadLook:
    """A job or pool at a moment.

    Attributes:
        item: with its members.
        events: oldest first.
        job: what its store says; None where it says nothing.
        trouble: why not, or why the rest is old; empty for neither.
    """

    item: KubernetesWorkload
    events: tuple[WorkloadEvent, ...]
    job: JobStatus | None
    trouble: str = ""


class WorkloadStatus:
    """Reads a job or pool again and again. A context manager.

    Args:
        client: of the cluster.
        target: what to read.
        events: how many of the last.
        store_url: where the user says that the job's store is; empty for where the job says.
    """

    def __init__(self, client: KubeClient, target: Target, events: int, store_url: str = "") -> None:
        self._client = client
        self._store_url = store_url
        self._target = target
        self._events = events
        self._store: Store | None = None
        self._last: WorkloadLook | None = None

    def read(self) -> WorkloadLook:
        """Look.

        Raises:
            SettingsError: the resource is gone.
            EDLError: the API server does not answer, or refuses.
        """
        target = self._target
        found = self._client.get(target.type, target.name)
        uid = found.get("metadata", {}).get("uid") if found is not None else None
        if found is None or uid != target.resource["metadata"].get("uid"):
            raise SettingsError(f"{target} has been deleted{'' if found is None else ', and another made of its name'}")
        pods = list_pods(self._client, Target(target.kind, target.name, found))
        events = self._client.list(EVENTS, field_selector=f"involvedObject.uid={uid}").items if self._events else []
        item = decode_workload(target.kind, found, pods)
        job, trouble = self._read_store(found.get("status") or {}, found.get("spec") or {}, item)
        self._last = WorkloadLook(item, decode_events(events, self._events), job, trouble)
        return self._last

    def read_again(self) -> WorkloadLook:
        """Look; where that cannot be, return what was known last, with the reason.

        Raises:
            SettingsError: the resource is gone.
        """
        try:
            return self.read()
        except SettingsError:
            raise
        except EDLError as exc:
            assert self._last is not None
            return WorkloadLook(self._last.item, self._last.events, self._last.job, f"as known last: {shown(exc)}")

    def _read_store(
        self, status: dict[str, Any], spec: dict[str, Any], item: KubernetesWorkload
    ) -> tuple[JobStatus | None, str]:
        """Ask the job's store; that it does not answer from here is no error of the job's."""
        url = self._store_url or status.get("store") or spec.get("store")
        if item.kind != "job" or not item.job_id or not isinstance(url, str) or not url:
            return None, ""
        place = f"what its agents report is in {shown_url(url)}"
        try:
            if self._store is None:
                self._store = self._open_store(url)
        except EDLError as exc:
            return None, f"{place}: {shown(exc)}"
        try:
            return read_job_status(self._store, item.job_id, self._events), ""
        except SettingsError:
            return None, ""  # its agents have not begun
        except EDLError as exc:
            return None, f"{place}, which does not answer from here: {shown(exc)}"

    def _open_store(self, url: str) -> Store:
        """Open a job's store.

        The author of a job chooses its store, and would otherwise get the token or a file of anyone who looks at the
        job. So only a store that the user named is opened.

        Raises:
            SettingsError: the store is not opened from here, and what to do.
            DiscoveryError: it cannot be opened just now.
        """
        if url in (self._store_url, DiscoverySettings.of().url):
            return open_store(url, timeout_s=_STORE_S)
        message = "refusing a store you did not name; pass --store"
        if found := _SERVICE.fullmatch(url):
            service, namespace, port = found.groups()
            forward = f"kubectl port-forward -n {namespace} service/{service} {port}"
            message += f" edl://localhost:{port} while `{forward}` runs"
        raise SettingsError(message)

    def __enter__(self) -> WorkloadStatus:
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._store.close()


def show_workload(
    client: KubeClient,
    options: argparse.Namespace,
    screen: Console,
    show_job: Callable[[JobStatus], RenderableType],
) -> None:
    """Run `edl status` for a job or pool of a cluster.

    Args:
        client: of the cluster.
        options: of `edl status`.
        screen: to print on.
        show_job: returns what is shown of a job of a store.

    Raises:
        SettingsError: there is none, or it was deleted meanwhile.
        EDLError: the API server does not answer, or refuses.
    """
    target = find_target(client, options.job)
    with WorkloadStatus(client, target, options.events, options.store or "") as status:
        look = status.read()
        if not options.watch:
            _print(screen, look, options, show_job)
            return
        if screen.is_terminal and not options.json:
            with Live(console=screen, auto_refresh=False) as live:
                while True:
                    live.update(_shown(look, show_job), refresh=True)
                    if look.item.phase in FINAL_PHASES:
                        return
                    time.sleep(_EVERY_S)
                    look = status.read_again()
        while True:
            _print(screen, look, options, show_job)
            if look.item.phase in FINAL_PHASES:
                return
            time.sleep(_EVERY_S)
            look = status.read_again()


def _print(
    screen: Console,
    look: WorkloadLook,
    options: argparse.Namespace,
    show_job: Callable[[JobStatus], RenderableType],
) -> None:
    if not options.json:
        screen.print(_shown(look, show_job))
        return
    job = None if look.job is None else as_json(look.job)
    if job is not None:
        del job["history"]
    fields = as_json(look.item) | {"events": as_json(look.events), "job": job, "trouble": look.trouble}
    print(json.dumps(fields, allow_nan=False), flush=True)


def _shown(look: WorkloadLook, show_job: Callable[[JobStatus], RenderableType]) -> RenderableType:
    item = look.item
    logs = f"edl logs {item.kind}/{item.name} -n {item.namespace} shows what its members write"
    parts = [workload_view(item, look.events, time.time(), logs)]
    if look.job is not None:
        parts += [Text(""), show_job(look.job)]
    if look.trouble:
        parts.append(Text(printable(look.trouble), "yellow"))
    return Group(*parts)
