"""How commands find a cluster, as kubectl does, and what they say where it lacks what EDL needs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from edl.errors import InvalidObjectError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.resource_types import ELASTIC_JOBS
from edl.kube.settings import KubeSettings

__all__ = ["INSTALL_HINT", "add_cluster_options", "add_kubeconfig_options", "command_parser", "open_cluster"]

INSTALL_HINT: Final = (
    "install EDL in the cluster: helm install edl serving/kube/chart --namespace edl --create-namespace "
    "--set image.repository=IMAGE, or, with your image in it, kubectl apply -f serving/kube/manifests/crds.yaml "
    "-f serving/kube/manifests/operator.yaml (docs/kubernetes-operators.md)"
)
_TIMEOUT_S: Final = 10.0
"""For the API server to answer: a person waits for it."""


def command_parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return the parser of a command for a cluster.

    Args:
        command: its name.
        description: what it does.
        examples: with the heading "examples:".
    """
    return argparse.ArgumentParser(
        prog=f"edl {command}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of which `open_cluster` takes the values, named as kubectl has them.

    Args:
        parser: of a command.
    """
    add = parser.add_argument_group("cluster").add_argument
    add("-n", "--namespace", metavar="NAME", help="(default: the context's, or the pod's own)")
    add_kubeconfig_options(add)


def add_kubeconfig_options(add: Callable[..., object]) -> None:
    """Add the options that say which cluster, and as whom.

    Args:
        add: `add_argument` of a parser, or of a group.
    """
    add("--context", metavar="NAME", default="", help="of the kubeconfig (default: its current one)")
    add(
        "--kubeconfig",
        metavar="FILE",
        default="",
        help="(default: KUBECONFIG, the pod's service account, ~/.kube/config)",
    )


@contextlib.contextmanager
def open_cluster(options: argparse.Namespace, timeout_s: float = _TIMEOUT_S) -> Iterator[KubeClient]:
    """Open the cluster that the options name.

    Args:
        options: with what `add_cluster_options` added.
        timeout_s: for the API server to answer.

    Raises:
        SettingsError: there is none.
        InvalidObjectError: the cluster does not know EDL's resources; the message says how to install them.
    """
    if options.namespace == "":
        raise SettingsError("--namespace '': expected a name; -A shows all namespaces where a command has it")
    settings = KubeSettings(options.kubeconfig, options.context, options.namespace or "", timeout_s)
    with KubeClient(settings) as client:
        try:
            yield client
        except InvalidObjectError as exc:
            if client.has_resource(ELASTIC_JOBS.group, ELASTIC_JOBS.version, ELASTIC_JOBS.plural):
                raise
            raise InvalidObjectError(f"{client.url} knows no {ELASTIC_JOBS.group} resources: {INSTALL_HINT}") from exc
