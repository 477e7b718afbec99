"""Has a gRPC server refuse calls without a token that is valid at this moment."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from edl.protocol.tls import AUTHORIZATION, CredentialFiles
from edl.protocol.transport import grpc

_SCHEME = "bearer "


def token_checks(files: CredentialFiles | None) -> Sequence[TokenCheck]:
    """Return the interceptors of a server: none where no tokens are set."""
    return [TokenCheck(files)] if files is not None and files.settings.token_file else []


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without a token that is valid at this moment.

    Args:
        files: hold the tokens.
    """

    def __init__(self, files: CredentialFiles) -> None:
        self._files = files

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See `grpc.aio.ServerInterceptor`."""
        if self.allows(shown_by(handler_call_details)):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def allows(self, shown: Sequence[str]) -> bool:
        """Return whether the values of a call's `authorization` are a single valid token."""
        if len(shown) != 1 or shown[0][: len(_SCHEME)].lower() != _SCHEME:
            return False
        # All are compared, so that a token's place in the file does not show in the time.
        token = shown[0][len(_SCHEME) :].encode()
        matches = [hmac.compare_digest(token, valid.encode()) for valid in self._files.current().tokens]
        return any(matches)


def shown_by(details: grpc.HandlerCallDetails) -> list[str]:
    """Return the values of a call's `authorization`."""
    return [str(value) for name, value in details.invocation_metadata or () if name == AUTHORIZATION]


async def _refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    """Refuse a call of any method. Not by an empty message: to a watch that says that nothing is there."""
    context.set_code(grpc.StatusCode.UNAUTHENTICATED)
    context.set_details("no token, or none that is valid here")
    return
    yield  # a generator, which sends no message before it ends
