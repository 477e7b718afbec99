"""The contract of a service registry: who offers a service, kept true by leases."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from typing_extensions import Self

__all__ = ["Instance", "Registration", "Registry", "Rejected", "Snapshot", "Watch"]


@dataclass(frozen=True)
class Instance:
    """One process that offers a service.

    Attributes:
        service: the service's name; students look teachers up by it.
        id: unique within the service, the same across restarts if the process wishes to be seen as the same.
        address: host name or IP address at which others reach it, or `unix:/path`.
        port: TCP port (0 for a Unix socket).
        capacity: relative weight in balancing; 2.0 takes twice the students of 1.0. Positive and finite.
        state: "ready", or "draining" when it finishes what it has and takes no more.
        model: name of the served model in KServe v2 requests.
        tags, meta: free for users; in Consul the service's tags and metadata.
    """

    service: str
    id: str
    address: str
    port: int
    capacity: float = 1.0
    state: Literal["ready", "draining"] = "ready"
    model: str = ""
    tags: tuple[str, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """The gRPC target: `host:port` or `unix:/path`."""
        if self.address.startswith("unix:"):
            return self.address
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Rejected:
    """A registration that carries nonsense, and why it is left out."""

    id: str
    reason: str


@dataclass(frozen=True)
class Snapshot:
    """Everybody who offered a service at one moment, sorted by id.

    Attributes:
        instances: those whose lease is kept.
        lapsed: those whose lease ran out and who have not deregistered, as they registered last: the process is dead,
            or paused, or lives and cannot reach the registry, or the registry cannot be written. The registry forgets
            them in the end: see each implementation. Whether one is there, only asking it tells.
        revoked: ids of those that a `BalanceGroup` gave to this student before, that are registered, and that it is to
            let go.
        stale: empty while the registry answers; otherwise why it does not, and `instances` are the last known. Those
            that are missing in the first seconds after an outage are kept as well, with `stale` set: the registry may
            have lost its memory, and they are about to register again.
    """

    service: str
    instances: tuple[Instance, ...]
    rejected: tuple[Rejected, ...] = ()
    stale: str = ""
    lapsed: tuple[Instance, ...] = ()
    revoked: frozenset[str] = frozenset()


class _Closing(abc.ABC):
    @abc.abstractmethod
    def close(self) -> None:
        """Release everything. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Registration(_Closing):
    """An instance kept registered by a background thread; `close` deregisters it.

    A lease that lapsed (the process was paused, the registry restarted) is taken again by itself.
    """

    @property
    @abc.abstractmethod
    def instance(self) -> Instance:
        """What is registered now."""

    @property
    @abc.abstractmethod
    def error(self) -> str:
        """Why the last renewal failed, or that one takes longer than the lease; empty while all is well."""

    @abc.abstractmethod
    def update(self, instance: Instance) -> None:
        """Replace what is registered (same service and id), for example to start draining.

        Raises:
            SettingsError: another service or id, or values that no registry could hand out.
            DiscoveryError: the registry cannot be reached. The new values are kept, and told as soon as possible.
        """


class Watch(_Closing):
    """Snapshots as they change. Only the newest is kept: a watcher that falls behind skips, and never blocks others."""

    @abc.abstractmethod
    def get(self, timeout_s: float | None = None) -> Snapshot | None:
        """The next snapshot that differs from the last one returned; the first call returns the state as it is.

        Returns:
            None when `timeout_s` passed, or the watch was closed, without a change.
        """

    def __iter__(self) -> Iterator[Snapshot]:
        while (snapshot := self.get()) is not None:
            yield snapshot


class Registry(_Closing):
    """Services and who offers them. Thread-safe. Must not be used across a fork.

    All methods raise `edl.errors.DiscoveryError` when the registry cannot be reached.
    """

    @abc.abstractmethod
    def register(self, instance: Instance, ttl_s: float = 10.0) -> Registration:
        """Register, and renew until closed. Others see it go at most about `ttl_s` after this process died.

        Of two live registrations with one service and id the later one is seen; closing either leaves the other alone.

        Raises:
            SettingsError: the instance carries values that no registry could hand out, or `ttl_s` is below 0.5.
        """

    @abc.abstractmethod
    def snapshot(self, service: str) -> Snapshot:
        """Everybody who offers `service` now; an unknown service has nobody."""

    @abc.abstractmethod
    def services(self) -> tuple[str, ...]:
        """Names of the services with at least one instance, live or lapsed, sorted."""

    @abc.abstractmethod
    def watch(self, service: str) -> Watch:
        """Follow `service` until the watch is closed.

        Does not wait for a registry that cannot be reached: the snapshots say so in `stale`.
        """
