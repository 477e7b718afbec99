"""Certificates, keys and tokens as they are in their files at this moment.

Files are read again when they change, without a restart; what cannot be used does not replace what can. What does not
belong here: channels and servers (`edl.protocol.channel`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from edl.errors import SettingsError
from edl.protocol.tls import certificates
from edl.protocol.tls.certificates import CertificateIdentity
from edl.settings import SYSTEM_CA, Credentials

logger = logging.getLogger(__name__)

AUTHORIZATION: Final = "authorization"
"""Metadata of each call: `Bearer TOKEN` (RFC 6750)."""

CHECK_EVERY_S: Final = 2.0
"""How often files are looked at while connections are open: four `stat` calls. Revocation takes effect that late."""

_Fingerprint = tuple[object, ...]


@dataclass(frozen=True)
class Material:
    """The contents of the files. Secrets show in no representation.

    Attributes:
        version: counts the changes that were taken up.
        ca: PEM of the trusted CAs, None where none are set.
        pair: PEM of certificate and key, None likewise.
        tokens: bearer tokens, in the order of the file.
        identity: what the certificate says.
    """

    version: int
    ca: bytes | None = field(repr=False)
    pair: tuple[bytes, bytes] | None = field(repr=False)
    tokens: tuple[str, ...] = field(repr=False)
    identity: CertificateIdentity | None = None

    @property
    def authorities(self) -> frozenset[bytes]:
        """The certificates in `ca`, one by one."""
        return frozenset(certificates.split(self.ca or b""))


class CredentialFiles:
    """Reads the files of `credentials`, and reads them again when they change. Thread-safe.

    Args:
        serving: they are a server's: `ca` signs its clients' certificates.

    Raises:
        SettingsError: a file cannot be used, or a setting is missing; says which, and what to do.
    """

    def __init__(self, credentials: Credentials, *, serving: bool = False) -> None:
        self.settings = credentials
        self.serving = serving
        if serving and (credentials.ca or credentials.server_name) and not credentials.cert:
            raise SettingsError(
                "TLS is asked for, and there is no certificate: a server needs one, --tls-cert and --tls-key "
                "(EDL_TLS_CERT and EDL_TLS_KEY)"
            )
        if not serving and (credentials.cert or credentials.server_name) and not credentials.ca:
            raise SettingsError(
                "TLS is asked for, and nothing says which servers to believe: name the CA that signs their "
                f"certificates, --tls-ca FILE (EDL_TLS_CA, ca=), or {SYSTEM_CA!r} for those of this system"
            )
        if serving and credentials.ca == SYSTEM_CA:
            raise SettingsError(
                f"TLS CA {SYSTEM_CA!r}: anybody can get a certificate of a public CA; name one of your own for clients"
            )
        self._lock = threading.Lock()
        self._fingerprint = self._look()
        self._checked_at = time.monotonic()
        self._complaint = ""
        self._material = self._read(0)
        self.settings = _absolute(credentials)  # the program may change its folder before they are read again

    @classmethod
    def of(cls, credentials: Credentials, *, serving: bool = False) -> CredentialFiles | None:
        """None where nothing is set."""
        return cls(credentials, serving=serving) if credentials else None

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.settings.cert if self.serving else self.settings.ca)

    def current(self, *, now: bool = False) -> Material:
        """Return what the files hold, as of `CHECK_EVERY_S` ago or newer.

        Files that cannot be used, or read, are logged, and what was read before stays. Never raises for them.

        Args:
            now: as of this moment, for what is as rare as a new connection.
        """
        with self._lock:
            at = time.monotonic()
            if not now and at < self._checked_at + CHECK_EVERY_S:
                return self._material
            self._checked_at = at
            try:
                fingerprint = self._look()
                if fingerprint == self._fingerprint:
                    return self._material
                material = self._read(self._material.version + 1)
            except SettingsError as exc:
                # The next look tries again: files are replaced one after the other, and a key may follow in a moment.
                self._complain(str(exc))
                return self._material
            except Exception as exc:  # noqa: BLE001 - nothing here may end what follows revocations
                # No descriptor left, no memory, a defect: whoever asks goes on with what it has, as a revocation that
                # follows must not find that nobody looks any more.
                self._complain(f"{type(exc).__name__}: {exc}", exc)
                return self._material
            self._fingerprint = fingerprint
            self._complaint = ""
            if material == replace(self._material, version=material.version):
                return self._material  # written anew with what they held: no connection needs to be made anew
            self._material = material
            until = f", valid until {material.identity.not_after}" if material.identity is not None else ""
            logger.info("credentials were replaced, and are in use from now on%s", until)
            return material

    def _complain(self, why: str, unforeseen: Exception | None = None) -> None:
        """Log a cause once, until files are taken up."""
        if why != self._complaint:
            self._complaint = why
            logger.warning(
                "credentials were replaced, and those before stay in use: %s", why, exc_info=unforeseen is not None
            )

    def explain_certificate(self) -> str:
        """Why this side's own certificate is of no use, empty if it is valid at this moment."""
        material = self.current(now=True)
        if material.pair is None:
            return ""
        try:
            certificates.check_identity(*material.pair, self._certificate, serving=self.serving)
        except SettingsError as exc:
            return str(exc)
        return ""

    @property
    def _certificate(self) -> str:
        return f"TLS certificate {self.settings.cert!r}"

    def _read(self, version: int) -> Material:
        settings = self.settings
        pair = identity = None
        if settings.cert and settings.key:
            pair = certificates.read_pair(settings.cert, settings.key)
            identity = certificates.check_identity(*pair, self._certificate, serving=self.serving)
        ca = certificates.read_ca(settings.ca) if settings.ca else None
        tokens = certificates.read_tokens(settings.token_file, serving=self.serving) if settings.token_file else ()
        return Material(version, ca, pair, tokens, identity)

    def _look(self) -> _Fingerprint:
        """Return what tells that a file is another; a `rename` onto it, or the link that Kubernetes moves, counts."""
        settings = self.settings
        paths = (settings.ca, settings.cert, settings.key, settings.token_file)
        return tuple(_stat(path) for path in paths if path)


def _absolute(credentials: Credentials) -> Credentials:
    def absolute(path: str | None) -> str | None:
        return str(Path(path).expanduser().absolute()) if path and path != SYSTEM_CA else path

    return replace(
        credentials,
        ca=absolute(credentials.ca),
        cert=absolute(credentials.cert),
        key=absolute(credentials.key),
        token_file=absolute(credentials.token_file),
    )


def _stat(path: str) -> Sequence[int] | None:
    try:
        found = os.stat(Path(path).expanduser())  # noqa: PTH116 - what it takes is shown in one line
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
