"""etcd's gRPC API: where the members are, what EDL asks of them, and every error of gRPC translated.

No client library is behind it: the maintained ones leave out what EDL needs of etcd, and the others do not run beside
today's protobuf (docs/architecture.md). gRPC and protobuf are there for teachers anyway. The variables of etcd's own
command line (`ETCDCTL_USER`, ...) say how to authenticate.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar
from urllib.parse import SplitResult, urlsplit

from edl.discovery.resource import CallThread, Resource
from edl.errors import DiscoveryError, SettingsError
from edl.protocol import etcd as wire
from edl.protocol.channel import Metadata, channel
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.transport import grpc
from edl.quoting import shown
from edl.settings import SYSTEM_CA, Credentials, boolean, read

__all__ = ["EtcdClient", "EtcdSession", "EtcdTarget"]

Q = TypeVar("Q", bound=Any)
A = TypeVar("A", bound=Any)

PORT: Final = 2379
"""The port that IANA gave to etcd's clients."""
_MOST_BYTES: Final = 64 * 1024**2
"""Of an answer: some hundred thousand teachers. gRPC's own limit is 4 MiB, which 16 values of a store may exceed."""
_PING_EVERY_S: Final = 10.0
"""How often a connection with a request under way is tried. etcd hangs up on who tries more often than every 5 s."""
_RECONNECT_S: Final = (0.1, 1.0)
"""The first and the longest wait between two attempts of gRPC to connect: who comes back is found within a second."""
_CONNECT_S: Final = 2.0
"""How long an attempt to connect may take. gRPC's own 20 s would be spent on a host that was away at its beginning."""


@dataclass(eq=False)
class EtcdSession:
    """A user's session, which etcd takes its time to begin.

    Attributes:
        token: goes with every call. None before the login, empty where etcd has no users.
    """

    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class EtcdTarget:
    """A cluster.

    Attributes:
        endpoints: `host:port` of members; the first that answers is asked.
        timeout_s: how long a request may take, all attempts together.
        files: None without TLS (`etcd+https:`). Holds `ETCDCTL_CACERT`, `ETCDCTL_CERT` and `ETCDCTL_KEY`.
        user, password: `ETCDCTL_USER`, also as `name:password`, and `ETCDCTL_PASSWORD`. The password is never shown.
        session: shared by all connections to this target.
    """

    endpoints: tuple[str, ...]
    timeout_s: float = 5.0
    files: CredentialFiles | None = field(default=None, repr=False, compare=False)
    user: str = ""
    password: str = field(default="", repr=False)
    session: EtcdSession = field(default_factory=EtcdSession, repr=False, compare=False)

    def __str__(self) -> str:
        return f"etcd at {'https' if self.files else 'http'}://{','.join(self.endpoints)}"

    @classmethod
    def of(cls, parts: SplitResult, timeout_s: float, environ: Mapping[str, str] | None = None) -> EtcdTarget:
        """Return what a split URL and the environment say.

        Raises:
            SettingsError: something in it is unusable. The message repeats no password.
        """
        where = f"discovery URL {parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        if "@" in parts.netloc:
            raise SettingsError(f"{where}: a URL is no place for a password; set ETCDCTL_USER and ETCDCTL_PASSWORD")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise SettingsError(f"{where}: hosts and ports are expected, and nothing else: etcd://host:2379,host2:2379")
        user, password = _user(environ)
        return cls(
            endpoints=tuple(_endpoint(member, where) for member in parts.netloc.split(",")),
            timeout_s=timeout_s,
            files=_files(environ) if parts.scheme == "etcd+https" else None,
            user=user,
            password=password,
        )


def _endpoint(member: str, where: str) -> str:
    try:
        parts = urlsplit(f"//{member.strip()}")
        host, port = parts.hostname, parts.port or PORT
    except ValueError as exc:
        raise SettingsError(f"{where}: {exc}") from exc
    if not host:
        raise SettingsError(f"{where}: a host is missing; expected is etcd://host:2379 or etcd://host:2379,host2:2379")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _user(environ: Mapping[str, str] | None) -> tuple[str, str]:
    user, colon, password = (read("ETCDCTL_USER", str, environ) or "").partition(":")
    apart = read("ETCDCTL_PASSWORD", str, environ)
    if apart is not None:
        # etcdctl takes a name with a colon for one with a password, too, unless the password comes apart.
        return user + colon + password, apart
    if user and not colon:
        raise SettingsError(f"ETCDCTL_USER={user!r} is set without a password: set ETCDCTL_PASSWORD")
    return user, password


def _files(environ: Mapping[str, str] | None) -> CredentialFiles:
    if read("ETCDCTL_INSECURE_SKIP_TLS_VERIFY", boolean, environ):
        raise SettingsError(
            "ETCDCTL_INSECURE_SKIP_TLS_VERIFY is set, and EDL always verifies certificates: unset it, and name the CA "
            "that signed etcd's certificate in ETCDCTL_CACERT"
        )
    cert, key = read("ETCDCTL_CERT", str, environ), read("ETCDCTL_KEY", str, environ)
    if bool(cert) != bool(key):
        there, missing = ("ETCDCTL_CERT", "ETCDCTL_KEY") if cert else ("ETCDCTL_KEY", "ETCDCTL_CERT")
        raise SettingsError(f"{there} is set without {missing}: a certificate and its key come together")
    try:
        return CredentialFiles(Credentials(ca=read("ETCDCTL_CACERT", str, environ) or SYSTEM_CA, cert=cert, key=key))
    except SettingsError as exc:
        raise SettingsError(f"ETCDCTL_CACERT, ETCDCTL_CERT or ETCDCTL_KEY: {exc}") from exc


@dataclass(frozen=True)
class _Method(Generic[Q, A]):
    """A method of etcd's API.

    LeaseKeepAlive is a stream in both directions there, and used with a message each way. On the wire that is a unary
    call, which has a deadline and needs no thread.

    Attributes:
        repeatable: it may be asked of another member where it is unknown whether the first did it.
    """

    path: str
    request: type[Q]
    answer: type[A]
    repeatable: bool


_RANGE = _Method("/etcdserverpb.KV/Range", wire.RangeRequest, wire.RangeResponse, True)
_TXN = _Method("/etcdserverpb.KV/Txn", wire.TxnRequest, wire.TxnResponse, False)
_DELETE = _Method("/etcdserverpb.KV/DeleteRange", wire.DeleteRangeRequest, wire.DeleteRangeResponse, False)
_GRANT = _Method("/etcdserverpb.Lease/LeaseGrant", wire.LeaseGrantRequest, wire.LeaseGrantResponse, True)
_RENEW = _Method("/etcdserverpb.Lease/LeaseKeepAlive", wire.LeaseKeepAliveRequest, wire.LeaseKeepAliveResponse, True)
_REVOKE = _Method("/etcdserverpb.Lease/LeaseRevoke", wire.LeaseRevokeRequest, wire.LeaseRevokeResponse, True)
_LOGIN = _Method("/etcdserverpb.Auth/Authenticate", wire.AuthenticateRequest, wire.AuthenticateResponse, True)
_WATCH = _Method("/etcdserverpb.Watch/Watch", wire.WatchRequest, wire.WatchResponse, True)
_UNARY: Final = (_RANGE, _TXN, _DELETE, _GRANT, _RENEW, _REVOKE, _LOGIN)


class _Member:
    """A channel to a member, which connects when it is first used, and again whenever it has to."""

    def __init__(self, target: EtcdTarget, files: CredentialFiles | None, endpoint: str) -> None:
        options = (
            ("grpc.max_receive_message_length", _MOST_BYTES),
            ("grpc.keepalive_time_ms", int(_PING_EVERY_S * 1000)),
            ("grpc.keepalive_timeout_ms", math.ceil(target.timeout_s * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", int(_RECONNECT_S[0] * 1000)),
            ("grpc.max_reconnect_backoff_ms", int(_RECONNECT_S[1] * 1000)),
            ("grpc.min_reconnect_backoff_ms", int(_CONNECT_S * 1000)),
        )
        self.endpoint = endpoint
        self._channel = channel(endpoint, files, options)
        self.unary: Mapping[str, Any] = {
            method.path: self._channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.answer.FromString,
            )
            for method in _UNARY
        }
        # A stream in both directions as well. etcd goes on answering after the last request.
        self.watch: Any = self._channel.unary_stream(
            _WATCH.path,
            request_serializer=_WATCH.request.SerializeToString,
            response_deserializer=_WATCH.answer.FromString,
        )

    def close(self) -> None:
        """Hang up on calls that are under way."""
        self._channel.close()


class EtcdClient(Resource):
    """Calls to a cluster. Closing it ends calls that are under way.

    All methods raise DiscoveryError when no member can be reached, or etcd refuses.

    Args:
        from_main: the main thread calls this, for which there is a `CallThread`; else only background threads do.
    """

    def __init__(self, target: EtcdTarget, *, from_main: bool = True) -> None:
        super().__init__()
        self.target = target
        self._connect(target.files)
        self._preferred = 0
        self._calls = self._own(CallThread("edl-etcd")) if from_main else None

    def _connect(self, files: CredentialFiles | None) -> None:
        self._trust = _trust(files)
        self._members = tuple(_Member(self.target, files, endpoint) for endpoint in self.target.endpoints)

    def _halt(self) -> None:
        for member in self._members:
            member.close()

    # Keys

    def entry(self, key: bytes) -> wire.KeyValue | None:
        """Read a key."""
        found = self._call(_RANGE, wire.RangeRequest(key=key)).kvs
        return found[0] if found else None

    def entries(self, prefix: bytes) -> tuple[int, list[wire.KeyValue]]:
        """All keys that start with `prefix`, sorted, and the revision that they are of."""
        answer = self._call(_RANGE, wire.RangeRequest(key=prefix, range_end=_end(prefix)))
        return answer.header.revision, list(answer.kvs)

    def await_change(self, prefix: bytes, revision: int, wait_s: float) -> None:
        """Wait until a key under `prefix` differs from what it was at `revision`, or may; `wait_s` at most.

        Not for the main thread.
        """
        self._check()
        index = self._preferred
        create = wire.WatchCreateRequest(key=prefix, range_end=_end(prefix), start_revision=revision + 1)
        # A member without a leader would stay silent: with this it ends the stream.
        metadata = (*self._login(time.monotonic() + self.target.timeout_s), ("hasleader", "true"))
        try:
            stream = self._members[index].watch(
                wire.WatchRequest(create_request=create), timeout=wait_s, metadata=metadata
            )
        except ValueError:  # the channel was closed
            self._check()
            raise
        try:
            for answer in stream:
                if answer.canceled and not answer.compact_revision:
                    self.target.session.token = None  # what etcd says where it has expired is that permission is denied
                if answer.events or answer.canceled or answer.header.revision < revision:
                    return
        except grpc.RpcError as exc:
            self._check()
            if exc.code() is grpc.StatusCode.UNAVAILABLE:
                self._avoid(index)  # whoever asks for the present state hears whether another member is there
            elif exc.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._translated(exc) from exc
        finally:
            stream.cancel()

    def transact(self, request: wire.TxnRequest) -> wire.TxnResponse | None:
        """Do a transaction; None if a lease that it names is gone, so that nothing was done."""
        try:
            return self._request(_TXN, request)
        except _Refusal as refusal:
            if refusal.code is grpc.StatusCode.NOT_FOUND:
                return None
            raise DiscoveryError(str(refusal)) from refusal

    def delete(self, key: bytes) -> bool:
        """Delete a key; whether it was there."""
        return self._call(_DELETE, wire.DeleteRangeRequest(key=key)).deleted > 0

    # Leases

    def grant(self, ttl_s: float) -> int:
        """Grant a lease. etcd counts in whole seconds, and grants more where its elections take longer."""
        lease = self._call(_GRANT, wire.LeaseGrantRequest(TTL=math.ceil(ttl_s))).ID
        if not lease:
            raise DiscoveryError(f"{self.target}: the answer is not what etcd answers: a lease without a number")
        return lease

    def renew(self, lease: int, ttl_s: float) -> bool:
        """Renew; False if it is gone. A member that is silent leaves time for another before the lease is over."""
        return self._call(_RENEW, wire.LeaseKeepAliveRequest(ID=lease), ttl_s / 4).TTL > 0

    def revoke(self, lease: int) -> None:
        """End a lease now, with its keys, if there is such a lease."""
        try:
            self._request(_REVOKE, wire.LeaseRevokeRequest(ID=lease))
        except _Refusal as refusal:
            if refusal.code is not grpc.StatusCode.NOT_FOUND:
                raise DiscoveryError(str(refusal)) from refusal

    # Calls

    def _call(self, method: _Method[Q, A], request: Q, patience_s: float = math.inf) -> A:
        try:
            return self._request(method, request, patience_s)
        except _Refusal as refusal:
            raise DiscoveryError(str(refusal)) from refusal

    def _request(self, method: _Method[Q, A], request: Q, patience_s: float = math.inf) -> A:
        self._check()
        if self._calls is None:
            return self._call_here(method, request, patience_s)
        return self._calls.run(lambda: self._call_here(method, request, patience_s))

    def _call_here(self, method: _Method[Q, A], request: Q, patience_s: float) -> A:
        deadline = time.monotonic() + self.target.timeout_s
        try:
            return self._ask(method, request, self._login(deadline), deadline, patience_s)
        except _Refusal as refusal:
            if not (self.target.session.token and refusal.concerns_session):
                raise
        # It was refused before anything was done: the session has expired, or users have changed.
        self.target.session.token = None
        return self._ask(method, request, self._login(deadline), deadline, patience_s)

    def _login(self, deadline: float) -> Metadata:
        """Return what goes with every call; ask for it first, where that has not been done."""
        if not self.target.user:
            return ()
        token = self.target.session.token
        if token is None:
            login = wire.AuthenticateRequest(name=self.target.user, password=self.target.password)
            try:
                token = self._ask(_LOGIN, login, (), deadline).token
            except _Refusal as refusal:
                if "not enabled" not in refusal.words:
                    raise
                token = ""  # etcd asks nobody who they are
            self.target.session.token = token
        return (("token", token),) if token else ()

    def _ask(
        self, method: _Method[Q, A], request: Q, metadata: Metadata, deadline: float, patience_s: float = math.inf
    ) -> A:
        """Ask the members in turn, all but the last for `patience_s` at most."""
        failure: grpc.RpcError | None = None
        try:
            for index, is_last in self._in_turn():
                left_s = max(0.001, deadline - time.monotonic())
                # One that is silent must leave time for another. What must not be done twice waits for its answer.
                share_s = left_s if is_last or not method.repeatable else min(left_s / 2, patience_s)
                try:
                    answer: A = self._members[index].unary[method.path](request, timeout=share_s, metadata=metadata)
                except ValueError:  # the channel was closed
                    self._check()
                    raise
                except grpc.RpcError as exc:
                    self._check()
                    failure = exc
                    if exc.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                        break
                    self._avoid(index)
                    if not (method.repeatable or _was_not_sent(exc)):
                        break
                else:
                    return answer
            assert failure is not None
            raise self._translated(failure) from failure
        finally:
            failure = None  # its traceback holds this frame

    def _in_turn(self) -> Iterator[tuple[int, bool]]:
        first, count = self._preferred, len(self._members)
        for number in range(count):
            yield (first + number) % count, number == count - 1

    def _avoid(self, index: int) -> None:
        """Ask another member from now on, and with the certificates that there are now."""
        if self.target.files is not None:
            # A channel keeps those that it began with. The object of the target has a lock, which the thread of a
            # signal handler may hold.
            with contextlib.suppress(SettingsError):
                files = CredentialFiles(self.target.files.settings)
                if _trust(files) != self._trust:
                    self._connect(files)
        if self._preferred == index:  # another thread may have found out before
            self._preferred = (index + 1) % len(self._members)

    def _translated(self, exc: grpc.RpcError) -> DiscoveryError:
        code, words = exc.code(), shown(exc.details() or "").removeprefix("etcdserver: ")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DiscoveryError(f"{self.target}: timed out after {self.target.timeout_s:g} s; {words}")
        if code is grpc.StatusCode.UNAVAILABLE and "etcdserver" not in (exc.details() or ""):
            return DiscoveryError(f"{self.target} cannot be reached: {words}{self._about_tls(words)}")
        return _Refusal(f"{self.target}: {words or code.name}{self._remedy(code, words)}", code, words)

    def _about_tls(self, words: str) -> str:
        if self.target.files is not None:
            if "CERTIFICATE_VERIFY_FAILED" in words or "andshake" in words or "Peer name" in words:
                own = "" if self.target.files.settings.cert else "; if etcd asks for a certificate, set ETCDCTL_CERT"
                return f" (ETCDCTL_CACERT must hold the CA that signed etcd's certificate, for this host{own})"
            return ""
        cut = any(sign in words for sign in ("Socket closed", "reset by peer", "SETTINGS"))
        return " (if it speaks TLS: etcd+https://)" if cut else ""

    def _remedy(self, code: grpc.StatusCode, words: str) -> str:
        if code is grpc.StatusCode.PERMISSION_DENIED:
            who = f"user {self.target.user}" if self.target.user else "set ETCDCTL_USER; the certificate's own user"
            return f": {who} needs `etcdctl role grant-permission ROLE --prefix=true readwrite edl/`"
        if "user name is empty" in words:
            return ": set ETCDCTL_USER and ETCDCTL_PASSWORD"
        if "authentication failed" in words:
            return ": see ETCDCTL_USER and ETCDCTL_PASSWORD"
        if "database space exceeded" in words:
            return ": compact and defragment it, then `etcdctl alarm disarm`"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ": this is no etcd of version 3.4 or newer"
        return ""


class _Refusal(DiscoveryError):
    """etcd has answered, and said no."""

    def __init__(self, message: str, code: grpc.StatusCode, words: str) -> None:
        super().__init__(message)
        self.code = code
        self.words = words

    @property
    def concerns_session(self) -> bool:
        """Whether another token may help."""
        return self.code is grpc.StatusCode.UNAUTHENTICATED or "auth store is old" in self.words


def _trust(files: CredentialFiles | None) -> tuple[bytes | None, tuple[bytes, bytes] | None]:
    """CAs, and this side's own certificate with its key."""
    if files is None:
        return None, None
    material = files.current(now=True)
    return material.ca, material.pair


def _was_not_sent(exc: grpc.RpcError) -> bool:
    """Return whether no connection came to be, so that the request has reached no member."""
    return exc.code() is grpc.StatusCode.UNAVAILABLE and (exc.details() or "").startswith("failed to connect to all")


def _end(prefix: bytes) -> bytes:
    """Return the first key behind all that start with `prefix`, which is UTF-8 and not empty: 0xff is not in it."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
