"""Cluster and user of a client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KubeSettings:
    """Cluster and user of a client.

    If neither file nor context is named, `KUBECONFIG` applies if it is set; else a pod's service account; else
    `~/.kube/config`.

    Attributes:
        kubeconfig: path of a kubeconfig.
        context: its context; empty for its current one.
        namespace: default for calls that name none; empty for the context's, or the pod's own.
        timeout_s: seconds to wait for a connection, and for a response to start or to continue. A call takes at most
            three times as long.
    """

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    timeout_s: float = 10.0
