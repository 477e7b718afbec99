"""A stream of turns to a master: a message there, its answer back."""

from __future__ import annotations

import queue
import time
from typing import Final

from edl.errors import NoMasterError
from edl.master.client.connection import MasterConnection
from edl.protocol import master as messages

__all__ = ["TurnStream"]

LIFE_S: Final = 60.0
"""After so long gRPC ends the stream: a master that hangs is noticed so late."""
RENEW_S: Final = 30.0
"""A stream that is older, and idle, is opened anew."""


class TurnStream:
    """A stream. For one thread; closing the connection ends an exchange under way.

    Args:
        connection: to the master.

    Raises:
        NoMasterError: it cannot be opened.
    """

    def __init__(self, connection: MasterConnection) -> None:
        self._connection = connection
        self._requests: queue.SimpleQueue[messages.NextRequest | None] = queue.SimpleQueue()
        self._opened = time.monotonic()
        self._call = connection.stream(iter(self._requests.get, None), LIFE_S)

    @property
    def is_old(self) -> bool:
        """Whether it should be opened anew."""
        return time.monotonic() > self._opened + RENEW_S

    def exchange(self, request: messages.NextRequest) -> messages.NextReply:
        """Send a message, and wait for its answer.

        Returns:
            The answer.

        Raises:
            NoMasterError: there was none.
            EDLError: the master refuses, with its words.
        """
        self._requests.put(request)
        with self._connection.translating():
            for reply in self._call:
                answer: messages.NextReply = reply
                return answer
        raise NoMasterError(f"the master at {self._connection.endpoint} ended the stream")

    def close(self) -> None:
        """End it. Waits for nothing."""
        self._requests.put(None)  # gRPC's thread waits for the next message
        self._call.cancel()
