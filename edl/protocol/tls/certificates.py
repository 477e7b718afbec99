"""Looks at certificates, keys and tokens before they are used, with the standard library only."""

from __future__ import annotations

import base64
import codecs
import contextlib
import os
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edl.errors import SettingsError
from edl.protocol.tls.public_keys import kind_not_in_grpc
from edl.protocol.tls.verification import EXPIRED, NOT_YET_VALID, utc_now
from edl.settings import SYSTEM_CA

_MOST_NBYTES: Final = 1 << 20
"""Bundles of all public CAs have 200 kB; what is much larger is no PEM file, and would be read again and again."""
_OTHERS: Final = stat.S_IRWXO
"""Group access is left alone: Kubernetes gives secrets to a pod's group (`fsGroup`)."""
_PARTIAL_CHAIN: Final = getattr(ssl, "VERIFY_X509_PARTIAL_CHAIN", 0x80000)
_MARKS: Final = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NOT_AT_START: Final = re.compile(rb"(?<=[^\r\n])-----BEGIN [A-Z ]+-----")
"""gRPC's TLS library passes over such a line, and so over a certificate; OpenSSL, and what is here, may not."""
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750, b64token
_LEAST_TOKEN: Final = 16
"""Characters of a token that a teacher takes: shorter ones can be guessed over the network."""


@dataclass(frozen=True)
class CertificateIdentity:
    """The contents of a certificate.

    Attributes:
        names: host names and addresses that it is for.
        not_after: until when it is valid, in OpenSSL's words.
    """

    names: tuple[str, ...]
    not_after: str

    @property
    def not_after_s(self) -> float:
        """`not_after` in seconds since 1970."""
        return float(ssl.cert_time_to_seconds(self.not_after)) if self.not_after else 0.0


def read_pair(cert: str, key: str) -> tuple[bytes, bytes]:
    """Read a certificate and its key, and see that they belong together.

    Returns:
        Both as PEM.

    Raises:
        SettingsError: a file cannot be used; says why, and what to do.
    """
    chain = _read(cert, "TLS certificate")
    _check_lines(chain, f"TLS certificate {cert!r}")
    if b"-----BEGIN CERTIFICATE-----" not in chain:
        raise SettingsError(f"TLS certificate {cert!r} holds no certificate: expected PEM, -----BEGIN CERTIFICATE-----")
    secret = _read(key, "TLS key", secret=True)
    _check_lines(secret, f"TLS key {key!r}")
    if b"PRIVATE KEY-----" not in secret:
        raise SettingsError(f"TLS key {key!r} holds no private key: expected PEM, -----BEGIN PRIVATE KEY-----")
    if b"ENCRYPTED" in secret:
        raise SettingsError(
            f"TLS key {key!r} is encrypted: decrypt it (openssl pkey -in KEY -out NEW_KEY) and protect the file instead"
        )
    if kind := _kind_of(chain):
        raise SettingsError(
            f"TLS certificate {cert!r} is for a key of the kind {kind}, which gRPC does not speak: have one made for a "
            "key of EC P-256, EC P-384 or RSA"
        )
    try:
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), chain, secret)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(
                f"TLS key {key!r} does not match certificate {cert!r}: give the key that the certificate was made for"
            ) from exc
        raise SettingsError(f"TLS certificate {cert!r} with key {key!r} cannot be used: {reason_of(exc)}") from exc
    return chain, secret


def read_ca(ca: str) -> bytes:
    """Read a bundle of CAs.

    Returns:
        PEM.

    Raises:
        SettingsError: the file cannot be used; says why, and what to do.
    """
    if ca == SYSTEM_CA:
        found = ssl.get_default_verify_paths().cafile
        if found is None:
            raise SettingsError(
                f"TLS CA {ca!r}: this system has no file of CAs where OpenSSL looks; name one, or set SSL_CERT_FILE"
            )
        ca = found
    bundle = _read(ca, "TLS CA file")
    _check_lines(bundle, f"TLS CA file {ca!r}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_ascii(bundle))
    except ssl.SSLError as exc:
        raise SettingsError(
            f"TLS CA file {ca!r} holds no usable certificate: expected PEM, -----BEGIN CERTIFICATE----- "
            f"({reason_of(exc)})"
        ) from exc
    return bundle


def read_tokens(path: str, *, serving: bool) -> tuple[str, ...]:
    """Read bearer tokens, a line for a token, without empty lines and comments (#).

    Args:
        path: of the file.
        serving: they are taken from others, and so must not be easily guessed.

    Raises:
        SettingsError: the file cannot be used. The message holds nothing of what is in it.
    """
    data = _read(path, "token file", secret=True)
    _check_mark(data, f"token file {path!r}")
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    tokens = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        if not _TOKEN.fullmatch(line):
            raise SettingsError(
                f"token file {path!r}, line {number}: a token has letters, digits and -._~+/= only, one a line"
            )
        if serving and len(line) < _LEAST_TOKEN:
            raise SettingsError(
                f"token file {path!r}, line {number}: a token of {len(line)} characters can be guessed, at least "
                f"{_LEAST_TOKEN} are wanted: openssl rand -hex 32"
            )
        tokens.append(line)
    if not tokens:
        raise SettingsError(f"token file {path!r} holds no token: write one a line (openssl rand -hex 32)")
    return tuple(tokens)


def check_identity(chain: bytes, key: bytes, what: str, *, serving: bool) -> CertificateIdentity:
    """See that a certificate is valid at this moment.

    The standard library reads certificates only in a handshake, so both sides are played in memory, where this
    certificate itself is all that is trusted.

    Args:
        chain: the certificate and intermediate CAs, PEM.
        key: its private key, PEM.
        what: the certificate, for messages.
        serving: it is a server's, and not a client's.

    Raises:
        SettingsError: it has expired, is not valid yet, or is for something else.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    load_pair(server, chain, key)
    if not serving:
        load_pair(client, chain, key)
    verifying = client if serving else server
    verifying.verify_mode = ssl.CERT_REQUIRED
    verifying.verify_flags |= _PARTIAL_CHAIN
    verifying.load_verify_locations(cadata=_first_certificate(chain))
    try:
        found = _peer_certificate(server, client, serving=serving)
    except ssl.SSLCertVerificationError as exc:
        if exc.verify_code == EXPIRED:
            raise SettingsError(f"{what} has expired: have a new one issued") from exc
        if exc.verify_code == NOT_YET_VALID:
            raise SettingsError(f"{what} is not valid yet: see its dates, and this host's clock ({utc_now()})") from exc
        raise SettingsError(f"{what} cannot be used: {exc.verify_message}") from exc
    except ssl.SSLError as exc:
        raise SettingsError(f"{what} cannot be used: {reason_of(exc)}") from exc
    return identity_of(found)


def identity_of(found: dict[str, Any]) -> CertificateIdentity:
    """Return what `SSLSocket.getpeercert` gave, in short."""
    names = tuple(str(value) for kind, value in found.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))
    return CertificateIdentity(names, str(found.get("notAfter", "")))


def without_identity() -> ssl.SSLContext:
    """For a look at a server that is not believed: no data may be sent over such a connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def context_for(ca: bytes | None, pair: tuple[bytes, bytes] | None, *, serving: bool) -> ssl.SSLContext:
    """Return a context of the standard library that trusts and shows the same as gRPC does with these."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serving else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        context.load_verify_locations(cadata=_ascii(ca))
        context.verify_mode = ssl.CERT_REQUIRED
    if pair is not None:
        load_pair(context, *pair)
    return context


def _peer_certificate(server: ssl.SSLContext, client: ssl.SSLContext, *, serving: bool) -> dict[str, Any]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):  # turns; TLS 1.3 takes two and TLS 1.2 three
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0 if serving else 1].getpeercert() or {}


def _read(path: str, what: str, *, secret: bool = False) -> bytes:
    try:
        with open(Path(path).expanduser(), "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise SettingsError(f"{what} {path!r} is no file")
            if secret and mode & _OTHERS:
                raise SettingsError(
                    f"{what} {path!r} can be read by every user of this host (mode {stat.S_IMODE(mode):04o}): "
                    f"chmod o-rwx it, and replace what others may have read; in Kubernetes set defaultMode: 0440"
                )
            data = file.read(_MOST_NBYTES + 1)
    except IsADirectoryError as exc:
        raise SettingsError(f"{what} {path!r} is a folder: name the file") from exc
    except (FileNotFoundError, NotADirectoryError) as exc:
        shown = repr(path) if not secret or os.sep in path else "(a name without a folder)"  # it may be the secret
        raise SettingsError(f"{what} {shown} is not there: give the path of a file") from exc
    except OSError as exc:
        why = exc.strerror or type(exc).__name__
        raise SettingsError(f"{what} {path!r} cannot be read: {why}; this process runs as user {os.geteuid()}") from exc
    if not data.strip():
        raise SettingsError(f"{what} {path!r} is empty")
    if len(data) > _MOST_NBYTES:
        raise SettingsError(f"{what} {path!r} has more than {_MOST_NBYTES:,} bytes: it is something else")
    return data


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe as well, though no writer has it open, for it to be refused."""
    return os.open(path, flags | os.O_NONBLOCK)


def load_pair(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    """Load a pair that was read already, so that what is checked is what is used; also into a context in use."""
    memory = os.memfd_create("edl-tls")  # the standard library takes names of files only, and a key is to be on no disk
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(key.rstrip() + b"\n" + chain)
        context.load_cert_chain(f"/proc/self/fd/{memory}", password=_no_password)
    finally:
        os.close(memory)


def _check_mark(data: bytes, what: str) -> None:
    """Refuse what an editor puts before text, and does not show."""
    if data.startswith(_MARKS):
        raise SettingsError(f"{what} begins with a byte order mark (BOM): save it as ASCII, or as UTF-8 without one")


def _check_lines(pem: bytes, what: str) -> None:
    """Refuse PEM of which gRPC would leave out a part."""
    _check_mark(pem, what)
    found = _NOT_AT_START.search(pem)
    if found is not None:
        line = pem.count(b"\n", 0, found.start()) + 1
        mark = ": a byte order mark (BOM) stands before it" if pem[: found.start()].endswith(codecs.BOM_UTF8) else ""
        raise SettingsError(f"{what}, line {line}: -----BEGIN must be at the beginning of a line{mark}")


def _kind_of(chain: bytes) -> str:
    """Return the kind of the first certificate's key if gRPC does not take it, or nothing."""
    try:
        return kind_not_in_grpc(base64.b64decode(split(chain)[0]))
    except (IndexError, ValueError):
        return ""  # torn: what loads it says how


def _no_password() -> str:
    return ""  # without this OpenSSL asks at the terminal


def split(bundle: bytes) -> list[bytes]:
    """Return the certificates of a PEM file, without what stands around and between them."""
    return [b"".join(found.split()) for found in _CERTIFICATE.findall(bundle)]


def _ascii(bundle: bytes) -> str:
    """PEM as the standard library takes it: without the letters of names in comments that are not ASCII."""
    return bundle.decode("ascii", "ignore")


def _first_certificate(chain: bytes) -> str:
    return ssl.DER_cert_to_PEM_cert(base64.b64decode(split(chain)[0]))


def reason_of(exc: ssl.SSLError) -> str:
    """OpenSSL's words."""
    return (exc.reason or str(exc)).lower().replace("_", " ")
