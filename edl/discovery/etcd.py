"""Implements the store on etcd, over its gRPC API: keys below `edl/store/`, etcd's leases, and revisions as versions.

Every write is a transaction that compares the key's version and lease, and sets the key. The module uses no client
library: the maintained libraries lack features that EDL needs, and the other libraries do not work with current
versions of protobuf.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, TypeVar

from typing_extensions import override

from edl.discovery.store import Claim, Entries, Entry, Store, held_by_another
from edl.discovery.store_url import StoreUrl
from edl.discovery.watching import Follower, query_wait_s
from edl.errors import DiscoveryError, LeaseLostError, SettingsError
from edl.protocol import etcd as wire
from edl.protocol.channel import Metadata, channel
from edl.protocol.tls import CredentialFiles
from edl.protocol.transport import grpc
from edl.quoting import shown
from edl.resource import Resource
from edl.settings import SYSTEM_CA, Credentials, boolean, read

Q = TypeVar("Q", bound=Any)
A = TypeVar("A", bound=Any)

ROOT: Final = "edl/store/"
PORT: Final = 2379
"""The port that IANA assigned to etcd for its clients."""
_NO_LEASE: Final = 0
"""etcd's own number for a key that belongs to no lease."""
_MOST_BYTES: Final = 64 * 1024**2
"""Maximum size of an answer: enough for some hundred thousand teachers. gRPC's default limit of 4 MiB is too small for
17 of a store's largest values."""
_PING_EVERY_S: Final = 10.0
"""Interval between pings on a connection with a pending request. etcd closes a connection that is pinged every 5 s or
more often."""
_RECONNECT_S: Final = (0.1, 1.0)
"""The first and the longest wait between gRPC's attempts to connect: gRPC tries to connect within a second after a
member has returned."""
_CONNECT_S: Final = 2.0
"""How long an attempt to connect may take. With gRPC's default, an attempt would waste 20 s on a host that is down."""


# --- Where etcd is, and how to authenticate ---


@dataclass(eq=False)
class EtcdTarget:
    """A cluster, as given by a URL and the environment variables of etcd's own command line."""

    endpoints: tuple[str, ...]  # `host:port` of members; the first that answers is used
    timeout_s: float = 5.0  # of a request, including all attempts
    files: CredentialFiles | None = field(default=None, repr=False)
    user: str = ""
    password: str = field(default="", repr=False)
    token: str | None = field(default=None, repr=False)
    """The user's token for all connections: etcd is slow to create a token. None before the login; "" if etcd has no
    users."""

    def __str__(self) -> str:
        return f"etcd at {'https' if self.files else 'http'}://{','.join(self.endpoints)}"

    @classmethod
    def of(cls, url: StoreUrl, timeout_s: float, environ: Mapping[str, str] | None = None) -> EtcdTarget:
        """Return the target for a URL and the environment; error messages never contain a password."""
        user, password = _user(environ)
        return cls(
            endpoints=tuple(f"{f'[{host}]' if ':' in host else host}:{port or PORT}" for host, port in url.servers),
            timeout_s=timeout_s,
            files=_files(environ) if url.scheme == "etcd+https" else None,
            user=user,
            password=password,
        )


def _user(environ: Mapping[str, str] | None) -> tuple[str, str]:
    user, colon, password = (read("ETCDCTL_USER", str, environ) or "").partition(":")
    apart = read("ETCDCTL_PASSWORD", str, environ)
    if apart is not None:
        # As in etcdctl, a colon separates name and password, unless the password has its own variable.
        return user + colon + password, apart
    if user and not colon:
        raise SettingsError(f"ETCDCTL_USER={user!r} is set without a password: set ETCDCTL_PASSWORD")
    return user, password


def _files(environ: Mapping[str, str] | None) -> CredentialFiles:
    if read("ETCDCTL_INSECURE_SKIP_TLS_VERIFY", boolean, environ):
        raise SettingsError(
            "ETCDCTL_INSECURE_SKIP_TLS_VERIFY is set, but EDL always verifies certificates: unset it, and name the CA "
            "that signed etcd's certificate in ETCDCTL_CACERT"
        )
    cert, key = read("ETCDCTL_CERT", str, environ), read("ETCDCTL_KEY", str, environ)
    if bool(cert) != bool(key):
        there, missing = ("ETCDCTL_CERT", "ETCDCTL_KEY") if cert else ("ETCDCTL_KEY", "ETCDCTL_CERT")
        raise SettingsError(f"{there} is set without {missing}: a certificate and its key must be set together")
    try:
        return CredentialFiles(Credentials(ca=read("ETCDCTL_CACERT", str, environ) or SYSTEM_CA, cert=cert, key=key))
    except SettingsError as exc:
        raise SettingsError(f"ETCDCTL_CACERT, ETCDCTL_CERT or ETCDCTL_KEY: {exc}") from exc


# --- The client ---


@dataclass(frozen=True)
class _Method(Generic[Q, A]):
    """A method of etcd's API; a `repeatable` call may be sent again even if a member may have executed it already."""

    path: str
    request: type[Q]
    answer: type[A]
    repeatable: bool


_RANGE = _Method("/etcdserverpb.KV/Range", wire.RangeRequest, wire.RangeResponse, True)
_TXN = _Method("/etcdserverpb.KV/Txn", wire.TxnRequest, wire.TxnResponse, False)
_DELETE = _Method("/etcdserverpb.KV/DeleteRange", wire.DeleteRangeRequest, wire.DeleteRangeResponse, False)
_GRANT = _Method("/etcdserverpb.Lease/LeaseGrant", wire.LeaseGrantRequest, wire.LeaseGrantResponse, True)
# A bidirectional stream in etcd, used here with one message each way: on the wire that is a unary call.
_RENEW = _Method("/etcdserverpb.Lease/LeaseKeepAlive", wire.LeaseKeepAliveRequest, wire.LeaseKeepAliveResponse, True)
_REVOKE = _Method("/etcdserverpb.Lease/LeaseRevoke", wire.LeaseRevokeRequest, wire.LeaseRevokeResponse, True)
_LOGIN = _Method("/etcdserverpb.Auth/Authenticate", wire.AuthenticateRequest, wire.AuthenticateResponse, True)


class EtcdClient(Resource):
    """Calls a cluster; DiscoveryError if no member answers, or etcd refuses a call. Closing ends pending calls."""

    def __init__(self, target: EtcdTarget) -> None:
        super().__init__()
        self.target = target
        self._connect()
        self._preferred = 0

    def _connect(self) -> None:
        self._trust = _trust(self.target.files)
        options = (
            ("grpc.max_receive_message_length", _MOST_BYTES),
            ("grpc.keepalive_time_ms", int(_PING_EVERY_S * 1000)),
            ("grpc.keepalive_timeout_ms", math.ceil(self.target.timeout_s * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", int(_RECONNECT_S[0] * 1000)),
            ("grpc.max_reconnect_backoff_ms", int(_RECONNECT_S[1] * 1000)),
            ("grpc.min_reconnect_backoff_ms", int(_CONNECT_S * 1000)),
        )
        # A channel connects on first use, and reconnects when necessary.
        self._members = tuple(channel(endpoint, self.target.files, options) for endpoint in self.target.endpoints)

    def _halt(self) -> None:
        for member in self._members:
            member.close()

    def entries(self, prefix: bytes) -> tuple[int, list[wire.KeyValue]]:
        """Return the current revision and all keys that start with `prefix`, sorted."""
        answer = self.call(_RANGE, wire.RangeRequest(key=prefix, range_end=_end(prefix)))
        return answer.header.revision, list(answer.kvs)

    def await_change(self, prefix: bytes, revision: int, wait_s: float) -> None:
        """Wait until a key under `prefix` may have changed since `revision`, at most `wait_s` seconds."""
        self._check()
        index = self._preferred
        create = wire.WatchCreateRequest(key=prefix, range_end=_end(prefix), start_revision=revision + 1)
        # A member without a leader would stay silent; this makes it end the stream.
        metadata = (*self._login(time.monotonic() + self.target.timeout_s), ("hasleader", "true"))
        try:
            # A stream in both directions, like LeaseKeepAlive. etcd goes on answering after the last request.
            watch: Any = self._members[index].unary_stream(
                "/etcdserverpb.Watch/Watch", wire.WatchRequest.SerializeToString, wire.WatchResponse.FromString
            )
            stream = watch(wire.WatchRequest(create_request=create), timeout=wait_s, metadata=metadata)
        except ValueError:  # the channel was closed
            self._check()
            raise
        try:
            for answer in stream:
                if answer.canceled and not answer.compact_revision:
                    self.target.token = None  # it may have expired, which etcd reports as "permission denied" here
                if answer.events or answer.canceled or answer.header.revision < revision:
                    return
        except grpc.RpcError as exc:
            self._check()
            if exc.code() is grpc.StatusCode.UNAVAILABLE:
                self._avoid(index)  # the next request, for the current state, raises if no member is up
            elif exc.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._translated(exc) from exc
        finally:
            stream.cancel()

    def transact(self, request: wire.TxnRequest) -> wire.TxnResponse | None:
        """Execute a transaction; return None, with nothing done, if a lease in the transaction has expired."""
        try:
            return self.call(_TXN, request)
        except _RefusalError as refusal:
            if refusal.code is not grpc.StatusCode.NOT_FOUND:
                raise
        return None

    def grant(self, ttl_s: float) -> int:
        """Grant a lease. etcd counts whole seconds, and grants a longer lease if its elections take longer."""
        lease = self.call(_GRANT, wire.LeaseGrantRequest(TTL=math.ceil(ttl_s))).ID
        if not lease:
            raise DiscoveryError(f"{self.target}: not a valid etcd response: a lease without a number")
        return lease

    def renew(self, lease: int, ttl_s: float) -> bool:
        """Renew a lease; False if it has expired. If a member is silent, time remains to ask another member."""
        return self.call(_RENEW, wire.LeaseKeepAliveRequest(ID=lease), ttl_s / 4).TTL > 0

    def revoke(self, lease: int) -> None:
        """End a lease now, with its keys, if it still exists."""
        try:
            self.call(_REVOKE, wire.LeaseRevokeRequest(ID=lease))
        except _RefusalError as refusal:
            if refusal.code is not grpc.StatusCode.NOT_FOUND:
                raise

    def call(self, method: _Method[Q, A], request: Q, patience_s: float = math.inf) -> A:
        """Call a method; if it is repeatable, each member but the last has at most `patience_s` seconds to answer."""
        self._check()
        deadline = time.monotonic() + self.target.timeout_s
        try:
            return self._ask(method, request, self._login(deadline), deadline, patience_s)
        except _RefusalError as refusal:
            if not (self.target.token and refusal.concerns_session):
                raise
        # The call was refused before anything was done: the token has expired, or users have changed.
        self.target.token = None
        return self._ask(method, request, self._login(deadline), deadline, patience_s)

    def _login(self, deadline: float) -> Metadata:
        """Return the metadata for every call; log in first if necessary."""
        if not self.target.user:
            return ()
        token = self.target.token
        if token is None:
            login = wire.AuthenticateRequest(name=self.target.user, password=self.target.password)
            try:
                token = self._ask(_LOGIN, login, (), deadline).token
            except _RefusalError as refusal:
                if "not enabled" not in refusal.words:
                    raise
                token = ""  # this etcd has no users
            self.target.token = token
        return (("token", token),) if token else ()

    def _ask(
        self, method: _Method[Q, A], request: Q, metadata: Metadata, deadline: float, patience_s: float = math.inf
    ) -> A:
        """Ask the members in turn until one answers; see `call`."""
        failure: grpc.RpcError | None = None
        try:
            first, count = self._preferred, len(self._members)
            for index in [*range(first, count), *range(first)]:
                is_last = index == (first - 1) % count
                left_s = max(0.001, deadline - time.monotonic())
                # A silent member must leave time for another. A call that must not be repeated waits for its answer.
                share_s = left_s if is_last or not method.repeatable else min(left_s / 2, patience_s)
                try:
                    call: Any = self._members[index].unary_unary(
                        method.path, method.request.SerializeToString, method.answer.FromString
                    )
                    answer: A = call(request, timeout=share_s, metadata=metadata)
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
            failure = None  # its traceback references this frame

    def _avoid(self, index: int) -> None:
        """Ask another member from now on, with the current certificates."""
        if _trust(self.target.files) != self._trust:  # a channel keeps the certificates that it began with
            self._connect()
        if self._preferred == index:  # another thread may have switched already
            self._preferred = (index + 1) % len(self._members)

    def _translated(self, exc: grpc.RpcError) -> DiscoveryError:
        code, words = exc.code(), shown(exc.details() or "").removeprefix("etcdserver: ")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DiscoveryError(f"{self.target}: timed out after {self.target.timeout_s:g} s; {words}")
        if code is grpc.StatusCode.UNAVAILABLE and "etcdserver" not in (exc.details() or ""):
            return DiscoveryError(f"{self.target} cannot be reached: {words}{self._about_tls(words)}")
        return _RefusalError(f"{self.target}: {words or code.name}{self._remedy(code, words)}", code, words)

    def _about_tls(self, words: str) -> str:
        if self.target.files is not None:
            if "CERTIFICATE_VERIFY_FAILED" in words or "andshake" in words or "Peer name" in words:
                own = "" if self.target.files.settings.cert else "; if etcd asks for a certificate, set ETCDCTL_CERT"
                return (
                    " (ETCDCTL_CACERT must contain the CA that signed etcd's certificate, and the certificate must "
                    f"name the host{own})"
                )
            return ""
        cut = any(sign in words for sign in ("Socket closed", "reset by peer", "SETTINGS"))
        return " (if etcd speaks TLS, use etcd+https://)" if cut else ""

    def _remedy(self, code: grpc.StatusCode, words: str) -> str:
        if code is grpc.StatusCode.PERMISSION_DENIED:
            who = f"user {self.target.user}" if self.target.user else "the user (ETCDCTL_USER or certificate)"
            return f": {who} needs `etcdctl role grant-permission ROLE --prefix=true readwrite edl/`"
        if "user name is empty" in words:
            return ": set ETCDCTL_USER and ETCDCTL_PASSWORD"
        if "authentication failed" in words:
            return ": check ETCDCTL_USER and ETCDCTL_PASSWORD"
        if "database space exceeded" in words:
            return ": compact and defragment the database, then run `etcdctl alarm disarm`"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ": etcd 3.4 or newer is needed"
        return ""


class _RefusalError(DiscoveryError):
    def __init__(self, message: str, code: grpc.StatusCode, words: str) -> None:
        super().__init__(message)
        self.code = code
        self.words = words

    @property
    def concerns_session(self) -> bool:
        """Whether a call with another token may succeed."""
        return self.code is grpc.StatusCode.UNAUTHENTICATED or "auth store is old" in self.words


def _trust(files: CredentialFiles | None) -> tuple[bytes | None, tuple[bytes, bytes] | None]:
    """Return the trusted CAs, and this side's own certificate and key."""
    if files is None:
        return None, None
    material = files.current(now=True)
    return material.ca, material.pair


def _was_not_sent(exc: grpc.RpcError) -> bool:
    """Return whether no connection was established, so that the request has reached no member."""
    return exc.code() is grpc.StatusCode.UNAVAILABLE and (exc.details() or "").startswith("failed to connect to all")


def _end(prefix: bytes) -> bytes:
    """Return the first key after all keys with this prefix, which is non-empty UTF-8 and so contains no byte 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


# --- The store ---


class EtcdStore(Store):
    """See `Store`."""

    def __init__(self, target: EtcdTarget) -> None:
        super().__init__()
        self._target = target
        self._client = self._own(EtcdClient(target))

    def __repr__(self) -> str:
        return f"EtcdStore({self._target})"

    @override
    def grant(self, ttl_s: float) -> Claim:
        return _EtcdClaim(self._target, ttl_s)

    @override
    def owns(self, claim: Claim) -> bool:
        return isinstance(claim, _EtcdClaim) and claim.client.target.endpoints == self._target.endpoints

    @override
    def read(self, key: str) -> Entry | None:
        found = self._client.call(_RANGE, wire.RangeRequest(key=_path(key))).kvs
        return _entry(found[0]) if found else None

    @override
    def read_all(self, prefix: str) -> Sequence[Entry]:
        return [_entry(found) for found in self._client.entries(_path(prefix))[1]]

    @override
    def write(self, key: str, value: bytes, expected: int | None, claim: Claim | None) -> Entry | None:
        path = _path(key)
        put = _put_if_free(path, value, claim.number if isinstance(claim, _EtcdClaim) else _NO_LEASE)
        if expected is None:  # not within another transaction, where etcd checks neither its quota nor permissions
            request = put
        else:  # a key that does not exist has revision 0
            request = wire.TxnRequest(compare=[_has_version(path, expected)], success=[wire.RequestOp(request_txn=put)])
        answer = self._client.transact(request)
        if answer is None:
            if claim is None:
                raise DiscoveryError(
                    f"{self._target}: not a valid etcd response: a lease has expired, but the request named no lease"
                )
            raise LeaseLostError("the lease has expired")
        if expected is not None and not answer.succeeded:
            return None
        puts = [answer] if expected is None else [inner.response_txn for inner in answer.responses]
        # Whether either branch of `_put_if_free` was taken.
        if not any(each.succeeded or any(other.response_txn.succeeded for other in each.responses) for each in puts):
            raise held_by_another(key)
        return Entry(key, value, answer.header.revision)

    @override
    def remove(self, key: str, version: int | None) -> bool:
        path = _path(key)
        request = wire.DeleteRangeRequest(key=path)
        if version is None:
            return self._client.call(_DELETE, request).deleted > 0
        delete = wire.RequestOp(request_delete_range=request)
        answer = self._client.transact(wire.TxnRequest(compare=[_has_version(path, version)], success=[delete]))
        return answer is not None and answer.succeeded

    @override
    def follow(self, prefix: str) -> Follower[Entries]:
        return _EtcdFollower(self._target, _path(prefix))


class _EtcdClaim(Claim):
    """An etcd lease with its own connection, because the store may be closed while etcd grants the lease."""

    def __init__(self, target: EtcdTarget, ttl_s: float) -> None:
        super().__init__()
        self.client = EtcdClient(target)
        self._ttl_s = ttl_s
        try:
            self.number = self.client.grant(ttl_s)
        except BaseException:
            self.client.close()
            raise

    @override
    def renew(self) -> bool:
        return self.client.renew(self.number, self._ttl_s)

    @override
    def withdraw(self) -> None:
        try:
            self.client.revoke(self.number)
        finally:
            self.client.close()


class _EtcdFollower(Follower[Entries]):
    pause_s: ClassVar[float] = 0.05

    def __init__(self, target: EtcdTarget, path: bytes) -> None:
        self._client = EtcdClient(target)
        self._path = path
        self._revision: int | None = None

    @override
    def next(self, wait_s: float | None) -> Entries:
        known, self._revision = self._revision, None
        if known is not None:
            self._client.await_change(self._path, known, query_wait_s(wait_s))
        revision, found = self._client.entries(self._path)
        if known is None or revision >= known:  # an etcd that lost its data is behind
            self._revision = max(1, revision)
        return {entry.key: entry for entry in map(_entry, found)}

    @override
    def close(self) -> None:
        self._client.close()


def _path(key: str) -> bytes:
    return (ROOT + key).encode()


def _entry(found: wire.KeyValue) -> Entry:
    # Another program may have put a key there that is not text.
    return Entry(found.key.decode(errors="replace").removeprefix(ROOT), found.value, found.mod_revision)


def _has_version(path: bytes, version: int) -> wire.Compare:
    """Return the condition that a key's last revision is `version`; 0 means that the key does not exist."""
    return wire.Compare(target=wire.Compare.MOD, key=path, mod_revision=version)


def _put_if_free(path: bytes, value: bytes, lease: int) -> wire.TxnRequest:
    """Return a transaction that sets a key unless another lease holds it. For etcd, a missing key has lease 0."""
    put = wire.RequestOp(request_put=wire.PutRequest(key=path, value=value, lease=lease))

    def if_held_by(holder: int) -> wire.TxnRequest:
        compare = wire.Compare(target=wire.Compare.LEASE, key=path, lease=holder)
        return wire.TxnRequest(compare=[compare], success=[put])

    request = if_held_by(_NO_LEASE)
    if lease != _NO_LEASE:
        request.failure.append(wire.RequestOp(request_txn=if_held_by(lease)))
    return request
