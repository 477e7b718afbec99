"""Creates all of EDL's gRPC channels and listening ports, with or without TLS and tokens."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias

from edl.errors import SettingsError
from edl.protocol.tls import AUTHORIZATION, CredentialFiles, host_of
from edl.protocol.transport import DIRECT, grpc

Options: TypeAlias = Sequence[tuple[str, Any]]
Metadata: TypeAlias = tuple[tuple[str, str], ...]


CLIENT_OPTIONS: Final[Options] = (
    # A server that replaces another answers within a fraction of a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also how long an attempt to connect may take
    # A vanished host sends nothing: its streams must end with an error.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # otherwise channels of one process share a connection and its backoff
)
"""Channel options for a client of a master or a served store."""
_used_in: set[int] = set()
"""Ids of processes (this one and those it was forked from) that have created a channel or listened on a port."""


def is_forked_from_grpc() -> bool:
    """Return whether this process was forked from one that used gRPC: calls would hang without the parent's threads."""
    return bool(_used_in - {os.getpid()})


def aio_channel(endpoint: str, files: CredentialFiles | None, options: Options = ()) -> grpc.aio.Channel:
    """Return a grpc.aio channel to `host:port` or `unix:/path`, with the current contents of the credential files."""
    made: grpc.aio.Channel = _open(grpc.aio, endpoint, files, options)
    return made


def channel(endpoint: str, files: CredentialFiles | None, options: Options = ()) -> grpc.Channel:
    """Return a synchronous gRPC channel, but otherwise do the same as `aio_channel`."""
    made: grpc.Channel = _open(grpc, endpoint, files, options)
    return made


def _open(module: Any, endpoint: str, files: CredentialFiles | None, options: Options) -> Any:
    _used_in.add(os.getpid())
    if files is None or not files.tls:
        return module.insecure_channel(endpoint, options=[*DIRECT, *options])
    material = files.current(now=True)
    chain, key = material.pair or (None, None)
    believing = grpc.ssl_channel_credentials(material.ca, key, chain)
    name = files.settings.server_name or (host_of(endpoint) if endpoint.startswith("unix:") else "")
    expected = [("grpc.ssl_target_name_override", name)] if name else []
    return module.secure_channel(endpoint, believing, options=[*DIRECT, *expected, *options])


def call_metadata(endpoint: str, files: CredentialFiles | None) -> Metadata:
    """Return the metadata for every call: the token, if any; SettingsError if the token would be sent unencrypted."""
    tokens = files.current(now=True).tokens if files is not None else ()
    if files is None or not tokens:
        return ()
    if not files.tls and not files.settings.allow_insecure_tokens and not is_this_host(endpoint):
        raise SettingsError(
            f"{endpoint} gets no token over a connection without TLS, where anyone could read it: set the "
            "CA (EDL_TLS_CA, --tls-ca, ca=), or, if the network can be trusted, allow unencrypted tokens "
            "(EDL_ALLOW_INSECURE_TOKENS=1, --allow-insecure-tokens, allow_insecure_tokens=True)"
        )
    return ((AUTHORIZATION, f"Bearer {tokens[0]}"),)


def listen(server: grpc.aio.Server, address: str, files: CredentialFiles | None) -> int:
    """Make a server listen on `host:port` or `unix:/path`; return the TCP port; RuntimeError if gRPC cannot listen.

    Every new connection uses the certificates and CAs that the files contain at that moment.
    """
    _used_in.add(os.getpid())
    if files is None or not files.tls:
        return int(server.add_insecure_port(address))

    def shown() -> grpc.ServerCertificateConfiguration:
        """Return the certificates; gRPC calls this before every handshake, in its own thread."""
        material = files.current(now=True)
        assert material.pair is not None, "a server with TLS has a certificate"
        chain, key = material.pair
        return grpc.ssl_server_certificate_configuration([(key, chain)], material.ca)

    mutual = files.settings.ca is not None
    credentials = grpc.dynamic_ssl_server_credentials(shown(), shown, require_client_authentication=mutual)
    return int(server.add_secure_port(address, credentials))


def is_this_host(endpoint: str) -> bool:
    """Return whether an endpoint is localhost, a loopback address or a Unix socket."""
    host = host_of(endpoint)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Tokens that a server checks

_SCHEME = "bearer "
_REMEDY = "put one of this server's tokens into a file and name the file (EDL_TOKEN_FILE, --token-file, token_file=)"


def token_checks(files: CredentialFiles | None, *, open_service: str = "") -> Sequence[grpc.aio.ServerInterceptor]:
    """Return a server's interceptors: none if no tokens are set. Calls to `open_service` need no token."""
    return [_TokenCheck(files, open_service)] if files is not None and files.settings.token_file else []


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token before reading any of their bytes, whether or not the method exists."""

    def __init__(self, files: CredentialFiles, open_service: str) -> None:
        self._files = files
        self._open_service = open_service

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        shown = [str(value) for name, value in handler_call_details.invocation_metadata or () if name == AUTHORIZATION]
        service = str(handler_call_details.method).strip("/").rpartition("/")[0]
        if service == self._open_service or self._allows(shown):
            return await continuation(handler_call_details)
        return _REFUSE_WRONG if shown else _REFUSE_NONE

    def _allows(self, shown: Sequence[str]) -> bool:
        """Return whether a call's `authorization` metadata has a single value, which is a valid token."""
        if len(shown) != 1 or shown[0][: len(_SCHEME)].lower() != _SCHEME:
            return False
        return self._files.accepts(shown[0][len(_SCHEME) :].encode())


def _refusal(words: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        # Not `abort`, whose exception keeps the call alive until the next garbage collection.
        context.set_code(grpc.StatusCode.UNAUTHENTICATED)
        context.set_details(words)
        return
        yield  # a generator that sends no message: a watch would take an empty one for an empty state

    return grpc.stream_stream_rpc_method_handler(refuse)  # fits unary methods too, because it reads nothing


_REFUSE_NONE = _refusal(f"no token: {_REMEDY}")
_REFUSE_WRONG = _refusal(f"the token is not valid here, or is no longer valid: {_REMEDY}")
