"""The folder in memory that one agent keeps for its workers: boards, slots of state, logs.

It outlives the agent. Another agent of the same job on the same host takes the folder of a dead one over, and with it
the newest state, and knows from the folder's lock that the dead one and its workers are no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path

from edl.errors import EDLError

__all__ = ["HostFolder"]

_ABANDONED_S = 3600.0


class HostFolder:
    """A folder that belongs to this process until `close`.

    Args:
        job: the job's name.
        node: this agent's name.

    Attributes:
        path: the folder, in memory where the host has `/dev/shm`.
        heir_of: the node whose folder this was, empty if the folder is new.
    """

    def __init__(self, job: str, node: str) -> None:
        root = _root()
        digest = hashlib.sha256(job.encode()).hexdigest()[:16]
        _sweep(root, but=digest)
        for number in itertools.count():
            path = root / digest / str(number)
            try:
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
                lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # another agent is just removing it
            if _locked(lock) and _is(path / "lock", lock):
                break
            os.close(lock)
        self.path = path
        self._lock = lock
        owner = path / "node"
        self.heir_of = owner.read_text() if owner.exists() else ""
        owner.write_text(node)

    @property
    def run(self) -> str:
        """Which run of the job the state here is of, "" if nobody said so."""
        file = self.path / "run"
        return file.read_text() if file.exists() else ""

    @run.setter
    def run(self, name: str) -> None:
        (self.path / "run").write_text(name)

    def board(self, local_rank: int) -> Path:
        """The file of a worker's board."""
        return self.path / f"board-{local_rank}"

    def slots(self, local_rank: int) -> str:
        """The prefix of the files of a worker's slots."""
        return str(self.path / f"slots-{local_rank}")

    def touch(self) -> None:
        """Show that this folder's agent lives; call it now and then."""
        with contextlib.suppress(OSError):
            os.utime(self.path / "node")

    def forget_slots(self) -> None:
        """Remove the states in memory, which are not to be gone on from."""
        for path in (*self.path.glob("slots-*"), *self.replicas.glob("*")):
            path.unlink()

    @property
    def replicas(self) -> Path:
        """The folder for replicas of other nodes' states."""
        return self.path / "replicas"

    def stacks(self, local_rank: int) -> Path:
        """Where a worker writes its stacks when it is asked to."""
        return self.path / f"stacks-{local_rank}"

    def control(self, local_rank: int) -> Path:
        """The pipe through which a worker that stays is told of the next generation; made here if it is not there."""
        path = self.path / f"control-{local_rank}"
        if not path.exists():
            os.mkfifo(path, 0o600)
        return path

    def close(self, keep: bool, used: bool = True, ended: bool = False) -> None:
        """Give the folder up.

        Args:
            keep: leave the state that is in it to the next agent of this job.
            used: the state may be of this node, and not only of the one whose folder this was.
            ended: so has the job, and nobody will want what agents that died on this host have left of it.
        """
        if ended:
            for folder in self.path.parent.iterdir():
                if folder != self.path:
                    _remove_abandoned(folder)
        if not (keep and any(self.path.glob("slots-*"))):
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()
        elif self.heir_of and not used:
            (self.path / "node").write_text(self.heir_of)
        os.close(self._lock)


def _root() -> Path:
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    root = base / f"edl-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise EDLError(f"{root} belongs to another user: remove it")
    return root


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, file: int) -> bool:
    """Whether the open `file` is still the one at `path`: who had the lock before may have removed it."""
    try:
        return path.samefile(f"/proc/self/fd/{file}")
    except OSError:
        return False


def _sweep(root: Path, but: str) -> None:
    """Remove what agents left that died an hour ago, and whose job nobody took up. Not of the job that begins here."""
    for folder in root.glob("*/*"):
        if folder.parent.name == but:
            continue
        with contextlib.suppress(OSError):
            if time.time() - (folder / "node").stat().st_mtime >= _ABANDONED_S:
                _remove_abandoned(folder)


def _remove_abandoned(folder: Path) -> None:
    """Remove an agent's folder unless the agent lives."""
    with contextlib.suppress(OSError):
        lock = os.open(folder / "lock", os.O_RDWR)
        try:
            if _locked(lock):
                shutil.rmtree(folder, ignore_errors=True)
                folder.parent.rmdir()
        finally:
            os.close(lock)
