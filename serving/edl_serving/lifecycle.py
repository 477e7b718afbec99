"""The state of a server, and the number of requests that it has not answered yet."""

from __future__ import annotations

import asyncio
import enum

from edl.protocol.transport import grpc
from edl_serving.request_error import RequestError

__all__ = ["Lifecycle", "ServerState"]


class ServerState(enum.Enum):
    """The states of a server, in this order."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"  # not ready for newcomers, but students that have not heard of it yet are still served
    DRAINING = "draining"  # finishes what it has accepted
    STOPPED = "stopped"


class Lifecycle:
    """Counts requests, and refuses them where the server's state does. Used on the event loop only.

    Attributes:
        state: of the server.
        healthy: whether neither a canary nor a backend has found a fault.
        in_flight: requests that are not answered yet.
    """

    def __init__(self) -> None:
        self.state = ServerState.STARTING
        self.healthy = True
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether new students are welcome."""
        return self.state is ServerState.READY and self.healthy

    def begin_request(self) -> None:
        """Count a request that was received.

        Raises:
            RequestError: no requests are taken in this state.
        """
        if self.state not in (ServerState.READY, ServerState.LEAVING):
            if self.state is ServerState.STARTING:
                raise RequestError(grpc.StatusCode.UNAVAILABLE, "the model is warming up", retry_after_ms=1000)
            raise RequestError(grpc.StatusCode.UNAVAILABLE, "the server is draining")
        self.in_flight += 1
        self._idle.clear()

    def end_request(self) -> None:
        """Count a request as answered."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight.

        Args:
            timeout_s: how long to wait.

        Returns:
            Whether none is; False if `timeout_s` passed first.
        """
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True
