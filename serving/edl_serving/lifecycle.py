"""Where a server is in its life, and how many requests it still owes an answer."""

from __future__ import annotations

import asyncio
import enum

from edl.protocol.transport import grpc
from edl_serving.request_error import Refusal

__all__ = ["Lifecycle", "State"]


class State(enum.Enum):
    """In this order, and never back."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"  # not ready for newcomers, but students that have not heard of it yet are still served
    DRAINING = "draining"  # finishes what it has accepted
    STOPPED = "stopped"


class Lifecycle:
    """Used on the event loop only."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.healthy = True  # as far as a canary knows
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether new students are welcome."""
        return self.state is State.READY and self.healthy

    def enter(self) -> None:
        """A request was received.

        Raises:
            Refusal: no requests are taken in this state.
        """
        if self.state not in (State.READY, State.LEAVING):
            if self.state is State.STARTING:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the model is warming up", retry_after_ms=1000)
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "the server is draining")
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """A request that entered was answered."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False if `timeout_s` passed first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True
