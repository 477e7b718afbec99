"""Reads all settings that can come from the environment. No other module reads these settings from it.

An argument takes precedence over the environment, the environment over the default. PaddlePaddle EDL's names,
`PADDLE_DISTILL_*`, are accepted with a `FutureWarning`, because Python shows a `DeprecationWarning` only to the
program's author, who may not be the one setting the variables.
"""

from __future__ import annotations

import numbers
import os
import stat
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edl import mounts
from edl.errors import SettingsError

__all__ = [
    "Credentials",
    "DiscoverySettings",
    "LoadSettings",
    "TeacherSettings",
    "default_discovery_url",
    "is_above_zero",
    "is_count",
    "is_share",
]

T = TypeVar("T")

_LOCAL = Path("/var/tmp")
"""A folder that is on this machine even if home folders are shared, and that is the same for all sessions and jobs of a
user, unlike `/tmp`."""
_NAME_A_FILE = "name a local file in EDL_DISCOVERY, sqlite:///PATH"

_ALIASES = {
    "EDL_DISCOVERY": "PADDLE_DISTILL_BALANCE_SERVER",
    "EDL_SERVICE": "PADDLE_DISTILL_SERVICE_NAME",
    "EDL_MAX_TEACHERS": "PADDLE_DISTILL_MAX_TEACHER",
}


def read(name: str, parse: Callable[[str], T], environ: Mapping[str, str] | None = None) -> T | None:
    """Return the parsed value of the variable `name`, or of its old name; None if neither is set.

    Raises:
        SettingsError: `parse` refused the value with a ValueError.
    """
    environ = os.environ if environ is None else environ
    alias = _ALIASES.get(name, "")
    if name not in environ and alias in environ:
        warnings.warn(f"{alias} is deprecated: set {name} instead", FutureWarning, stacklevel=_outside())
        name = alias
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return parse(text)
    except ValueError as exc:
        raise SettingsError(f"environment variable {name}={text!r}: {exc}") from exc


def _outside() -> int:
    """Return the `stacklevel`, for the caller of this function, of the first frame outside EDL."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    return level


def positive_int(text: str) -> int:
    """Parse a whole number above zero."""
    value = int(text)
    if value <= 0:
        raise ValueError("must be above 0")
    return value


def positive_float(text: str) -> float:
    """Parse a finite number above zero."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("must be a finite number above 0")
    return value


def is_above_zero(value: object) -> bool:
    """Return whether a value is a number above zero, possibly infinite. Text, arrays and tensors are not numbers."""
    return isinstance(value, numbers.Real) and bool(value > 0)  # type: ignore[operator]


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least 1; text, True and 2.0 are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def is_share(value: object) -> bool:
    """Return whether a value is a number from 0 to 1."""
    return isinstance(value, numbers.Real) and bool(0 <= value <= 1)  # type: ignore[operator]


def boolean(text: str) -> bool:
    """Return True for 1, true and yes; False for 0, false and no."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError("must be 1 or 0")
    return words[text.lower()]


def allows_shared_file(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a SQLite file may be on a shared file system that only one machine uses (`EDL_SHARED_FILE`)."""
    return bool(read("EDL_SHARED_FILE", boolean, environ))


def default_discovery_url() -> str:
    """Return the URL of a SQLite file for all of this user's processes on this machine.

    The file is in the user's cache folder, or in `/var/tmp/edl-UID` if the cache folder is on a shared file system
    (unless `EDL_SHARED_FILE` is set).

    Raises:
        SettingsError: `/var/tmp/edl-UID` cannot be created, or is not private to this user.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "edl")
    kind = mounts.file_system(os.path.realpath(folder), mounts.read_mounts())
    if mounts.is_shared(kind) and not allows_shared_file():
        folder = _private_folder(_LOCAL / f"edl-{os.getuid()}")
    return f"sqlite:///{folder}/discovery.sqlite"


def _private_folder(folder: Path) -> Path:
    """Create `folder`, or check that this user owns it, because every user can write to its parent folder."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise SettingsError(f"{folder} cannot be created ({exc.strerror}): {_NAME_A_FILE}") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise SettingsError(f"{folder} is not private to this user: remove it, or {_NAME_A_FILE}")
    return folder


@dataclass(frozen=True)
class DiscoverySettings:
    """Where services register.

    Attributes:
        url: `sqlite:///path/to/file`, `edl://host:29400`, `consul://host:8500` or `etcd://host:2379`. `EDL_DISCOVERY`.
        ttl_s: seconds of silence after which a process counts as gone. `EDL_TTL_S`.
    """

    url: str
    ttl_s: float = 10.0

    @classmethod
    def of(
        cls, url: str | None = None, ttl_s: float | None = None, environ: Mapping[str, str] | None = None
    ) -> DiscoverySettings:
        """Build from arguments, then the environment, then defaults."""
        return cls(
            url=url or read("EDL_DISCOVERY", str, environ) or default_discovery_url(),
            ttl_s=ttl_s or read("EDL_TTL_S", positive_float, environ) or 10.0,
        )


@dataclass(frozen=True)
class TeacherSettings:
    """Teachers that a student uses if its code names none.

    Attributes:
        discovery: the registry's URL; None if only fixed teachers are named. `EDL_DISCOVERY`.
        service: the service that the teachers register under. `EDL_SERVICE`.
        endpoints: fixed teachers, as `host:port`. `EDL_TEACHERS`, comma-separated.
        max_teachers: largest number of teachers to use; None for no limit. `EDL_MAX_TEACHERS`.
    """

    discovery: str | None = None
    service: str | None = None
    endpoints: tuple[str, ...] = ()
    max_teachers: int | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> TeacherSettings:
        """Read the settings from the environment."""
        endpoints = read("EDL_TEACHERS", str, environ) or ""
        return cls(
            discovery=read("EDL_DISCOVERY", str, environ),
            service=read("EDL_SERVICE", str, environ),
            endpoints=tuple(part.strip() for part in endpoints.split(",") if part.strip()),
            max_teachers=read("EDL_MAX_TEACHERS", positive_int, environ),
        )


@dataclass(frozen=True)
class LoadSettings:
    """How a student or teacher publishes its load.

    Attributes:
        publish: whether to publish the load at all. `EDL_PUBLISH_LOAD`.
        interval_s: seconds between two publications while the load changes. `EDL_LOAD_INTERVAL_S`.
        window_s: seconds over which rates are computed. `EDL_LOAD_WINDOW_S`.
        ttl_s: seconds after which the record of a killed process disappears.
        job: the job that a student belongs to; empty if none is known. `EDL_JOB`, or torchrun's `TORCHELASTIC_RUN_ID`.

    Raises:
        SettingsError: the interval is longer than the window.
    """

    publish: bool = True
    interval_s: float = 2.0
    window_s: float = 15.0
    ttl_s: float = 15.0
    job: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.interval_s <= self.window_s < float("inf"):
            raise SettingsError(
                f"load is published every {self.interval_s!r} s, with rates over {self.window_s!r} s: expected an"
                " interval above 0 and no longer than the window (EDL_LOAD_INTERVAL_S, EDL_LOAD_WINDOW_S)"
            )

    @classmethod
    def of(cls, publish: bool | None = None, environ: Mapping[str, str] | None = None) -> LoadSettings:
        """Build from an argument, then the environment, then the default."""
        if publish is None:
            publish = read("EDL_PUBLISH_LOAD", boolean, environ)
        run_id = read("TORCHELASTIC_RUN_ID", str, environ)
        return cls(
            publish=True if publish is None else publish,
            interval_s=read("EDL_LOAD_INTERVAL_S", positive_float, environ) or cls.interval_s,
            window_s=read("EDL_LOAD_WINDOW_S", positive_float, environ) or cls.window_s,
            # torchrun's default id is "none".
            job=read("EDL_JOB", str, environ) or ("" if run_id in (None, "none") else run_id or ""),
        )


SYSTEM_CA = "system"
"""Value of `ca` for the CAs that the operating system trusts."""


@dataclass(frozen=True)
class Credentials:
    """The certificates, keys, tokens and CAs that a process uses: the paths of the files, never their content.

    Students and teachers use the same class. A student uses TLS if `ca` is set, and presents its own certificate
    (mutual TLS) if `cert` and `key` are set. A teacher uses TLS if `cert` and `key` are set; if `ca` is set too, the
    teacher accepts only students with a certificate that this CA signed.

    Attributes:
        ca: PEM file with one or more CAs that sign the other side's certificates, or "system". `EDL_TLS_CA`.
        cert: PEM file of this side's certificate, followed by intermediate CAs. `EDL_TLS_CERT`.
        key: PEM file of the certificate's private key: not encrypted, and readable by the file's owner and group only.
            `EDL_TLS_KEY`.
        server_name: the name that a server's certificate must contain; None for the host in its address.
            `EDL_TLS_SERVER_NAME`.
        token_file: file of bearer tokens, one per line. A student sends the first token; a teacher accepts all of them.
            `EDL_TOKEN_FILE`.
        allow_insecure_tokens: also send tokens to, and accept tokens from, other hosts without TLS.
            `EDL_ALLOW_INSECURE_TOKENS`.

    Raises:
        SettingsError: `cert` is set without `key`, or `key` without `cert`; or a value is empty.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None
    token_file: str | None = None
    allow_insecure_tokens: bool = False

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key", "server_name", "token_file"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif value is not None and (not isinstance(value, str) or not value):
                raise SettingsError(f"{name} must be non-empty text or None")
        if bool(self.cert) != bool(self.key):
            there, missing = ("certificate", "key") if self.cert else ("key", "certificate")
            raise SettingsError(
                f"a TLS {there} without its {missing}: set both, --tls-cert and --tls-key "
                "(EDL_TLS_CERT and EDL_TLS_KEY; cert= and key=)"
            )

    def __bool__(self) -> bool:
        return self != Credentials()

    @classmethod
    def of(
        cls,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        server_name: str | None = None,
        token_file: str | None = None,
        allow_insecure_tokens: bool | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> Credentials:
        """Return credentials from arguments, then the environment, then defaults.

        Args:
            ca: As the attribute; None to use the environment, as for all arguments up to `allow_insecure_tokens`.
            cert: As the attribute.
            key: As the attribute.
            server_name: As the attribute.
            token_file: As the attribute.
            allow_insecure_tokens: As the attribute.
            environ: Variables to use instead of this process's environment.

        Raises:
            SettingsError: the values cannot be combined, or `EDL_TOKEN` is set.
        """
        if read("EDL_TOKEN", bool, environ):
            raise SettingsError(
                "EDL_TOKEN is not read, since every child of this process would inherit the token: "
                "write the token into a file and set EDL_TOKEN_FILE to its path"
            )
        if allow_insecure_tokens is None:
            allow_insecure_tokens = read("EDL_ALLOW_INSECURE_TOKENS", boolean, environ) or False
        return cls(
            ca=ca or read("EDL_TLS_CA", str, environ),
            cert=cert or read("EDL_TLS_CERT", str, environ),
            key=key or read("EDL_TLS_KEY", str, environ),
            server_name=server_name or read("EDL_TLS_SERVER_NAME", str, environ),
            token_file=token_file or read("EDL_TOKEN_FILE", str, environ),
            allow_insecure_tokens=allow_insecure_tokens,
        )

    @classmethod
    def of_options(cls, given: Mapping[str, Any]) -> Credentials:
        """Return credentials from a command's options, then the environment, then defaults.

        Args:
            given: By name: `tls_ca`, `tls_cert`, `tls_key`, `tls_server_name`, `token_file` and
                `allow_insecure_tokens`; other names are ignored. For missing values and None, the environment is used.
        """
        names = ("ca", "cert", "key", "server_name")
        return cls.of(
            **{name: given.get(f"tls_{name}") for name in names},
            token_file=given.get("token_file"),
            allow_insecure_tokens=given.get("allow_insecure_tokens"),
        )
