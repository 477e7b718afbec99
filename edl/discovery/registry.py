"""The contract of a service registry: who offers a service, kept true by leases.

`open_registry` opens the implementations of this package. Another one subclasses `Registry`, `Registration` and
`Watch`; `edl.discovery.common` has the parts that these share, and `tests/fast/discovery/conformance` holds every
implementation to what is promised here. Threads, signals, forks, closing and deadlines are as for stores: see
`edl.discovery.store`.
"""

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
    """A process that offers a service.

    Text is printable and has 512 bytes at most, so that every registry can hold it.

    Attributes:
        service: the service's name, by which students look teachers up: 1 to 128 letters, digits, `-`, `_` and `.`, a
            letter or digit at both ends.
        id: unique within the service, the same across restarts if the process wishes to be seen as the same.
        address: host name or IP address at which others reach the process, or `unix:/path`. Not `0.0.0.0` or `::`.
        port: TCP port, 1 to 65535; 0 for a Unix socket, and only for it.
        capacity: relative weight in balancing; 2.0 takes twice the students of 1.0. Positive and finite.
        state: "ready", or "draining" when it finishes what it has and takes no more.
        model: name of the served model in KServe v2 requests; empty if clients know it.
        tags: free for users, 64 at most; in Consul the service's tags.
        meta: free for users, 60 names at most, of letters, digits, `-` and `_`, not `model`, `capacity` or
            `state`, and not beginning with `consul-` or `edl-`; in Consul the service's metadata.
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
    """A registration that cannot be used, and is left out of the instances.

    Attributes:
        id: of the instance, as far as it is text; otherwise what the registry calls it.
        reason: which value is wrong, and what is accepted.
    """

    id: str
    reason: str


@dataclass(frozen=True)
class Snapshot:
    """The instances of a service at a moment.

    Attributes:
        service: the service's name.
        instances: with a lease that is kept, sorted by id, every id once.
        rejected: registrations that cannot be used, sorted by id.
        stale: empty while the registry answers; otherwise why it does not, in words, and `instances` are what was known
            last. Instances that are missing in the first 5 s after an outage are kept as well, with `stale` set: the
            registry may have lost its memory, and they are about to register again.
        lapsed: with a lease that ran out without a deregistration, as they registered last, sorted by id: the process
            is dead, or paused, or lives and cannot reach the registry, or the registry cannot be written. Only asking
            the process itself tells which. The registry forgets them after about a minute; a SQLite file that no
            process writes keeps them.
        revoked: ids of instances that a `BalanceGroup` gave to this student before, that are registered, and that it is
            to let go; empty without a group.
    """

    service: str
    instances: tuple[Instance, ...]
    rejected: tuple[Rejected, ...] = ()
    stale: str = ""
    lapsed: tuple[Instance, ...] = ()
    revoked: frozenset[str] = frozenset()


class _Closing(abc.ABC):
    """An object that is closed once it is not needed any more, by `close` or at the end of a `with` block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything. May be called twice, from any thread, and by signal handlers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Registration(_Closing):
    """An instance that a background thread keeps registered until it is closed.

    The thread renews the lease four times in its length. A lease that ended (the process was paused, the registry was
    restarted or forgot it) is taken again by itself, with the values of `instance`. `close` deregisters the instance;
    if the registry does not answer then, a warning is logged, and the registration lapses.
    """

    @property
    @abc.abstractmethod
    def instance(self) -> Instance:
        """What is registered now, or is to be as soon as the registry answers."""

    @property
    @abc.abstractmethod
    def error(self) -> str:
        """Why others may not see the instance: the last renewal failed, or takes longer than the lease.

        Empty while all is well. Asks the registry nothing.
        """

    @abc.abstractmethod
    def update(self, instance: Instance) -> None:
        """Replace what is registered, for example to start draining.

        Args:
            instance: the new values, with the same service and id.

        Raises:
            SettingsError: another service or id, or values that no registry could hand out. Nothing has changed.
            DiscoveryError: the registry cannot be reached. The new values are kept, and written as soon as possible.
            ClosedError: the registration is closed, or was meanwhile.
        """


class Watch(_Closing):
    """Snapshots of a service as its instances change.

    - The first call of `get` returns the present state as soon as the registry has answered, also where no instance is
      registered.
    - A change is seen within about 0.2 s on a registry that answers. Changes are not queued: a watcher that falls
      behind gets the newest snapshot, misses the snapshots between, and holds up nothing.
    - A registry that cannot be reached gives a snapshot with `stale` set and the instances known last, and the watch
      goes on by itself. It never gives an empty snapshot because the registry is away.
    - Where several threads call `get`, a snapshot may go to a single thread.
    """

    @abc.abstractmethod
    def get(self, timeout_s: float | None = None) -> Snapshot | None:
        """Wait for a snapshot that differs from the snapshot returned last.

        Args:
            timeout_s: how long, in seconds; 0 looks without waiting, None waits as long as it takes.

        Returns:
            The newest snapshot; None if `timeout_s` passed, or the watch or its registry is closed, without a change.
        """

    def __iter__(self) -> Iterator[Snapshot]:
        """Yield snapshots, waiting for every next, until the watch is closed."""
        while (snapshot := self.get()) is not None:
            yield snapshot


class Registry(_Closing):
    """Services and the processes that offer them.

    A registry that cannot be reached is an error, never an empty answer. A registration that cannot be used is left out
    and listed in `Snapshot.rejected`; it harms no other.
    """

    @abc.abstractmethod
    def register(self, instance: Instance, ttl_s: float = 10.0) -> Registration:
        """Register an instance, and keep it registered until the registration is closed.

        Of two live registrations with the same service and id the later is seen; closing either leaves the other alone.

        Args:
            instance: what others are to see.
            ttl_s: seconds after the last renewal until the registration lapses, 0.5 to 86,400. Other processes see it
                lapsed about that long after this process died. (etcd counts whole seconds, rounded up.)

        Returns:
            The registration, which others see from now on.

        Raises:
            SettingsError: the instance carries values that no registry could hand out, or `ttl_s` is out of range.
            DiscoveryError: the registry cannot be reached. Nothing is kept: register again.
        """

    @abc.abstractmethod
    def snapshot(self, service: str) -> Snapshot:
        """Read the present instances of a service.

        Args:
            service: the service's name.

        Returns:
            The instances, with `stale` empty; none if there is no such service.

        Raises:
            SettingsError: no service can have that name.
            DiscoveryError: the registry cannot be reached.
        """

    @abc.abstractmethod
    def services(self) -> tuple[str, ...]:
        """Read the names of the services with at least an instance, live or lapsed.

        Returns:
            The names, sorted.

        Raises:
            DiscoveryError: the registry cannot be reached.
        """

    @abc.abstractmethod
    def watch(self, service: str) -> Watch:
        """Follow a service until the watch is closed.

        Does not wait for the registry, and does not fail when it is away: the snapshots say so in `stale`.

        Args:
            service: the service's name.

        Returns:
            The watch, which has a thread and a connection of its own.

        Raises:
            SettingsError: no service can have that name.
        """
