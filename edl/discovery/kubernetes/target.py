"""Which cluster and namespace a URL names; kubectl's own environment variable counts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

from edl.errors import SettingsError
from edl.kube.connection import find_server
from edl.kube.settings import KubeSettings
from edl.settings import PodIdentity

__all__ = ["KubernetesTarget"]

_NAMESPACE: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_OPTIONS: Final = ("context", "kubeconfig")


@dataclass(frozen=True)
class KubernetesTarget:
    """A namespace of a cluster.

    Attributes:
        settings: which cluster, as whom, and which namespace (empty for that of the context or pod).
        pod: the pod that this process runs in; None where it is not known.
    """

    settings: KubeSettings
    pod: PodIdentity | None = None

    def __str__(self) -> str:
        return f"kubernetes://{self.settings.namespace}"

    @classmethod
    def of(cls, parts: SplitResult, timeout_s: float) -> KubernetesTarget:
        """Return what a split URL says.

        Raises:
            SettingsError: something in it is unusable.
        """
        where = f"discovery URL kubernetes://{parts.netloc.rpartition('@')[2]}"
        if "@" in parts.netloc:
            raise SettingsError(f"{where}: a URL is no place for a token; a kubeconfig has it (?kubeconfig=PATH)")
        if parts.path not in ("", "/") or parts.fragment:
            raise SettingsError(
                f"{where}{parts.path}: a namespace and at most ?context=NAME&kubeconfig=PATH are expected"
            )
        if parts.netloc and not _NAMESPACE.fullmatch(parts.netloc):
            raise SettingsError(
                f"{where}: {parts.netloc!r} is no namespace (lower-case letters, digits and '-'); the cluster is named"
                " by the kubeconfig or the pod, not by the URL"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(name for name, value in options.items() if name not in _OPTIONS or not value)
        if unknown:
            raise SettingsError(
                f"{where}: unknown or empty option {', '.join(unknown)}; there are {' and '.join(_OPTIONS)}"
            )
        settings = KubeSettings(
            kubeconfig=options.get("kubeconfig", ""),
            context=options.get("context", ""),
            namespace=parts.netloc,
            timeout_s=timeout_s,
        )
        return cls(settings, PodIdentity.from_env())

    def server(self) -> tuple[str, int | None] | None:
        """Return host and port of the API server; None where the configuration names none."""
        parts = urlsplit(find_server(self.settings))
        return (parts.hostname, parts.port) if parts.hostname else None
