"""A bound on the tokens that a proxy holds, in the order in which requests come."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from edl.proxy.completion_request import RequestRefusal

__all__ = ["TokenGate"]

_MOST_WAITING: Final = 16
"""Requests of the largest size whose ids may wait, 4 bytes a token: what comes beyond is refused at once, so that its
client tries another proxy, or later."""
_RETRY_S: Final = 1.0  # a request of the largest size takes seconds


class TokenGate:
    """Lets requests in while their tokens fit, the first first. Used on a single event loop.

    Args:
        most: tokens inside at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.inside = 0
        self.waiting = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def room(self, tokens: int, timeout_s: float) -> AsyncIterator[None]:
        """Wait for room, and have it for the time of the block.

        Args:
            tokens: of the request.
            timeout_s: for which it waits.

        Raises:
            RequestRefusal: 413 for more tokens than are ever let in, 503 where too many wait, or for too long.
        """
        if tokens > self._most:
            raise RequestRefusal(
                413,
                f"{tokens} tokens in a request, 16 at least of each prompt, and {self._most} are taken: send fewer "
                "prompts (--max-tokens)",
            )
        if self.waiting + tokens > _MOST_WAITING * self._most:
            raise RequestRefusal(503, f"{self.waiting} tokens wait already", _RETRY_S)
        await self._enter(tokens, timeout_s)
        try:
            yield
        finally:
            self.inside -= tokens
            self._let_in()

    async def _enter(self, tokens: int, timeout_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((tokens, turn))
        self.waiting += tokens
        self._let_in()
        try:
            await asyncio.wait_for(asyncio.shield(turn), timeout_s)
        except BaseException as exc:
            if turn.done():
                self.inside -= tokens
            else:
                turn.cancel()
                self._queue.remove((tokens, turn))
                self.waiting -= tokens
            self._let_in()
            if isinstance(exc, asyncio.TimeoutError):
                raise RequestRefusal(503, f"no room within {timeout_s:g} s", _RETRY_S) from None
            raise

    def _let_in(self) -> None:
        while self._queue and self.inside + self._queue[0][0] <= self._most:
            tokens, turn = self._queue.popleft()
            self.waiting -= tokens
            self.inside += tokens
            turn.set_result(None)
