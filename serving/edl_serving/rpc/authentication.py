"""Authentication by tokens, and the end of streams whose token or certificate is revoked."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from edl.protocol.channel import is_this_host
from edl.protocol.tls.credentials import AUTHORIZATION, CHECK_EVERY_S, CredentialFiles, Material
from edl.protocol.transport import grpc
from edl.settings import Credentials
from edl_serving.settings import authority

__all__ = ["TokenInterceptor", "watch_revocations", "is_revocation", "warn_of_no_credentials"]

_log = logging.getLogger(__name__)

_SCHEME: Final = "Bearer "
_HEALTH: Final = "/grpc.health.v1.Health/"
_REMEDY: Final = (
    "this teacher takes students with a token only: put one of its tokens into a file and name that "
    "(EDL_TOKEN_FILE, --token-file, token_file=)"
)
_NO_TOKEN: Final = f"no token: {_REMEDY}"
_WRONG_TOKEN: Final = f"the token is not valid here, or no more: {_REMEDY}"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token, of known and unknown methods, before a byte of them is read.

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


def is_revocation(before: Material, after: Material) -> bool:
    """Return whether clients that were let in by `before` are not let in by `after`."""
    return not (before.authorities <= after.authorities and set(before.tokens) <= set(after.tokens))


async def watch_revocations(files: CredentialFiles, end_streams: Callable[[], None]) -> None:
    """Call `end_streams` when replaced files revoke a token or an authority. Run until cancelled.

    A client whose stream has ended connects anew, and is authenticated again.

    Args:
        files: tokens and certificates.
        end_streams: ends all streams; called again later if it raises.
    """
    before, complaint = files.current(), ""
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        try:
            after = files.current()
            if is_revocation(before, after):
                end_streams()
        except Exception as exc:  # noqa: BLE001 - whatever it is, this must not be the last look: nobody would see that it ended
            if complaint != repr(exc):
                complaint = repr(exc)
                _log.exception("revoked credentials could not be followed; that is tried again")
            continue  # `before` stays, for what is still to be ended
        before, complaint = after, ""


def warn_of_no_credentials(host: str, credentials: Credentials) -> None:
    """Log a warning if a server that others reach serves without TLS or without checking its clients.

    Args:
        host: the address that is listened on.
        credentials: of the server.
    """
    if is_this_host(authority(host, 0)):
        return
    if not credentials.cert and not credentials.token_file:
        _log.warning(
            "listening on %s without TLS and tokens: whoever reaches this port can use the model, and the network can "
            "read what students send; set --tls-cert and --tls-key, and --tls-ca or --token-file (docs/security.md)",
            host,
        )
    elif not credentials.cert:
        _log.warning("listening on %s without TLS: tokens and data can be read on the network (--tls-cert)", host)
    elif not credentials.ca and not credentials.token_file:
        _log.info("listening on %s with TLS, for everybody: --tls-ca or --token-file says who may ask", host)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _refusal(words: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)

    handle: Any = refuse
    return grpc.stream_stream_rpc_method_handler(handle)  # of any method: it reads nothing


_REFUSE_NONE = _refusal(_NO_TOKEN)
_REFUSE_WRONG = _refusal(_WRONG_TOKEN)
