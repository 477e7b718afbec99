"""The folder in memory that one agent keeps for its workers: boards, slots of state, logs.

It outlives the agent. Another agent of the same job on the same host takes the folder of a dead one over, that with the
newest state if there are several, and knows from the folders' locks that the dead and their workers are no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from edl.collective.checkpoint.slots import find
from edl.errors import EDLError

__all__ = ["HostFolder"]

_ABANDONED_S = 3600.0
_LOOKING_S = 5.0
_LOOK_AGAIN_S = 0.01


class HostFolder:
    """A folder that belongs to this process until `close`.

    Args:
        job: the job's name.
        node: this agent's name.

    Attributes:
        path: the folder, in memory where the host has `/dev/shm`.
        heir_of: the node whose folder this was, empty if the folder is new.
        dead: nodes whose agents have died on this host, that one among them.
    """

    def __init__(self, job: str, node: str) -> None:
        root = _root()
        digest = hashlib.sha256(job.encode()).hexdigest()[:16]
        _sweep(root, but=digest)
        with _one_at_a_time(root / digest):
            left = _take_abandoned(root / digest)
            self.dead = frozenset(filter(None, map(_owner, left)))
            if left:
                self.path = _newest(left)
                self._lock = left.pop(self.path)
            else:
                self.path, self._lock = _make(root / digest)
            for lock in left.values():
                os.close(lock)
        self.heir_of = _owner(self.path)
        (self.path / "node").write_text(node)

    @property
    def run(self) -> str:
        """Which run of the job the state here is of, "" if nobody said so."""
        return _run_of(self.path)

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


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Agents that start together do not see each other's folders as taken while one looks which is the newest."""
    deadline = time.monotonic() + _LOOKING_S
    while True:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another agent has just removed it
        # Whoever looks for longer than that was stopped, and what it locked is not abandoned for anybody else.
        if (_locked(file) or time.monotonic() > deadline) and _is(folder, file):
            break
        os.close(file)
        time.sleep(_LOOK_AGAIN_S)
    try:
        yield
    finally:
        os.close(file)


def _take_abandoned(job: Path) -> dict[Path, int]:
    """The folders of agents that are no more, each with its lock."""
    taken = {}
    for path in job.iterdir():
        with contextlib.suppress(OSError):
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
            if _locked(lock) and _is(path / "lock", lock):
                taken[path] = lock
            else:
                os.close(lock)
    return taken


def _newest(folders: Iterable[Path]) -> Path:
    """That with the newest state. Labels tell within a run; of several runs, the one whose agent died last is meant."""
    died = {path: (path / "node").stat().st_mtime if _owner(path) else 0.0 for path in folders}
    run = _run_of(max(died, key=lambda path: died[path]))

    def state(path: Path) -> tuple[bool, tuple[int, int], float]:
        prefixes = {file.with_suffix("") for file in path.glob("slots-*")}
        labels = [found.label for prefix in prefixes for found in find(prefix)]
        newest = max(((label.generation, label.step) for label in labels), default=(-1, -1))
        return _run_of(path) == run, newest, died[path]

    return max(died, key=state)


def _make(job: Path) -> tuple[Path, int]:
    """A folder more, with its lock."""
    number = -1
    while True:
        number += 1
        path = job / str(number)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # another agent is just removing it
        if _locked(lock) and _is(path / "lock", lock):
            return path, lock
        os.close(lock)


def _owner(path: Path) -> str:
    """The node that a folder belongs to, or belonged to last; "" if nobody wrote it down."""
    file = path / "node"
    return file.read_text() if file.exists() else ""


def _run_of(path: Path) -> str:
    file = path / "run"
    return file.read_text() if file.exists() else ""


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
