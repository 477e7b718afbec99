"""Where etcd's members are, and how to authenticate to them; the variables of its own command line count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from edl.errors import SettingsError
from edl.protocol.tls.credentials import CredentialFiles
from edl.settings import SYSTEM_CA, Credentials, boolean, read

__all__ = ["EtcdSession", "EtcdTarget"]

PORT = 2379
"""The port that IANA gave to etcd's clients."""


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
