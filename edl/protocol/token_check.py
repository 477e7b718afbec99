"""Has a gRPC server refuse calls without a token that is valid at this moment."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from edl.protocol.tls import AUTHORIZATION, CredentialFiles
from edl.protocol.transport import grpc

_SCHEME = "bearer "
_REMEDY = "put one of this server's tokens into a file and name the file (EDL_TOKEN_FILE, --token-file, token_file=)"


def token_checks(files: CredentialFiles | None, *, open_service: str = "") -> Sequence[grpc.aio.ServerInterceptor]:
    """Return the interceptors of a server: none where no tokens are set; `open_service` names one without tokens."""
    return [_TokenCheck(files, open_service)] if files is not None and files.settings.token_file else []


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token before any of their bytes is read, whether or not the method exists."""

    def __init__(self, files: CredentialFiles, open_service: str) -> None:
        self._files = files
        self._open_service = open_service

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See `grpc.aio.ServerInterceptor`."""
        shown = [str(value) for name, value in handler_call_details.invocation_metadata or () if name == AUTHORIZATION]
        service = str(handler_call_details.method).strip("/").rpartition("/")[0]
        if (self._open_service and service == self._open_service) or self._allows(shown):
            return await continuation(handler_call_details)
        return _REFUSE_WRONG if shown else _REFUSE_NONE

    def _allows(self, shown: Sequence[str]) -> bool:
        """Return whether the values of a call's `authorization` are a single valid token."""
        if len(shown) != 1 or shown[0][: len(_SCHEME)].lower() != _SCHEME:
            return False
        # All are compared, so that a token's place in the file does not show in the time.
        token = shown[0][len(_SCHEME) :].encode()
        matches = [hmac.compare_digest(token, valid.encode()) for valid in self._files.current().tokens]
        return any(matches)


def _refusal(words: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        # Not `abort`, whose exception keeps the call alive until garbage is collected.
        context.set_code(grpc.StatusCode.UNAUTHENTICATED)
        context.set_details(words)
        return
        yield  # a generator, which sends no message: to a watch, an empty one would say that nothing is there

    return grpc.stream_stream_rpc_method_handler(refuse)  # fits unary methods too, because it reads nothing


_REFUSE_NONE = _refusal(f"no token: {_REMEDY}")
_REFUSE_WRONG = _refusal(f"the token is not valid here, or no longer: {_REMEDY}")
