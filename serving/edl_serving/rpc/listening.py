"""Checks of listening addresses by the kernel, before gRPC listens.

gRPC says less about a failure, says it on standard error, and takes a path that is no socket for its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from edl.errors import SettingsError

__all__ = ["check_path", "check_port", "private_path", "publish_socket", "withdraw_socket"]

_HOSTS = "give --host 127.0.0.1 for students on this machine, 0.0.0.0 for others too, or one of its addresses"
_REMEDIES = {
    errno.EADDRINUSE: "another --port does, or 0 for a free one",
    errno.EADDRNOTAVAIL: f"this machine has no such address; {_HOSTS}",
    errno.EACCES: "a --port above 1023 needs no privileges",
}


def check_port(host: str, port: int) -> None:
    """Raise if a TCP port cannot be listened on, as far as the kernel can tell.

    Args:
        host: a name or an address, with or without brackets.
        port: 0 for a free port.

    Raises:
        SettingsError: there is no such address here, or another process listens there.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        socket.create_server(place[:2], family=family).close()
    except socket.gaierror as exc:
        raise SettingsError(f"cannot listen on {host}:{port}: no address of that name is known; {_HOSTS}") from exc
    except OSError as exc:
        if exc.errno in _REMEDIES:  # whatever else it is, gRPC may know a way
            remedy = _REMEDIES[exc.errno]
            raise SettingsError(f"cannot listen on {host}:{port}: {os.strerror(exc.errno)}; {remedy}") from exc


def check_path(path: str) -> None:
    """Raise if a Unix socket cannot be made. A socket that a dead server left is replaced.

    Args:
        path: of the socket.

    Raises:
        SettingsError: a server listens there, the path is something else, the folder is missing or not writable, or the
            path is too long.
    """
    if Path(path).is_socket():
        _check_left(path)
    elif Path(path).exists():
        raise SettingsError(f"--uds {path!r}: this is there already, and is no socket")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise SettingsError(f"--uds {path!r}: there is no folder {str(folder)!r}")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(private_path(path))
        except OSError as exc:
            raise SettingsError(f"--uds {path!r}: no socket can be made there: {exc.strerror or exc}") from exc
    Path(private_path(path)).unlink()


def _check_left(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except (BlockingIOError, PermissionError):
            pass  # too many wait for it to answer; or it is somebody else's, and no server of ours
        except OSError as exc:
            raise SettingsError(f"--uds {path!r}: another socket is there: {exc.strerror or exc}") from exc
    raise SettingsError(f"--uds {path!r}: in use by another server; give another path, or stop that one first")


def private_path(path: str) -> str:
    """Return the path to listen on before `publish_socket`.

    gRPC deletes the path that it listened on when it stops, even if the socket there is another server's by then.
    """
    return f"{path}.{os.getpid()}"


def publish_socket(path: str) -> tuple[int, int]:
    """Move the socket from `private_path(path)` to `path`.

    Args:
        path: of the socket.

    Returns:
        The socket's identity, for `withdraw_socket`.

    Raises:
        SettingsError: the system refuses it.
    """
    try:
        Path(private_path(path)).replace(path)
        return _identity(path)
    except OSError as exc:
        raise SettingsError(f"--uds {path!r}: no socket can be made there: {exc.strerror or exc}") from exc


def withdraw_socket(path: str, identity: tuple[int, int]) -> None:
    """Delete a published socket, unless another socket is there by now.

    Call it while the socket is listened on: a later socket might have the same identity.

    Args:
        path: of the socket.
        identity: of `publish_socket`.
    """
    with contextlib.suppress(FileNotFoundError):
        if _identity(path) == identity:
            Path(path).unlink()


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
