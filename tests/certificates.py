"""Certificates for tests, good ones and bad ones, from CAs that live as long as the test."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the cryptography package, which makes certificates, is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes as Key
from cryptography.x509.oid import NameOID

HERE = ("127.0.0.1", "localhost")
PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM."""

    cert: bytes
    key: bytes

    def save(self, folder: Path, name: str = "tls") -> dict[str, str]:
        """Write both, each replaced in one step, and return what `Credentials` takes."""
        return {"cert": put(folder / f"{name}.pem", self.cert), "key": put(folder / f"{name}.key", self.key)}


class Authority:
    """A CA of its own."""

    def __init__(self, name: str = "CA of a test") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        basic = x509.BasicConstraints(ca=True, path_length=None)
        unsigned = _unsigned(self._name, self._name, self._key, (-30, 30)).add_extension(basic, critical=True)
        self.pem = unsigned.sign(self._key, hashes.SHA256()).public_bytes(PEM)

    def intermediate(self, name: str) -> Authority:
        """A CA that this one vouches for; its `pem` belongs behind the certificates that it issues."""
        made = Authority(name)
        basic = x509.BasicConstraints(ca=True, path_length=None)
        unsigned = _unsigned(made._name, self._name, made._key, (-30, 30)).add_extension(basic, critical=True)
        made.pem = unsigned.sign(self._key, hashes.SHA256()).public_bytes(PEM)
        return made

    def issue(self, *names: str, days: tuple[float, float] = (-1, 7), key: Key | None = None) -> Pair:
        """A certificate for these hosts and addresses, valid from and to so many days from now.

        Args:
            key: a private key of another kind.
        """
        key = key or ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
        general = x509.SubjectAlternativeName([_general(name) for name in names or HERE])
        unsigned = _unsigned(subject, self._name, key, days).add_extension(general, critical=False)
        cert = unsigned.sign(self._key, hashes.SHA256()).public_bytes(PEM)
        plain = serialization.NoEncryption()
        return Pair(cert, key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, plain))

    def save(self, folder: Path, name: str = "ca") -> str:
        """Write the CA's certificate."""
        return put(folder / f"{name}.pem", self.pem)


def put(path: Path, data: bytes | str, mode: int = 0o600) -> str:
    """Replace a file in one step."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data.encode() if isinstance(data, str) else data)
    new.chmod(mode)
    new.replace(path)
    return str(path)


def _unsigned(subject: x509.Name, issuer: x509.Name, key: Key, days: tuple[float, float]) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    begin, end = (now + datetime.timedelta(days=day) for day in days)
    return x509.CertificateBuilder(
        issuer,
        subject,
        key.public_key(),
        x509.random_serial_number(),
        begin.replace(tzinfo=None),
        end.replace(tzinfo=None),
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
