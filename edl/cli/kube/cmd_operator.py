"""`edl operator`: runs ElasticJobs and TeacherPools of a Kubernetes cluster."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from typing import Final

from edl.cli._option_values import Port
from edl.cli.kube.connection import add_kubeconfig_options, command_parser
from edl.end_signals import collect_signals
from edl.errors import SettingsError
from edl.kube.settings import KubeSettings
from edl.log_output import log_to_stderr

__all__ = ["main"]

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.2
"""How soon a signal is noticed."""
_BY_SIGNAL: Final = 128
"""Exit code: as in a shell, this and the signal's number."""

_DESCRIPTION = """\
Works on the ElasticJobs and TeacherPools of a cluster: makes their pods, replaces those that end, grows into GPUs that
are idle, and gives them back. It finds the cluster as kubectl does, or by the service account of the pod that it runs
in. Normally the chart starts it (serving/kube/chart); on a machine of yours it does the same, with your rights.

Everything that it remembers stands in the status of the resources. Kill it at any moment: pods run on, and the next
operator goes on from there. A second one beside it does no harm. While the API server is away it waits.

What it needs: the CRDs, and the Role edl-operator in each namespace (docs/kubernetes-operators.md). With the
ClusterRole edl-capacity it sees what is idle before it starts a pod; without, a pod that waits is how it finds out.

SIGTERM and Ctrl-C end it: exit code 143 or 130. It serves /livez, /readyz and /metrics with --http-port."""

_EXAMPLES = """\
examples:
  edl operator --store consul://consul:8500
      the namespace of the kubeconfig's context; resources that name no store use this one
  edl operator --namespace team-a --namespace team-b --http-host :: --http-port 8652
      two namespaces, with probes and metrics for all interfaces
  edl operator --all-namespaces
      all of the cluster, where its account may read all pods
  kubectl get ej,tp; kubectl describe ej first-job
      what it says: columns, conditions and events"""


def main(argv: Sequence[str]) -> int:
    """Run `edl operator`."""
    parser = command_parser("operator", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add(
        "-n",
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="whose resources it works on; may be given several times (default: the context's, or the pod's own)",
    )
    add("-A", "--all-namespaces", action="store_true", help="work on those of all namespaces")
    add(
        "--store",
        metavar="URL",
        default="",
        help="store of resources that name none: edl://host:port, consul://host:port or etcd://host:port",
    )
    add(
        "--allow-store",
        action="append",
        default=[],
        metavar="PREFIX",
        help="a store of resources that it may read with its own credentials, beside --store: SCHEME://HOST:PORT,"
        " SCHEME://HOST or SCHEME://; may be given several times",
    )
    add(
        "--pod-security",
        choices=("baseline", "privileged"),
        default="baseline",
        help="what templates of jobs and pools may ask for: what this level of Pod Security allows (default: baseline;"
        " privileged allows all, such as hostPath and hostNetwork)",
    )
    add(
        "--allow-service-account",
        action="append",
        default=[],
        metavar="[NAMESPACE/]NAME",
        help="a service account that templates may name; may be given several times (default: none)",
    )
    add("--workers", type=int, default=4, metavar="N", help="resources that are worked on at once (default: 4)")
    add(
        "--resync",
        type=float,
        default=600.0,
        metavar="S",
        help="look at each resource so often even if nothing happens; more rarely with hundreds (default: 600)",
    )
    add("--no-capacity", action="store_true", help="do not look at nodes and all pods, even where that is allowed")
    add = parser.add_argument_group("cluster").add_argument
    add_kubeconfig_options(add)
    add("--timeout", type=float, default=10.0, metavar="S", help="for an answer of the API server (default: 10)")
    add = parser.add_argument_group("health and metrics").add_argument
    add("--http-port", action=Port, metavar="N", help="serve /livez, /readyz and /metrics there; 0 for a free port")
    add("--http-host", default="127.0.0.1", metavar="HOST", help="where that listens (default: 127.0.0.1)")
    add = parser.add_argument_group("log").add_argument
    add("--log-format", choices=("text", "json"), default="text", help="on standard error (default: text)")
    add("--verbose", action="store_true", help="debug lines, too")
    options = parser.parse_args(argv)
    log_to_stderr("edl operator", verbose=options.verbose, log_format=options.log_format)
    if options.all_namespaces and options.namespace:
        raise SettingsError("--all-namespaces beside --namespace: give either")
    if "" in options.namespace:
        raise SettingsError("--namespace '': expected a name")
    from edl.master.kube.members.pod_policy import PodPolicy
    from edl.master.kube.operator import ALL_NAMESPACES, Operator, OperatorSettings

    settings = OperatorSettings(
        kube=KubeSettings(options.kubeconfig, options.context, timeout_s=options.timeout),
        namespaces=(ALL_NAMESPACES,) if options.all_namespaces else tuple(dict.fromkeys(options.namespace)),
        store=options.store,
        allow_stores=tuple(options.allow_store),
        pods=PodPolicy(options.pod_security, tuple(options.allow_service_account)),
        workers=options.workers,
        resync_s=options.resync,
        capacity=not options.no_capacity,
        host=options.http_host if options.http_port is not None else None,
        port=options.http_port or 0,
    )
    with collect_signals() as caught:
        with Operator(settings) as operator:
            where = "all namespaces" if options.all_namespaces else ", ".join(operator.namespaces)
            health = f"; health and metrics on port {operator.port}" if operator.port is not None else ""
            logger.info("working on %s%s", where, health)
            while not caught:
                time.sleep(_POLL_S)
            logger.info("ending by %s; pods run on", signal.Signals(caught[0]).name)
        return _BY_SIGNAL + caught[0]
