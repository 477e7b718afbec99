"""Reads files of certificates, keys and tokens, and diagnoses failed TLS handshakes.

`CredentialFiles` reads the files again when they change, without a restart of the process. If the new files are
unusable, the old contents stay in use. For a failed handshake, gRPC reports at best an error code from its TLS library,
so `explain_handshake` connects once more with the standard library, which gives the reason. `PeerTLS` provides mutual
TLS over plain sockets between the agents of a job.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import logging
import os
import re
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from edl.errors import ProtocolError, SettingsError
from edl.settings import SYSTEM_CA, Credentials

logger = logging.getLogger(__name__)

AUTHORIZATION: Final = "authorization"
"""Metadata of each call: `Bearer TOKEN` (RFC 6750)."""
CHECK_EVERY_S: Final = 2.0
"""Interval between checks of the files while connections are open; a check is four `stat` calls. A revocation takes
effect within this time."""

_MOST_NBYTES: Final = 1 << 20
"""Maximum size of a file. A bundle of all public CAs has 200 kB; a much larger file is not PEM, and would
be read repeatedly."""
_PEM: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_GRPC_KEYS: Final = tuple(map(bytes.fromhex, ("06092a864886f70d010101", "06082a8648ce3d030107", "06052b81040022")))
"""Object identifiers of the key types that can be used in a certificate: RSA, EC P-256 and EC P-384. gRPC's TLS library
loads a certificate with another type of key (P-521, Ed25519, RSA-PSS), but then refuses every handshake."""
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750, b64token
_LEAST_TOKEN: Final = 16
"""Length in characters of the shortest token that a teacher accepts: shorter tokens can be guessed over the network."""


# The contents of the files


@dataclass(frozen=True)
class Material:
    """The contents of the files. The repr never contains secrets."""

    version: int  # number of changes so far
    ca: bytes | None = field(repr=False)  # PEM of the trusted CAs
    pair: tuple[bytes, bytes] | None = field(repr=False)  # PEM of certificate and key
    tokens: tuple[str, ...] = field(repr=False)  # in the order of the file
    names: tuple[str, ...] = ()  # hosts and addresses in the certificate
    not_after: str = ""  # when the certificate expires, in OpenSSL's format

    @property
    def authorities(self) -> frozenset[bytes]:
        """The certificates in `ca`, one by one."""
        return frozenset(certificates_in(self.ca or b""))


def read_tokens(path: str, *, serving: bool) -> tuple[str, ...]:
    """Read bearer tokens, one per line, ignoring comments (#). Errors show no token; servers refuse short tokens."""
    tokens = []
    lines = _read(path, "token file", secret=True).decode("utf-8-sig", "replace").splitlines()
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if not _TOKEN.fullmatch(line):
            raise SettingsError(
                f"token file {path!r}, line {number}: expected one token per line, of letters, digits and -._~+/="
            )
        if serving and len(line) < _LEAST_TOKEN:
            raise SettingsError(
                f"token file {path!r}, line {number}: a token of {len(line)} characters can be guessed; use at least "
                f"{_LEAST_TOKEN}: openssl rand -hex 32"
            )
        tokens.append(line)
    if not tokens:
        raise SettingsError(f"token file {path!r} contains no token: write one per line (openssl rand -hex 32)")
    return tuple(tokens)


def certificates_in(pem: bytes) -> list[bytes]:
    """Return the certificates in a PEM file, each as DER."""
    return [base64.b64decode(found[2]) for found in _PEM.finditer(pem) if found[1] == b"CERTIFICATE"]


def load_pair(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    """Load a certificate and key from memory, so that exactly the checked pair is used. `context` may be in use."""
    memory = os.memfd_create("edl-tls")  # the standard library takes only file names, and the key must not touch a disk
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(key + chain)
        context.load_cert_chain(f"/proc/self/fd/{memory}", password=lambda: "")  # else OpenSSL prompts at the terminal
    finally:
        os.close(memory)


def context_for(ca: bytes | None, pair: tuple[bytes, bytes] | None, *, serving: bool) -> ssl.SSLContext:
    """Return a context of the standard library that trusts and presents the same certificates as gRPC."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serving else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        context.load_verify_locations(cadata=ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    if pair is not None:
        load_pair(context, *pair)
    return context


def _unverified() -> ssl.SSLContext:
    """Return a context to test whether a server speaks TLS; never send data over such a connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _read(path: str, what: str, *, secret: bool = False) -> bytes:
    try:
        # Non-blocking, because opening a pipe would wait for its writer.
        with open(
            Path(path).expanduser(), "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
        ) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise SettingsError(f"{what} {path!r} is not a regular file")
            if secret and mode & stat.S_IRWXO:  # Kubernetes gives secrets to a pod's group (`fsGroup`)
                raise SettingsError(
                    f"{what} {path!r} can be read by every user of this host (mode {stat.S_IMODE(mode):04o}): "
                    f"chmod o-rwx it, and replace what others may have read; in Kubernetes set defaultMode: 0440"
                )
            data = file.read(_MOST_NBYTES + 1)
    except OSError as exc:
        # The path may be the secret itself, given by mistake.
        shown = repr(path) if not secret or os.sep in path or os.path.lexists(path) else "(a name without a folder)"
        raise SettingsError(
            f"{what} {shown} cannot be read: {exc.strerror or type(exc).__name__}; this process runs as user "
            f"{os.geteuid()}. Give the path of a file"
        ) from exc
    if not data.strip():
        raise SettingsError(f"{what} {path!r} is empty")
    if len(data) > _MOST_NBYTES:
        raise SettingsError(f"{what} {path!r} has more than {_MOST_NBYTES:,} bytes: this must be the wrong file")
    return data


def _read_certificates(path: str, what: str) -> bytes:
    """Return certificates as clean PEM: gRPC skips certificates after a byte order mark or within a line."""
    pem = _read(path, what)
    try:
        found = certificates_in(pem)
    except ValueError:  # not base64
        found = []
    if not found or len(found) != pem.count(b"-----BEGIN CERTIFICATE-----"):
        raise SettingsError(
            f"{what} {path!r} contains no certificate, or a damaged one: expected PEM, -----BEGIN CERTIFICATE-----"
        )
    return "".join(map(ssl.DER_cert_to_PEM_cert, found)).encode()


def _read_pair(cert: str, key: str) -> tuple[bytes, bytes]:
    chain = _read_certificates(cert, "TLS certificate")
    found = [part for part in _PEM.finditer(_read(key, "TLS key", secret=True)) if part[1].endswith(b"PRIVATE KEY")]
    if not found:
        raise SettingsError(f"TLS key {key!r} contains no private key: expected PEM, -----BEGIN PRIVATE KEY-----")
    private = found[0][0] + b"\n"
    if b"ENCRYPTED" in private:
        raise SettingsError(
            f"TLS key {key!r} is encrypted: decrypt it (openssl pkey -in KEY -out NEW_KEY) and protect the file instead"
        )
    if not any(kind in certificates_in(chain)[0] for kind in _GRPC_KEYS):
        raise SettingsError(
            f"TLS certificate {cert!r} is for a kind of key that gRPC cannot use: have one issued for an EC "
            "P-256, EC P-384 or RSA key"
        )
    return chain, private


def _read_ca(ca: str) -> bytes:
    if ca == SYSTEM_CA:
        found = ssl.get_default_verify_paths().cafile
        if found is None:
            raise SettingsError(
                f"TLS CA {ca!r}: this system has no CA file where OpenSSL looks for one; name one, or set SSL_CERT_FILE"
            )
        ca = found
    bundle = _read_certificates(ca, "TLS CA file")
    try:
        context_for(bundle, None, serving=False)
    except ssl.SSLError as exc:
        raise SettingsError(f"TLS CA file {ca!r} contains no usable certificate: {_reason_of(exc)}") from exc
    return bundle


def _identity(pair: tuple[bytes, bytes], settings: Credentials, *, serving: bool) -> tuple[tuple[str, ...], str]:
    """Check that a certificate matches its key and is valid now; return the certificate's names and expiry.

    The standard library reads certificates only in a handshake. So this function runs both sides of a handshake in
    memory, and the other side trusts only this certificate.
    """
    client, server = _unverified(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other = client if serving else server
    other.verify_mode = ssl.CERT_REQUIRED
    other.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    what = f"TLS certificate {settings.cert!r}"
    try:
        for context in (client, server):
            load_pair(context, *pair)
        other.load_verify_locations(cadata=certificates_in(pair[0])[0])
        ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(4):  # turns; TLS 1.3 takes two and TLS 1.2 three
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as exc:
        raise SettingsError(_why_unverified(what, exc)) from exc
    except ssl.SSLError as exc:
        if exc.reason != "KEY_VALUES_MISMATCH":
            raise SettingsError(f"{what} with key {settings.key!r} cannot be used: {_reason_of(exc)}") from exc
        raise SettingsError(
            f"TLS key {settings.key!r} does not match certificate {settings.cert!r}: give the key of the certificate"
        ) from exc
    found: dict[str, Any] = ends[0 if serving else 1].getpeercert() or {}
    names = [str(value) for kind, value in found.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    return tuple(names), str(found.get("notAfter", ""))


def _reason_of(exc: ssl.SSLError) -> str:
    return (exc.reason or str(exc)).lower().replace("_", " ")


class CredentialFiles:
    """Reads the files of `credentials`, and reads them again when they change. Thread-safe.

    For a server (`serving`), `ca` is the CA that signs its clients' certificates. Raises SettingsError if a file or
    setting is unusable.
    """

    def __init__(self, credentials: Credentials, *, serving: bool = False) -> None:
        self.settings = credentials
        self.serving = serving
        if serving and (credentials.ca or credentials.server_name) and not credentials.cert:
            raise SettingsError(
                "TLS is set without a certificate: a server needs --tls-cert and --tls-key "
                "(EDL_TLS_CERT and EDL_TLS_KEY)"
            )
        if not serving and (credentials.cert or credentials.server_name) and not credentials.ca:
            raise SettingsError(
                "TLS is set without a CA, so no server can be verified: name the CA that signs the "
                f"servers' certificates, --tls-ca FILE (EDL_TLS_CA, ca=), or {SYSTEM_CA!r} for the CAs of this system"
            )
        if serving and credentials.ca == SYSTEM_CA:
            raise SettingsError(
                f"TLS CA {SYSTEM_CA!r}: anyone can get a certificate from a public CA; for clients, name your own CA"
            )
        self._lock = threading.Lock()
        self._seen = self._look()
        self._checked_at = time.monotonic()
        self._complaint = ""
        self._material = self._read(0)
        self.settings = _absolute(credentials)  # the program may change its working folder before the next read

    @classmethod
    def of(cls, credentials: Credentials, *, serving: bool = False) -> CredentialFiles | None:
        """Return the files, or None if no credentials are set."""
        return cls(credentials, serving=serving) if credentials else None

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.settings.cert if self.serving else self.settings.ca)

    def current(self, *, now: bool = False) -> Material:
        """Return the contents, at most `CHECK_EVERY_S` old (with `now`, current). Unusable files are only logged."""
        with self._lock:
            at = time.monotonic()
            if not now and at < self._checked_at + CHECK_EVERY_S:
                return self._material
            self._checked_at = at
            try:
                seen = self._look()
                if seen == self._seen:
                    return self._material
                material = self._read(self._material.version + 1)
            except Exception as exc:  # any error: revocations must still be checked for
                # The next check tries again: files are replaced one after the other, and a key may follow soon.
                foreseen = isinstance(exc, SettingsError)
                why = str(exc) if foreseen else f"{type(exc).__name__}: {exc}"
                if why != self._complaint:
                    self._complaint = why
                    logger.warning(
                        "new credentials are unusable; the earlier ones stay in use: %s", why, exc_info=not foreseen
                    )
                return self._material
            self._seen = seen
            self._complaint = ""
            if material == replace(self._material, version=material.version):
                return self._material  # the same contents, written again: connections can stay
            self._material = material
            until = f", valid until {material.not_after}" if material.not_after else ""
            logger.info("credentials were replaced; the new credentials are in use from now on%s", until)
            return material

    def accepts(self, token: bytes) -> bool:
        """Return whether a token is valid now. Compares all tokens, so the time does not reveal which one matches."""
        matches = [hmac.compare_digest(token, valid.encode()) for valid in self.current().tokens]
        return any(matches)

    def explain_certificate(self) -> str:
        """Return why this side's own certificate cannot be used now; empty if it is valid."""
        pair = self.current(now=True).pair
        if pair is not None:
            try:
                _identity(pair, self.settings, serving=self.serving)
            except SettingsError as exc:
                return str(exc)
        return ""

    def _read(self, version: int) -> Material:
        settings = self.settings
        pair: tuple[bytes, bytes] | None = None
        identity: tuple[tuple[str, ...], str] = (), ""
        if settings.cert and settings.key:
            pair = _read_pair(settings.cert, settings.key)
            identity = _identity(pair, settings, serving=self.serving)
        ca = _read_ca(settings.ca) if settings.ca else None
        tokens = read_tokens(settings.token_file, serving=self.serving) if settings.token_file else ()
        return Material(version, ca, pair, tokens, *identity)

    def _look(self) -> Sequence[object]:
        """Return a value that changes when a file is written or replaced by `rename`, or a Kubernetes link moves."""
        found: list[object] = []
        for path in (self.settings.ca, self.settings.cert, self.settings.key, self.settings.token_file):
            with contextlib.suppress(OSError):
                seen = Path(path or "").expanduser().stat() if path else None
                found.append(seen and (path, seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns))
        return found


def _absolute(credentials: Credentials) -> Credentials:
    def absolute(path: str | None) -> str | None:
        return str(Path(path).expanduser().absolute()) if path and path != SYSTEM_CA else path

    paths = {name: absolute(getattr(credentials, name)) for name in ("ca", "cert", "key", "token_file")}
    return replace(credentials, **paths)  # type: ignore[arg-type]  # names of fields that are paths


# Why a handshake failed

_TIMEOUT_S: Final = 2.0
"""Timeout for each step of a connection, below a student's wait between attempts to connect to a lost teacher."""
_SIGNS: Final = re.compile("andshake|Verification Check|Socket closed|reset by peer|ALPN|SSL_ERROR|Broken pipe")
"""Words in gRPC's connection errors that indicate a failed handshake as the possible cause."""
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")
_ABOUT_CERTIFICATES: Final = re.compile("ALERT_(CERTIFICATE|BAD_CERT|UNKNOWN_CA|ACCESS|NO_CERT)")
_UNTRUSTED: Final = (2, 7, 18, 19, 20, 21)
"""X509_V_ERR_* codes for an untrusted certificate: its issuer is not found, or an issuer with the same name has another
key; it is self-signed; or its chain does not end at a trusted CA."""


def host_of(endpoint: str) -> str:
    """Return the name that a certificate must have by default: the host in `host:port`, localhost for `unix:/path`."""
    return "localhost" if endpoint.startswith("unix:") else endpoint.rpartition(":")[0].strip("[]")


def explain_handshake(words: str | None, endpoint: str, files: CredentialFiles | None, *, authority: str = "") -> str:
    """Connect to a gRPC server once more, and return why the connection fails. This can take some seconds.

    The result is empty if the reason is unrelated to TLS, if gRPC's error message `words` rules out TLS as the cause
    (None skips this check), or if the endpoint is a Unix socket. The certificate is checked against the host in
    `authority`, if given.
    """
    if words is not None and not _SIGNS.search(words):
        return ""
    files = files if files is not None and files.tls else None
    material = files.current(now=True) if files is not None else None
    settings = files.settings if files is not None else Credentials()
    context = _unverified() if material is None else context_for(material.ca, material.pair, serving=False)
    expected = settings.server_name or host_of(authority or endpoint)
    try:
        ended = _shake_hands(endpoint, context, expected)
    except ssl.SSLCertVerificationError as exc:
        return _why_unverified(f"the certificate of {endpoint}", exc, settings.ca, expected)
    except ssl.SSLError as exc:
        if files is None:
            return ""
        if exc.reason in _NO_TLS:
            return (
                f"{endpoint} does not speak TLS, but this side has a CA set: give the server a certificate "
                "(edl serve --tls-cert --tls-key), or unset the CA here (EDL_TLS_CA)"
            )
        if not _ABOUT_CERTIFICATES.search(exc.reason or ""):
            return f"{endpoint}: the TLS handshake failed: {_reason_of(exc)}"
        ended = True
    except (OSError, ValueError):
        return ""  # the server is down or silent: gRPC's message says as much
    if files is None or material is None:
        return (
            f"{endpoint} speaks TLS, but this side has no CA set: name the CA that signed its certificate "
            "(EDL_TLS_CA, --tls-ca, ca=)"
        )
    if not ended:
        return ""
    if material.pair is None:
        return (
            f"{endpoint} requires a client certificate (mutual TLS), but this side sends none: set one (EDL_TLS_CERT "
            "and EDL_TLS_KEY, --tls-cert and --tls-key)"
        )
    why = files.explain_certificate() or (
        "no CA that the server trusts (its --tls-ca) signed it, perhaps because that CA was replaced; have a new "
        "certificate issued, or, if an intermediate CA signed it, append that CA's certificate to the file"
    )
    return f"{endpoint} does not accept this side's certificate {settings.cert!r}: {why}"


def _shake_hands(endpoint: str, context: ssl.SSLContext, name: str) -> bool:
    """Connect, and wait for the server's first byte; return whether the server ended the connection instead."""
    context.set_alpn_protocols(["h2"])  # gRPC servers require it
    host, _, port = endpoint.rpartition(":")
    with (
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        try:
            return not connection.recv(1)
        except ConnectionError:
            return True


def _why_unverified(what: str, exc: ssl.SSLCertVerificationError, ca: str | None = None, expected: str = "") -> str:
    match exc.verify_code:  # X509_V_ERR_*
        case 10:
            return f"{what} has expired: have a new one issued, and replace its files; no restart is needed"
        case 9:
            now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            return f"{what} is not valid yet: check its dates, and the clock of this host ({now})"
        case 62 | 64:
            return (
                f"{what} is for a different name, not for {expected!r}: have one issued with {expected!r} in its "
                "subjectAltName, or set the expected name (EDL_TLS_SERVER_NAME, --tls-server-name, server_name=)"
            )
    if exc.verify_code in _UNTRUSTED and ca:
        return (
            f"{what} is not signed by a CA in {ca!r} ({exc.verify_message}): add the CA that signed it, or, if that "
            "is an intermediate CA, append it to the certificate's own file; or a different server is answering"
        )
    return f"{what} cannot be used: {exc.verify_message}"


# Between agents


class PeerTLS:
    """Mutual TLS between peers, with certificates from the same CA. The files are read again for every connection."""

    def __init__(self, credentials: Credentials) -> None:
        if not (credentials.ca and credentials.cert and credentials.key):
            raise SettingsError(
                "TLS between nodes needs all of --tls-ca, --tls-cert and --tls-key (EDL_TLS_CA, EDL_TLS_CERT, "
                "EDL_TLS_KEY): each node is a server and a client to the others"
            )
        self._files = CredentialFiles(credentials, serving=True)

    def server_name(self, host: str) -> str:
        """Return the name that the certificate of a node at `host` must contain."""
        return self._files.settings.server_name or host

    def context(self, *, serving: bool) -> ssl.SSLContext:
        """Return a context for a new connection, from another node if `serving`, else to another node."""
        material = self._files.current(now=True)
        return context_for(material.ca, material.pair, serving=serving)

    def wrap(self, connection: socket.socket, host: str | None = None) -> ssl.SSLSocket:
        """Wrap a connection from a node, or to `host`, before its handshake; raise `OSError` if the peer hung up."""
        name = None if host is None else self.server_name(host)
        return self.context(serving=host is None).wrap_socket(connection, host is None, False, server_hostname=name)

    def handshake(self, connection: ssl.SSLSocket, timeout_s: float) -> None:
        """Wait for the handshake; if it fails, raise `ProtocolError` with the reason and the remedy."""
        connection.settimeout(timeout_s)
        try:
            with self.explained():
                connection.do_handshake()
        except ssl.SSLCertVerificationError as exc:
            expected = connection.server_hostname or ""
            raise ProtocolError(_why_unverified("its certificate", exc, self._files.settings.ca, expected)) from exc
        except OSError as exc:
            why = exc.strerror or str(exc) or type(exc).__name__
            raise ProtocolError(f"the TLS handshake failed ({why}): set TLS on all nodes or on none") from exc

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise `ProtocolError` if the peer refuses this node's certificate.

        With TLS 1.3, a peer reports a refusal only after the handshake.
        """
        try:
            yield
        except ssl.SSLError as exc:
            if "ALERT" not in (exc.reason or ""):
                raise
            remedy = self._files.explain_certificate() or (
                "have a certificate issued by a CA that the other node trusts, for this node's name"
            )
            raise ProtocolError(f"it does not accept this node's certificate ({_reason_of(exc)}): {remedy}") from exc
