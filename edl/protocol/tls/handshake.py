"""Why a TLS handshake failed: words for a client that say what to do, and few log lines for a server.

gRPC's own words name a code of its TLS library at best, and "Socket closed" where the other side refused. So a client
makes the handshake once more, with the standard library, which tells the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import ssl
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from typing import Final, TypeVar

from typing_extensions import Self

from edl.background import start_call
from edl.notifier import wait_within
from edl.protocol.tls import certificates, verification
from edl.protocol.tls.certificates import CertificateIdentity
from edl.protocol.tls.credentials import CredentialFiles, Material

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT_S: Final = 2.0
"""For each of two connections: less than a student waits between two attempts to connect to a teacher that is away."""

_STDERR: Final = 2
_LOG_EVERY_S: Final = 60.0
"""How often a server logs the same reason: a day of a client's attempts is 1,440 lines, not 100,000."""
_FAILED: Final = re.compile(rb"Handshake failed with error (?:.*OPENSSL_internal:)?([^:\n]*)")
"""What gRPC writes on a server's standard error, with OpenSSL's name of the reason."""

_ABOUT_CERTIFICATES: Final = (
    "ALERT_CERTIFICATE",
    "ALERT_BAD_CERT",
    "ALERT_UNKNOWN_CA",
    "ALERT_ACCESS",
    "ALERT_NO_CERT",
)
_SIGNS: Final = (
    "andshake",
    "Verification Check",
    "Socket closed",
    "reset by peer",
    "ALPN",
    "SSL_ERROR",
    "Broken pipe",
)


def looks_like_handshake(words: str) -> bool:
    """Whether gRPC's words for a failed connection may hide a failed handshake."""
    return any(sign in words for sign in _SIGNS)


async def explain_handshake(
    endpoint: str, files: CredentialFiles | None, *, says_tls: bool = False, authority: str = ""
) -> str:
    """Connect once more, and say why the connection does not come to be.

    Args:
        endpoint: of the server, `host:port`.
        files: certificates of this side; None without.
        says_tls: the registry says that this server speaks TLS. It is not believed, but mentioned.
        authority: `name:port` that the certificate is checked for; empty if that is the endpoint.

    Returns:
        Words that begin with the endpoint, empty if the reason has nothing to do with TLS.
    """
    if files is None or not files.tls:
        return await _explain_plain(endpoint, says_tls=says_tls)
    material = files.current(now=True)
    expected = files.settings.server_name or verification.host_of(authority or endpoint)
    try:
        context = certificates.context_for(material.ca, material.pair, serving=False)
        ended = await _shake(endpoint, context, expected)
    except ssl.SSLCertVerificationError as exc:
        return await _explain_certificate(endpoint, files, material, expected, exc)
    except ssl.SSLError as exc:
        reason = exc.reason or ""
        if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"):
            return (
                f"{endpoint} does not speak TLS, and this side has a CA set: give the server a certificate "
                "(edl serve --tls-cert --tls-key), or leave the CA out here (EDL_TLS_CA)"
            )
        if any(word in reason for word in _ABOUT_CERTIFICATES):
            return _explain_refusal(endpoint, files, material, reason)
        return f"{endpoint}: the TLS handshake failed: {certificates.reason_of(exc)}"
    except (OSError, asyncio.TimeoutError, ValueError):
        return ""  # it is away, or silent: gRPC's words are as good
    return _explain_refusal(endpoint, files, material, "") if ended else ""


async def _explain_plain(endpoint: str, *, says_tls: bool) -> str:
    try:
        await _shake(endpoint, certificates.without_identity(), "")
    except ssl.SSLError:
        return ""
    except (OSError, asyncio.TimeoutError, ValueError):
        return f"{endpoint} speaks TLS by its registration, and {_NO_CA}" if says_tls else ""
    return f"{endpoint} speaks TLS, and {_NO_CA}"


_NO_CA: Final = "this side has no CA set: name the one that signs its certificate (EDL_TLS_CA, --tls-ca, ca=)"


async def _explain_certificate(
    endpoint: str, files: CredentialFiles, material: Material, expected: str, exc: ssl.SSLCertVerificationError
) -> str:
    names = await _names(endpoint, material) if exc.verify_code in verification.WRONG_NAME else None
    return verification.explain(f"the certificate of {endpoint}", exc, files.settings.ca or "", expected, names)


def _explain_refusal(endpoint: str, files: CredentialFiles, material: Material, alert: str) -> str:
    """Say why a server ended the connection instead of speaking: gRPC's servers do not."""
    if material.pair is None:
        return (
            f"{endpoint} wants a client certificate (mutual TLS), and this side shows none: set one (EDL_TLS_CERT and "
            "EDL_TLS_KEY, --tls-cert and --tls-key)"
        )
    own = files.explain_certificate()
    if own:
        return f"{endpoint} does not take this side's certificate: {own}"
    words = f" ({alert.lower().replace('_', ' ')})" if alert else ""
    return (
        f"{endpoint} does not take this side's certificate {files.settings.cert!r}{words}: it is signed by no CA that "
        "the server knows (its --tls-ca), perhaps since that was replaced; have a new one issued, or, if an "
        "intermediate CA signed it, put that one's certificate behind it in the file"
    )


async def _names(endpoint: str, material: Material) -> str | None:
    """Which names the certificate is for, None if it cannot be found out. It is signed by a CA that is trusted."""
    context = certificates.context_for(material.ca, material.pair, serving=False)
    context.check_hostname = False
    found: list[CertificateIdentity] = []
    with contextlib.suppress(OSError, asyncio.TimeoutError, ValueError):
        await _shake(endpoint, context, "", found)
    return ", ".join(repr(name) for name in found[0].names[:8]) if found else None


async def _shake(
    endpoint: str, context: ssl.SSLContext, name: str, found: list[CertificateIdentity] | None = None
) -> bool:
    """Connect, and wait for the server's first byte. Returns whether it ended the connection instead.

    By hand, since asyncio's own TLS leaves sockets open where a handshake fails or is given up.
    """
    context.set_alpn_protocols(["h2"])  # without it gRPC's servers refuse
    if endpoint.startswith("unix:"):
        opening = asyncio.open_unix_connection("/" + endpoint.removeprefix("unix:").lstrip("/"))
    else:
        host, _, port = endpoint.rpartition(":")
        opening = asyncio.open_connection(host.strip("[]"), int(port))
    task = asyncio.ensure_future(opening)
    try:
        reader, writer = await wait_within(task, _TIMEOUT_S)
    except asyncio.CancelledError:
        if not task.cancelled() and task.exception() is None:  # open, and nobody is told
            task.result()[1].close()
        raise
    try:
        connection = _Connection(reader, writer, context, name)
        await wait_within(connection.run(lambda tls: tls.do_handshake()), _TIMEOUT_S)
        if found is not None:
            found.append(certificates.identity_of(connection.tls.getpeercert() or {}))
        try:
            return not await wait_within(connection.run(lambda tls: tls.read(1)), _TIMEOUT_S)
        except (ConnectionError, ssl.SSLEOFError):
            return True
    finally:
        writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await wait_within(writer.wait_closed(), _TIMEOUT_S)


class _Connection:
    """TLS over a stream of asyncio."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext, name: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out, server_hostname=name or None)

    async def run(self, step: Callable[[ssl.SSLObject], T]) -> T:
        """Call `step` until it has what it needs from the network."""
        while True:
            try:
                return step(self.tls)
            except ssl.SSLWantReadError:
                pass
            finally:
                self._writer.write(self._out.read())
            data = await self._reader.read(1 << 16)
            self._in.write(data) if data else self._in.write_eof()


class FailedHandshakes:
    """Logs the TLS handshakes that fail in gRPC's servers of this process: a line per reason and minute.

    gRPC itself writes a line to standard error for each of them, from C, which Python's logging never sees. A client
    without TLS that tries again and again would fill a disk. Within the `with` block standard error is a pipe, whose
    reader counts these lines and passes on all others. Call `log` every second or so.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()  # since the last line, by reason
        self._due: dict[str, float] = {}

    def __enter__(self) -> Self:
        try:
            self._kept: int | None = os.dup(_STDERR)
        except OSError:  # standard error is closed
            self._kept = None
            return self
        reader, writer = os.pipe()
        os.dup2(writer, _STDERR)
        os.close(writer)
        kept = self._kept
        self._reading = start_call("edl-handshakes", lambda: self._read(reader, kept))
        return self

    def __exit__(self, *_: object) -> None:
        if self._kept is None:
            return
        os.dup2(self._kept, _STDERR)  # which closes the pipe, so the reader ends once it has passed on what is left
        if wait([self._reading], _TIMEOUT_S).done:  # not if a forked child holds the pipe
            os.close(self._kept)
        self.log()

    def _read(self, reader: int, kept: int) -> None:
        with open(reader, "rb") as lines:
            for line in lines:
                if failed := _FAILED.search(line):
                    self._counts[failed[1].decode(errors="replace")] += 1
                else:
                    with contextlib.suppress(OSError):  # the pipe must not fill up where standard error is closed
                        os.write(kept, line)

    def log(self) -> None:
        """Log what has failed, unless it was logged in the last minute."""
        now = self._clock()
        for reason in list(self._counts):
            if now >= self._due.get(reason, 0.0):
                self._due[reason] = now + _LOG_EVERY_S
                logger.warning(
                    "a client's TLS handshake failed, %d times since the last such line: %s (see docs/security.md)",
                    self._counts.pop(reason),
                    reason,
                )
