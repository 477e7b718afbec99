"""Which shared memory is registered, and for whom.

The server opens what a client names with its own rights, so it must not do for a client what the client could not do
itself: it takes an object only from its owner, and each user's regions have names of their own. Within a user, a
client that names no region means its own: those that its connection has registered, or one that is gone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from edl.protocol import kserve
from edl.protocol.transport import grpc
from edl_serving.request_error import Refusal, invalid, quote
from edl_serving.shared_memory.peers import Peers, is_local
from edl_serving.shared_memory.region import Region, open_region

__all__ = ["ClientRegions", "Regions"]


class Regions:
    """The registered regions, by user and name. Used on the event loop only.

    Args:
        max_regions: how many there may be.
        max_bytes: how large all of them may be together.
        peers: tells who a client is.
        users: whose shared memory is taken, besides that of the server's own user.
    """

    def __init__(self, max_regions: int, max_bytes: int, peers: Peers, users: Collection[int] = ()) -> None:
        self._max_regions, self._max_bytes = max_regions, max_bytes
        self._peers = peers
        self._users = frozenset({os.geteuid(), *users})
        self._by_user: dict[int, dict[str, Region]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_user.values()))

    @property
    def nbytes(self) -> int:
        """Of all regions."""
        return sum(region.nbytes for region in self._all())

    def of_client(self, peer: str) -> ClientRegions | None:
        """The regions as a client on this host may see them; None for others."""
        return ClientRegions(self, self._peers, self._users, peer) if is_local(peer) else None

    def of_user(self, user: int) -> dict[str, Region]:
        """By name; the store itself."""
        return self._by_user.setdefault(user, {})

    def sweep(self) -> None:
        """Let go of regions whose client has died."""
        for regions in self._by_user.values():
            for name in [name for name, region in regions.items() if region.abandoned]:
                del regions[name]

    def check_room(self, nbytes: int) -> None:
        """Refuse one more region of this size if there is no room."""
        if len(self) >= self._max_regions or self.nbytes + nbytes > self._max_bytes:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"no room for {nbytes} bytes of shared memory: {len(self)} of {self._max_regions} regions and "
                f"{self.nbytes} of {self._max_bytes} bytes are registered; unregister some",
            )

    def _all(self) -> Iterator[Region]:
        for regions in self._by_user.values():
            yield from regions.values()


class ClientRegions:
    """The regions as one client sees them: those of its user."""

    def __init__(self, regions: Regions, peers: Peers, users: Collection[int], peer: str) -> None:
        self._regions, self._peers, self._users, self._peer = regions, peers, users, peer
        self._user = -1
        self._mine: dict[str, Region] | None = None

    def __len__(self) -> int:
        return len(self._own())

    def __getitem__(self, name: str) -> Region:
        """Raises Refusal if there is none of that name."""
        try:
            return self._own()[name]
        except KeyError:
            raise invalid(f"shared memory region {quote(name)} is not registered") from None

    def register(self, request: kserve.SystemSharedMemoryRegisterRequest) -> None:
        """Open what the request names. The same region again is no error; a name whose object is gone is free again.

        Raises:
            Refusal: the name is taken, there are too many, or see `open_region`.
        """
        if not request.name:
            raise invalid("shared memory region name '': must not be empty")
        own = self._own()
        region = open_region(request, self._peer, self._user, self._users)
        self._regions.sweep()
        known = own.get(request.name)
        if known is not None:
            if (known.identity, known.offset, known.nbytes) == (region.identity, region.offset, region.nbytes):
                known.peer = self._peer
                return
            if os.fstat(known.fd).st_nlink > 0:
                raise Refusal(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"shared memory region {quote(request.name)} is registered already, with key {quote(known.key)}",
                )
            del own[request.name]
        self._regions.check_room(region.nbytes)
        own[request.name] = region

    def unregister(self, name: str) -> None:
        """Forget a region, or all of this client for an empty name. An unknown one is no error, as with Triton."""
        own = self._own()
        for gone in [name] if name else self._names():
            own.pop(gone, None)

    def status(self, name: str) -> kserve.SystemSharedMemoryStatusResponse:
        """The region `name`, or all of this client for an empty name.

        Raises:
            Refusal: there is none of that name.
        """
        answer = kserve.SystemSharedMemoryStatusResponse()
        for region in [self[name]] if name else [self[mine] for mine in self._names()]:
            entry = answer.regions[region.name]
            entry.name, entry.key = region.name, region.key
            entry.offset, entry.byte_size = region.offset, region.nbytes
        return answer

    def _names(self) -> list[str]:
        """Of those that this connection registered, or one that is gone: a client may connect again."""
        return [
            name
            for name, region in self._own().items()
            if region.peer == self._peer or not self._peers.is_connected(region.peer)
        ]

    def _own(self) -> dict[str, Region]:
        if self._mine is None:  # only now, since most clients never use shared memory
            user = self._peers.user_of(self._peer)
            if user is None:
                raise invalid(f"shared memory is for users of this host; which one {quote(self._peer)} is is unknown")
            self._user, self._mine = user, self._regions.of_user(user)
        return self._mine
