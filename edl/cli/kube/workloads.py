"""`edl jobs`, `scale`, `suspend`, `resume` and `delete`: jobs and pools of a Kubernetes cluster, as custom resources.

The operator does the work; these commands read and write `ElasticJob` and `TeacherPool` resources. They find the
cluster as kubectl does, and a resource by `NAME`, `job/NAME` or `pool/NAME`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edl.backoff import Backoff
from edl.cli.output import printable, show_looks
from edl.command_line import CommandParser, at_least, duration
from edl.errors import AccessDeniedError, ConflictError, EDLError, InvalidObjectError, KubernetesError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import ELASTIC_JOBS, NAMESPACES, PODS, TEACHER_POOLS, ResourceType
from edl.kube.settings import KubeSettings
from edl.master.kube.members.pods import JOB_LABEL, OWNER_UID_LABEL, POOL_LABEL
from edl.quoting import did_you_mean

SCRIPT_LABEL: Final = "edl.io/script-of"
"""Label of a script's ConfigMap: the job that it belongs to."""
INSTALL_HINT: Final = (
    "install EDL in the cluster: helm install edl serving/kube/chart --namespace edl --create-namespace "
    "--set image.repository=IMAGE, or, with your image in it, kubectl apply -f serving/kube/manifests/crds.yaml "
    "-f serving/kube/manifests/operator.yaml (docs/kubernetes-operators.md)"
)
ENDED_PHASES: Final = ("Succeeded", "Failed")
_TIMEOUT_S: Final = 10.0
"""Timeout of API requests, short because a user is waiting."""
_WAIT_S: Final = 120.0
"""Default for `edl delete --wait`: a member has 30 s to end unless its job says otherwise; a lost node takes longer."""
_LOOK_S: Final = 2.0
"""Refresh interval of `--watch`: the operator changes a status about as often."""
_WIDTH: Final = 200
"""Characters per line if the output is not a terminal, so that no row is wrapped."""
_KINDS: Final = {
    **dict.fromkeys(("job", "jobs", "ej", "elasticjob", "elasticjobs", "elasticjobs.edl.io"), "job"),
    **dict.fromkeys(("pool", "pools", "tp", "teacherpool", "teacherpools", "teacherpools.edl.io"), "pool"),
}
_TYPES: Final = {"job": ELASTIC_JOBS, "pool": TEACHER_POOLS}


def add_cluster_options(parser: CommandParser) -> None:
    """Add the options that `open_cluster` reads, with kubectl's names."""
    add = parser.add_argument_group("cluster").add_argument
    add("-n", "--namespace", metavar="NAME", help="namespace (default: the context's or the pod's own)")
    add_kubeconfig_options(add)


def add_kubeconfig_options(add: Callable[..., object]) -> None:
    """Add the options that choose the cluster and the user."""
    add("--context", metavar="NAME", default="", help="kubeconfig context (default: the current one)")
    file = "kubeconfig file (default: KUBECONFIG, the pod's service account, ~/.kube/config)"
    add("--kubeconfig", metavar="FILE", default="", help=file)


@contextlib.contextmanager
def open_cluster(options: argparse.Namespace, timeout_s: float = _TIMEOUT_S) -> Iterator[KubeClient]:
    """Open the selected cluster; SettingsError if there is none, InvalidObjectError if it lacks EDL's resources."""
    if options.namespace == "":
        raise SettingsError("--namespace '': expected a name; commands with -A can show all namespaces")
    settings = KubeSettings(options.kubeconfig, options.context, options.namespace or "", timeout_s)
    with KubeClient(settings) as client:
        try:
            with contextlib.suppress(AccessDeniedError):  # rights in a namespace may not include this
                if options.namespace and client.get(NAMESPACES, options.namespace) is None:
                    raise SettingsError(f"there is no namespace {options.namespace!r} in the cluster {client.url}")
            yield client
        except InvalidObjectError as exc:
            if client.has_resource(ELASTIC_JOBS):
                raise
            raise InvalidObjectError(f"{client.url} has no {ELASTIC_JOBS.group} resources: {INSTALL_HINT}") from exc


@dataclass(frozen=True)
class Target:
    """A job or pool that exists: `kind` is "job" or "pool", `resource` is what the API returned."""

    kind: str
    name: str
    resource: Object

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def type(self) -> ResourceType:
        """The resource type in the API."""
        return _TYPES[self.kind]

    @property
    def uid(self) -> str:
        """The resource's uid, which differs from the uid of a later resource with the same name."""
        return str(self.resource.get("metadata", {}).get("uid") or "")


def parse_target(text: str) -> tuple[str | None, str]:
    """Return the kind ("job", "pool", or None if not given) and the name."""
    kind, slash, name = text.rpartition("/")
    if not name:
        raise SettingsError(f"{text!r}: expected the name of a job or pool, job/NAME or pool/NAME")
    if not slash:
        return None, name
    if kind.lower() not in _KINDS:
        raise SettingsError(f"{text!r}: expected job/NAME or pool/NAME, not {kind!r}")
    return _KINDS[kind.lower()], name


def find_target(client: KubeClient, text: str) -> Target:
    """Find a job or pool in the client's namespace; SettingsError if there is neither, or both, with this name."""
    kind, name = parse_target(text)
    kinds = (kind,) if kind is not None else tuple(_TYPES)
    resources = {each: client.get(_TYPES[each], name) for each in kinds}
    found = [Target(each, name, resource) for each, resource in resources.items() if resource is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise SettingsError(f"{name!r} is both a job and a pool: say job/{name} or pool/{name}")
    there = [str(item.get("metadata", {}).get("name")) for each in kinds for item in client.list(_TYPES[each]).items]
    what = f"no {kind}" if kind is not None else "no job and no pool"
    hint = did_you_mean(name, there) or "; `edl jobs -A` lists those of all namespaces"
    raise SettingsError(f"there is {what} {name!r} in namespace {client.namespace!r}{hint}")


def list_pods(client: KubeClient, target: Target) -> list[Object]:
    """Return the pods of a job or pool."""
    label = JOB_LABEL if target.kind == "job" else POOL_LABEL
    return client.list(PODS, label_selector=f"{label}={target.name},{OWNER_UID_LABEL}={target.uid}").items


# --- edl jobs ---

_JOBS = """\
Shows the jobs (ElasticJob) and pools of teachers (TeacherPool) of a namespace: their phase, how many members are
ready and how many are wanted, their bounds, their progress, and why they wait. `edl status JOB` shows one job in full;
`kubectl get elasticjobs,teacherpools` shows the same resources."""

_JOBS_EXAMPLES = """\
examples:
  edl jobs                          in the context's namespace
  edl jobs -A --watch               in all namespaces, on each change, until Ctrl-C
  edl jobs --json | jq '.jobs[] | select(.phase == "Failed")'"""


def jobs(argv: Sequence[str]) -> int:
    """Run `edl jobs`."""
    parser = CommandParser("edl jobs", _JOBS, _JOBS_EXAMPLES)
    add = parser.add_argument
    add("-A", "--all-namespaces", action="store_true", help="in all namespaces")
    add("-w", "--watch", action="store_true", help="show changes until Ctrl-C")
    add("--json", action="store_true", help="print JSON; with --watch, one object per line")
    add_cluster_options(parser)
    options = parser.parse_args(argv)

    from edl.cli.kube.workload_status import cluster_view
    from edl.dashboard.state import as_json
    from edl.dashboard.state.cluster import read_cluster

    with open_cluster(options) as client:
        namespaces = () if options.all_namespaces else (client.namespace,)
        show_looks(
            lambda: read_cluster(client, namespaces),
            lambda status: cluster_view(status, time.time(), namespaces=options.all_namespaces),
            (lambda status: json.dumps(as_json(status), allow_nan=False)) if options.json else None,
            _WIDTH,
            every_s=_LOOK_S if options.watch else None,
            facts=lambda status: (status.jobs, status.pools),
        )
    return 0


# --- edl scale, suspend, resume ---

_SCALE = """\
Sets the size of a job (workers) or pool (teachers): writes `scaling: external` and `replicas: N` to its spec, so EDL
no longer decides the number. `auto` gives the decision back to EDL. `kubectl scale` changes only `replicas`, which
has no effect unless scaling is already external."""

_SCALE_EXAMPLES = """\
examples:
  edl scale first-job 4             four workers
  edl scale pool/digits 0           no teachers
  edl scale first-job 12 --max 12   more than the job was submitted with
  edl scale first-job auto          as many workers as are useful and fit, within the bounds"""

_OLD_MINIMUM: Final = (
    "running pods keep the minimum that they started with (`edl run --nnodes MIN:`); new pods get the new minimum"
)


def scale(argv: Sequence[str]) -> int:
    """Run `edl scale`."""
    parser = CommandParser("edl scale", _SCALE, _SCALE_EXAMPLES)
    add = parser.add_argument
    add("name", metavar="NAME", help="NAME, job/NAME or pool/NAME")
    add("count", metavar="N|auto", help="workers or teachers; auto: let EDL decide")
    add("--min", type=at_least(0), metavar="N", help="also change the minimum")
    add("--max", type=at_least(1), metavar="N", help="also change the maximum")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    if options.count != "auto" and not (options.count.isascii() and options.count.isdigit() and len(options.count) < 7):
        raise SettingsError(f"{options.count!r}: expected a number of workers or teachers, or auto")
    count = None if options.count == "auto" else int(options.count)
    with open_cluster(options) as client:
        target = find_target(client, options.name)
        client.patch(target.type, target.name, {"spec": scale_patch(target, count, options.min, options.max)})
    noun = "workers" if target.kind == "job" else "teachers"
    if target.kind == "job" and options.min is not None:
        print(f"edl scale: {printable(str(target))}: {_OLD_MINIMUM}", file=sys.stderr)
    if count is None:
        print(printable(f"{target}: EDL decides how many {noun} it has (scaling: auto)"))
    else:
        print(printable(f"{target}: {count} {noun} wanted (scaling: external; `edl scale {target} auto` undoes it)"))
    return 0


def scale_patch(target: Target, count: int | None, least: int | None, most: int | None) -> dict[str, Any]:
    """Return the patch of the spec, or raise SettingsError. `count` is None for auto; bounds of None stay unchanged."""
    spec = target.resource.get("spec", {})
    default = 1 if target.kind == "job" else 0
    low = spec.get("minReplicas", default) if least is None else least
    high = spec.get("maxReplicas", max(low, 1)) if most is None else most
    if low < default or high < max(low, 1):
        raise SettingsError(
            f"{target}: bounds {low} to {high} are invalid: the minimum must be at least {default}, and the maximum "
            "at least 1 and not below the minimum (--min, --max)"
        )
    if count is not None and not low <= count <= high:
        bound = f"--min {count}" if count < low else f"--max {count}"
        stop = f"; `edl suspend {target}` stops all of them" if count < low and target.kind == "job" else ""
        raise SettingsError(f"{target}: {count} is outside its bounds, {low} to {high}: change them with {bound}{stop}")
    patch: dict[str, Any] = {"scaling": "auto" if count is None else "external", "replicas": count}
    bounds = {"minReplicas": least, "maxReplicas": most}
    return patch | {name: bound for name, bound in bounds.items() if bound is not None}


_SUSPEND = """\
Stops all pods of a job or pool within its grace period, which frees their GPUs. When a job is resumed, it continues
from its last checkpoint, or begins again if it has none. Teachers drain before they are stopped."""
_RESUME = """\
Restarts the pods of a suspended job or pool. A job continues from its last checkpoint, or begins again if it has
none."""


def suspend(argv: Sequence[str]) -> int:
    """Run `edl suspend`."""
    return _set_suspended("suspend", argv, True, _SUSPEND)


def resume(argv: Sequence[str]) -> int:
    """Run `edl resume`."""
    return _set_suspended("resume", argv, False, _RESUME)


def _set_suspended(command: str, argv: Sequence[str], suspended: bool, description: str) -> int:
    examples = f"examples:\n  edl {command} first-job\n  edl {command} job/first-job pool/digits"
    parser = CommandParser(f"edl {command}", description, examples)
    parser.add_argument("names", nargs="+", metavar="NAME", help="NAME, job/NAME or pool/NAME")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    with open_cluster(options) as client:
        targets = [find_target(client, name) for name in options.names]  # find all before changing any
        for target in targets:
            phase = (target.resource.get("status") or {}).get("phase")
            if phase in ENDED_PHASES:
                print(printable(f"{target}: has ended ({phase}): there is nothing to {command}"))
                continue
            if (target.resource.get("spec", {}).get("suspend") is True) == suspended:
                print(printable(f"{target}: is {'suspended' if suspended else 'not suspended'} already"))
                continue
            client.patch(target.type, target.name, {"spec": {"suspend": suspended}})
            print(printable(f"{target}: {'suspended' if suspended else 'resumed'}"))
    return 0


# --- edl delete ---

_DELETE = """\
Deletes jobs and pools without asking. Kubernetes stops their pods within a grace period and removes everything
that belongs to them; registrations expire with their leases. Checkpoints are kept."""

_DELETE_EXAMPLES = """\
examples:
  edl delete first-job
  edl delete job/first-job pool/digits --wait     until their last pod is gone"""


def delete(argv: Sequence[str]) -> int:
    """Run `edl delete`."""
    parser = CommandParser("edl delete", _DELETE, _DELETE_EXAMPLES)
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help="NAME, job/NAME or pool/NAME")
    add("--wait", action="store_true", help="return when all are gone")
    add("--timeout", type=duration(), default=_WAIT_S, metavar="TIME", help="limit for --wait (default: 2m)")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    with open_cluster(options) as client:
        targets = [find_target(client, name) for name in options.names]  # find all before deleting any
        for target in targets:
            _delete(client, target)
            print(printable(f"{target}: deleted"), flush=True)
        if options.wait:
            _wait_gone(client, targets, options.timeout)
    return 0


def _delete(client: KubeClient, target: Target) -> None:
    """Delete exactly the resource that was found, not a newer resource with the same name."""
    try:
        client.delete(target.type, target.name, uid=target.uid)
    except ConflictError as exc:
        raise ConflictError(f"{target} has been recreated and is not deleted: {exc}") from exc


def _wait_gone(client: KubeClient, targets: Sequence[Target], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    backoff = Backoff(0.2, 2.0)
    left: list[str] = []
    trouble = ""
    while True:
        try:
            left = [item for target in targets for item in _left(client, target)]
            trouble = ""
        except KubernetesError as exc:  # the API server may be down for a moment; the deadline limits the wait
            trouble = f"; {exc}"
        if not left and not trouble:
            return
        if time.monotonic() >= deadline:
            hint = "a pod ends within its grace period, unless its node is lost: see `kubectl describe pod`"
            raise EDLError(f"not gone after {timeout_s:g} s: {', '.join(left[:10]) or 'unknown'}{trouble}; {hint}")
        time.sleep(min(backoff.next_wait_s(), max(0.0, deadline - time.monotonic())))


def _left(client: KubeClient, target: Target) -> list[str]:
    found = client.get(target.type, target.name)
    left = [str(target)] if found is not None and found.get("metadata", {}).get("uid") == target.uid else []
    return left + [f"pod/{pod.get('metadata', {}).get('name')}" for pod in list_pods(client, target)]
