"""Decides which process on a host serves the store: the first, and after its end another process of the same user."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from edl.background import BackgroundLoop
from edl.discovery.served.addresses import ListenAddress, PortTakenError
from edl.discovery.served.server import StoreServer
from edl.errors import DiscoveryError, SettingsError
from edl.protocol.tls import CredentialFiles
from edl.resource import Resource

logger = logging.getLogger(__name__)

KEPT: Final = "keep/"
"""Prefix of keys that mark the store as needed after its server has ended, so that the store's file is kept."""

_LOOK_S: Final = 0.1
"""How soon another process on this host takes over from a process that died. Each check is a single call of `flock`."""
_PORT_AGAIN_S: Final = 1.0
"""Wait between two attempts to listen while another program uses the port, or its last connections linger."""
_END_S: Final = 2.0
"""How long other processes may take to end as well. After this time, another process takes over, or this process
reports that it continues to serve."""
_HAND_OVER_S: Final = 10.0
"""How long another process may take to start serving: the process checks every 0.1 s, and opens a file in memory."""


class StoreHost(Resource):
    """Serves the store at a port of this host while no other process does, and takes over when that process ends.

    The store's file is in this host's memory, so it outlives the process that serves it, but not the host. The
    serving process holds a lock, which the kernel releases when the process ends. Clients find the next server on
    the same port, with their leases intact. `began` is called when this process begins to serve.

    Raises SettingsError if this host cannot serve at the address at all.
    """

    def __init__(
        self, address: ListenAddress, files: CredentialFiles | None, began: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._address = address
        self._files = files
        self._began = began
        self._server: StoreServer | None = None
        # Per network namespace: in another one, the same port belongs to a different store.
        name = f"{address.port}-{_namespace()}"
        folder = _folder()
        self.path: Final = folder / f"{name}.sqlite"
        self._serving = FileLock(folder / f"{name}.serving")
        self._waiting = FileLock(folder / f"{name}.waiting")
        self._is_waiting = self._waiting.take(fcntl.LOCK_SH)
        try:
            self._attempt()
        except BaseException:
            self._release()
            raise
        self._background = self._own(BackgroundLoop("edl-store-host", self._look))

    @property
    def server(self) -> str:
        """The name of the server in this process, empty while another process serves the store."""
        server = self._server
        return "" if server is None else server.name

    def leave(self, say: Callable[[str], None], patience_s: float) -> None:
        """Stop serving as soon as no client is left, or as soon as another process on this host takes over.

        If this process stopped serving earlier, the remaining clients would lose the store, and with it their job. If
        the wait takes long, `say` is called with a line of text. The last process removes the file, unless keys that
        begin with `KEPT` mark the store as needed: then the process waits `patience_s` for clients, and keeps the file.
        """
        self._background.close()
        began = time.monotonic()
        is_announced = False
        while True:
            server = self._server
            if server is None:
                self._waiting.release()
                # The server may have just ended and handed over to this process, which is also ending.
                with contextlib.suppress(DiscoveryError, SettingsError):
                    self._attempt(made=True)
                if self._server is None:
                    return
                continue
            kept, needed = server.holds(KEPT), server.needed and not server.failed
            if not needed and (server.failed or not kept or time.monotonic() > began + patience_s):
                server.close()
                self._server = None
                if not kept:
                    self._remove()
                return
            if needed and time.monotonic() > began + _END_S and self._hand_over(server):
                return
            if not is_announced and time.monotonic() > began + 1.5 * _END_S:
                is_announced = True
                others = "other nodes" if needed else "nodes that could not store the job's last state"
                say(f"this node serves the store until {others} have ended; a signal ends the store and their job now")
            time.sleep(_LOOK_S)

    def _look(self) -> float | None:
        if not self._is_waiting:  # a process that was ending held the lock, or removed the file
            self._is_waiting = self._waiting.take(fcntl.LOCK_SH)
        server = self._server
        if server is not None and server.failed:
            server.close()
            self._server = None
            self._serving.release()
        try:
            self._attempt()
        except SettingsError as exc:
            logger.warning("this process cannot serve the store: %s", exc)
            return _PORT_AGAIN_S
        except DiscoveryError as exc:
            logger.debug("this process cannot serve the store: %s", exc)
            return _PORT_AGAIN_S
        return _LOOK_S

    def _attempt(self, *, made: bool = False) -> None:
        """Serve the store unless another process does; with `made`, only if the store's file exists."""
        if self._server is not None or not self._serving.take(fcntl.LOCK_EX):
            return
        if made and not self.path.exists():
            self._serving.release()
            return
        try:
            self._server = StoreServer(str(self.path), self._address, self._files)
        except PortTakenError as exc:  # another user's agent, or one in a container: a client finds out which
            self._serving.release()
            logger.debug("this process does not serve the store: %s", exc)
            return
        except BaseException:
            self._serving.release()
            raise
        self._began()

    def _remove(self) -> None:
        """Remove the store's file, and its locks if no other process waits for them."""
        for side in ("", "-wal", "-shm"):
            Path(f"{self.path}{side}").unlink(missing_ok=True)
        if self._waiting.take(fcntl.LOCK_EX):
            self._waiting.path.unlink(missing_ok=True)
            self._serving.path.unlink(missing_ok=True)

    def _hand_over(self, server: StoreServer) -> bool:
        """Hand over to another process on this host; return False if this process must continue to serve."""
        self._waiting.release()
        if self._waiting.take(fcntl.LOCK_EX):  # no other process waits
            self._waiting.release()
            return False
        server.close()
        self._server = None
        self._serving.release()
        deadline = time.monotonic() + _HAND_OVER_S
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S / 2)
            if not self._serving.take(fcntl.LOCK_EX):
                return True
            self._serving.release()
            if self._waiting.take(fcntl.LOCK_EX):  # it has ended instead
                self._waiting.release()
                break
            time.sleep(2 * _LOOK_S)  # lets the other process take it
        self._attempt()
        return self._server is None

    def _release(self) -> None:
        if self._server is not None:
            self._server.close()
        self._waiting.close()
        self._serving.close()


class FileLock:
    """A lock on a file (created if missing). The kernel releases it with the process. Holders may remove the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = self._open()

    def take(self, kind: int) -> bool:
        """Take or convert the lock (`kind`: `fcntl.LOCK_EX` or `LOCK_SH`); return False if other processes hold it."""
        while True:
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            try:
                if self.path.samefile(f"/proc/self/fd/{self._file}"):
                    return True
            except FileNotFoundError:
                pass
            self.close()  # the former holder has removed the file
            self._file = self._open()

    def release(self) -> None:
        """Let other processes take the lock."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the lock for good."""
        os.close(self._file)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _folder() -> Path:
    """Return this user's folder, which is in memory if the host has `/dev/shm`."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    folder = base / f"edl-store-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise SettingsError(f"{folder} belongs to another user, or is a link: remove it")
    return folder


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return 0
