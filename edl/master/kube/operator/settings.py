"""What an operator goes by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from edl.errors import SettingsError
from edl.kube.settings import KubeSettings
from edl.master.kube.members.pod_policy import PodPolicy
from edl.master.kube.operator.store_allowlist import StoreAllowlist
from edl.settings import is_above_zero

__all__ = ["ALL_NAMESPACES", "OperatorSettings"]

ALL_NAMESPACES: Final = "*"
"""In place of a namespace: all of the cluster."""


@dataclass(frozen=True)
class OperatorSettings:
    """What an operator goes by.

    Attributes:
        kube: which cluster, and as whom.
        namespaces: whose resources it works on; empty for the one that it is in, `*` for all of the cluster.
        store: URL of discovery of resources that name none; empty for none.
        allow_stores: prefixes of stores that it opens where resources name them: see `StoreAllowlist`.
        pods: what templates of members may ask for.
        workers: resources that are worked on at the same time.
        resync_s: each resource is looked at once in so many seconds whatever happens, and more rarely where there are
            many: what no event told of is found then.
        resync_rate: looks a second for that reason at most. A look is two requests.
        capacity: whether to look at nodes and all pods of the cluster, where that is allowed.
        host: where `/livez`, `/readyz` and `/metrics` are served; None for nowhere.
        port: 0 for a free one.

    Raises:
        SettingsError: a number is out of range, all of the cluster is named beside a namespace, or an allowed store is
            no such.
    """

    kube: KubeSettings = field(default_factory=KubeSettings)
    namespaces: tuple[str, ...] = ()
    store: str = ""
    allow_stores: tuple[str, ...] = ()
    pods: PodPolicy = field(default_factory=PodPolicy)
    workers: int = 4
    resync_s: float = 600.0
    resync_rate: float = 0.2
    capacity: bool = True
    host: str | None = None
    port: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 32:
            raise SettingsError(f"workers={self.workers!r}: expected 1 to 32")
        for name in ("resync_s", "resync_rate"):
            value = getattr(self, name)
            if not is_above_zero(value) or value == float("inf"):
                raise SettingsError(f"{name}={value!r}: expected a finite number above 0")
        StoreAllowlist(self.store, self.allow_stores)
        if ALL_NAMESPACES in self.namespaces and len(self.namespaces) > 1:
            raise SettingsError(f"namespaces={','.join(self.namespaces)}: {ALL_NAMESPACES} is all of them already")
