"""Cluster and user of a client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KubeSettings:
    """Cluster and user of a client.

    If neither a file nor a context is given, `KUBECONFIG` applies if it is set; otherwise a pod's service account;
    otherwise `~/.kube/config`.

    Attributes:
        kubeconfig: path of a kubeconfig file.
        context: context in the kubeconfig; empty for the current context.
        namespace: namespace for calls that do not specify one; empty for the namespace of the context or the pod.
        timeout_s: seconds to wait for a connection, and for a response to start or to continue. A call takes at most
            three times as long.
    """

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    timeout_s: float = 10.0
