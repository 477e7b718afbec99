"""Where a Consul agent is, and how to authenticate to it; Consul's own environment variables count."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl

from edl.errors import SettingsError
from edl.settings import read

__all__ = ["ConsulTarget"]


@dataclass(frozen=True)
class ConsulTarget:
    """An agent.

    Attributes:
        host, port: of its HTTP API.
        timeout_s: how long a request may take, beyond the time that a blocking query asks the agent to wait.
        dc: the datacenter to read services from, empty for the agent's own.
        token: the ACL token. `CONSUL_HTTP_TOKEN`. Never shown.
        tls: None without TLS (`consul+https:`, or `CONSUL_HTTP_SSL=true`). The context holds `CONSUL_CACERT`,
            `CONSUL_CLIENT_CERT`, `CONSUL_CLIENT_KEY` and `CONSUL_HTTP_SSL_VERIFY`.
        server_name: the name that the agent's certificate must carry. `CONSUL_TLS_SERVER_NAME`, else the host.
    """

    host: str
    port: int
    timeout_s: float = 5.0
    dc: str = ""
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    server_name: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"Consul at {'https' if self.tls else 'http'}://{host}:{self.port}"

    @classmethod
    def of(cls, parts: SplitResult, timeout_s: float, environ: Mapping[str, str] | None = None) -> ConsulTarget:
        """Return what a split URL and the environment say.

        Raises:
            SettingsError: something in it is unusable. The message repeats no password, token or query.
        """
        where = f"discovery URL {parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        if "@" in parts.netloc:
            raise SettingsError(f"{where}: a URL is no place for a password; set CONSUL_HTTP_TOKEN")
        if parts.path not in ("", "/") or parts.fragment:
            raise SettingsError(f"{where}{parts.path}: a host, a port and at most ?dc=NAME are expected")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(set(options) - {"dc"})
        if unknown or (parts.query and not options.get("dc")):
            raise SettingsError(
                f"{where}: unknown or empty option {', '.join(unknown) or 'dc'}; there is only ?dc=NAME"
            )
        secure = bool(read("CONSUL_HTTP_SSL", _boolean, environ)) or parts.scheme == "consul+https"
        try:
            port = parts.port or (8501 if secure else 8500)
        except ValueError as exc:
            raise SettingsError(f"{where}: {exc}") from exc
        if not parts.hostname:
            raise SettingsError(f"{where}: the host is missing; expected is consul://host:8500")
        return cls(
            host=parts.hostname,
            port=port,
            timeout_s=timeout_s,
            dc=options.get("dc", ""),
            token=read("CONSUL_HTTP_TOKEN", str, environ) or "",
            tls=_tls(environ) if secure else None,
            server_name=read("CONSUL_TLS_SERVER_NAME", str, environ) or parts.hostname,
        )


def _tls(environ: Mapping[str, str] | None) -> ssl.SSLContext:
    authorities = read("CONSUL_CACERT", str, environ)
    certificate = read("CONSUL_CLIENT_CERT", str, environ)
    key = read("CONSUL_CLIENT_KEY", str, environ)
    verify = read("CONSUL_HTTP_SSL_VERIFY", _boolean, environ)
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as exc:
        raise SettingsError(f"environment variable CONSUL_CACERT={authorities!r}: {exc}") from exc
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if key and not certificate:
        raise SettingsError("CONSUL_CLIENT_KEY is set without CONSUL_CLIENT_CERT")
    if certificate:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as exc:
            raise SettingsError(f"CONSUL_CLIENT_CERT={certificate!r}, CONSUL_CLIENT_KEY={key!r}: {exc}") from exc
    return context


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "t", "true"):
        return True
    if text.lower() in ("0", "f", "false"):
        return False
    raise ValueError("expected true or false")
