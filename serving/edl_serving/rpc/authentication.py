"""Lets in who shows a token that is valid at this moment, and shows out who was let in with what is valid no more."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from edl.protocol.tls.credentials import AUTHORIZATION, CHECK_EVERY_S, CredentialFiles, Material
from edl.protocol.transport import grpc

__all__ = ["TokenCheck", "follow_revocations", "revokes"]

logger = logging.getLogger(__name__)

_SCHEME: Final = "Bearer "
_HEALTH: Final = "/grpc.health.v1.Health/"
_REMEDY: Final = (
    "this teacher takes students with a token only: put one of its tokens into a file and name that "
    "(EDL_TOKEN_FILE, --token-file, token_file=)"
)
_NO_TOKEN: Final = f"no token: {_REMEDY}"
_WRONG_TOKEN: Final = f"the token is not valid here, or no more: {_REMEDY}"


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token, of any method, known or not, before a byte of theirs is read.

    Args:
        files: whose tokens are valid.
        open_health: leave out the health service, which a kubelet asks without any metadata.
    """

    def __init__(self, files: CredentialFiles, *, open_health: bool) -> None:
        self._files = files
        self._open_health = open_health
        self._digests: tuple[int, list[bytes]] = (-1, [])

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See `grpc.aio.ServerInterceptor`."""
        if self._open_health and str(handler_call_details.method).startswith(_HEALTH):
            return await continuation(handler_call_details)
        shown = [value for name, value in handler_call_details.invocation_metadata or () if name == AUTHORIZATION]
        if len(shown) == 1 and self._is_valid(str(shown[0])):
            return await continuation(handler_call_details)
        return _REFUSE_WRONG if shown else _REFUSE_NONE

    def _is_valid(self, shown: str) -> bool:
        material = self._files.current()
        if self._digests[0] != material.version:
            self._digests = material.version, [_digest(token) for token in material.tokens]
        # Of digests, so that not even the length of a token shows in the time; all of them, so that its place does not.
        digest = _digest(shown[len(_SCHEME) :]) if shown[: len(_SCHEME)].lower() == _SCHEME.lower() else b""
        matches = [hmac.compare_digest(digest, valid) for valid in self._digests[1]]
        return any(matches)


def revokes(before: Material, after: Material) -> bool:
    """Whether somebody who was let in before is not let in any more."""
    return not (before.authorities <= after.authorities and set(before.tokens) <= set(after.tokens))


async def follow_revocations(files: CredentialFiles, end_streams: Callable[[], None]) -> None:
    """Have `end_streams` called when files that were replaced shut somebody out. Runs until cancelled.

    Whose stream has ended connects anew, and is looked at again.
    """
    before, complaint = files.current(), ""
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        try:
            after = files.current()
            if revokes(before, after):
                end_streams()
        except Exception as exc:  # whatever it is, this must not be the last look: nobody would see that it ended
            if complaint != repr(exc):
                complaint = repr(exc)
                logger.exception("revoked credentials could not be followed; that is tried again")
            continue  # `before` stays, for what is still to be ended
        before, complaint = after, ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _refusal(words: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)

    handle: Any = refuse
    return grpc.stream_stream_rpc_method_handler(handle)  # of any method: it reads nothing


_REFUSE_NONE = _refusal(_NO_TOKEN)
_REFUSE_WRONG = _refusal(_WRONG_TOKEN)
