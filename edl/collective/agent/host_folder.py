"""The folder in memory that one agent keeps for its workers: status pages, slots of state, logs.

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

from edl.collective.checkpoint.memory.slots import find_slots
from edl.errors import EDLError

__all__ = ["HostFolder"]

_ABANDONED_S = 3600.0
_UNSTORED = "unstored"
_LOOKING_S = 5.0
_LOOK_AGAIN_S = 0.01


class HostFolder:
    """A folder that belongs to this process until `close`.

    Args:
        job: the job's name.
        node: this agent's name.

    Attributes:
        path: the folder, in memory where the host has `/dev/shm`.
        previous_owner: the node whose folder this was, empty if the folder is new.
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
        self.previous_owner = _owner(self.path)
        self._is_of(node)

    @property
    def run(self) -> str:
        """Which run of the job the state here is of, "" if nobody said so."""
        return _run_of(self.path)

    @run.setter
    def run(self, name: str) -> None:
        (self.path / "run").write_text(name)

    @property
    def command(self) -> str:
        """What left the state here ran, as `LaunchSpec.command`; "" where the job's name says it all."""
        file = self.path / "command"
        return file.read_text() if file.exists() else ""

    @command.setter
    def command(self, digest: str) -> None:
        (self.path / "command").write_text(digest)

    @property
    def unstored(self) -> bool:
        """Whether the job has ended, and its last state could not be taken from here to its storage."""
        return (self.path / _UNSTORED).exists()

    @unstored.setter
    def unstored(self, so: bool) -> None:
        if so:
            (self.path / _UNSTORED).touch()
        else:
            (self.path / _UNSTORED).unlink(missing_ok=True)

    @property
    def holds_state(self) -> bool:
        """Whether any slot here is complete."""
        return bool(_labels(self.path))

    def status_page(self, local_rank: int) -> Path:
        """Return the file of a worker's status page."""
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
            ended: so has the job, and nobody will want what agents that died on this host have left of it, but for what
                could not be stored.
        """
        with _one_at_a_time(self.path.parent):
            if ended:
                for path, lock in _take_abandoned(self.path.parent).items():
                    if not (path / _UNSTORED).exists():
                        shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)
            if not (keep and self.holds_state):
                shutil.rmtree(self.path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    self.path.parent.rmdir()
            elif self.previous_owner and not used:
                self._is_of(self.previous_owner)
            os.close(self._lock)

    def _is_of(self, node: str) -> None:
        """Write down whose folder it is; whoever reads that sees all of it."""
        (self.path / "node.new").write_text(node)
        (self.path / "node.new").rename(self.path / "node")


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
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except (FileExistsError, FileNotFoundError) as exc:  # another agent has just removed it
            if time.monotonic() > deadline:
                raise EDLError(f"{folder}, the job's folder in memory, cannot be used: {exc.strerror}") from exc
            continue
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
    taken: dict[Path, int] = {}
    try:
        paths = list(job.iterdir())
    except FileNotFoundError:  # by one that did not wait for us
        return taken
    for path in paths:
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
    newest = {path: max(labels) for path in died if (labels := _labels(path))}
    if not newest:
        return max(died, key=lambda path: died[path])
    run = _run_of(max(newest, key=lambda path: died[path]))
    return max(newest, key=lambda path: (_run_of(path) == run, newest[path], died[path]))


def _labels(path: Path) -> list[tuple[int, int]]:
    """Generation and step of each complete state in a folder's slots."""
    prefixes = {file.with_suffix("") for file in path.glob("slots-*")}
    return [(found.header.generation, found.header.step) for prefix in prefixes for found in find_slots(prefix)]


def _make(job: Path) -> tuple[Path, int]:
    """A folder more, with its lock."""
    number = -1
    while True:
        number += 1
        path = job / str(number)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileExistsError, FileNotFoundError):
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
    for job in root.iterdir():
        if job.name == but:
            continue
        with contextlib.suppress(OSError):  # of a folder that somebody else removes meanwhile
            if not any(_abandoned_long_ago(folder) for folder in job.iterdir()) and not _is_old(job):
                continue
            with _one_at_a_time(job):
                for folder, lock in _take_abandoned(job).items():
                    if _abandoned_long_ago(folder):
                        shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)
                job.rmdir()  # if it is empty


def _abandoned_long_ago(folder: Path) -> bool:
    try:
        return _is_old(folder / "node")
    except OSError:
        return False


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime >= _ABANDONED_S
