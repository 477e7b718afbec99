"""The folder in memory that an agent keeps for its workers: status pages, slots of state, logs.

It outlives the agent. Another agent of the same job on the same host takes over a dead agent's folder. If there are
several such folders, the agent takes the folder with the newest state. A folder's lock shows whether its agent and
workers are gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from edl.collective.checkpoint.memory.slots import find_slots
from edl.errors import EDLError

_ABANDONED_S = 3600.0  # a state is kept for a later start; messages and docs say an hour. Longer would withhold memory
_UNSTORED = "unstored"
_LOCK_TIMEOUT_S = 5.0  # for another agent to look through the folders; one that takes longer was stopped
_LOCK_POLL_S = 0.01  # agents that start together take turns


def _text_file(name: str, doc: str) -> Any:
    """Return a property whose value is kept in a file of the folder; "" while there is no such file."""

    def replace_text(folder: HostFolder, text: str) -> None:
        """Replace the file in one step: this agent may be killed, and another agent may read the file, at any time."""
        draft = folder.path / f"{name}.new"
        draft.write_text(text)
        draft.rename(folder.path / name)

    return property(lambda folder: _read_text(folder.path / name), replace_text, doc=doc)


class HostFolder:
    """A folder that belongs to this process until `close`, in memory if the host has `/dev/shm`.

    `previous_owner` is the node that owned the folder before, or "". `dead` contains the job's nodes whose agents have
    died on this host.
    """

    run: str = _text_file("run", "The run of the job that the state here is from.")
    command: str = _text_file("command", "The state's command (`LaunchSpec.command`), if the job has no name.")
    _node: str = _text_file("node", "The node that owns this folder, or owned it last.")

    def __init__(self, job: str, node: str) -> None:
        root = _root()
        digest = hashlib.sha256(job.encode()).hexdigest()[:16]
        _remove_abandoned(root, kept=digest)
        with _locked_folder(root / digest):
            left = _take_abandoned(root / digest)
            self.dead = frozenset(filter(None, (_read_text(path / "node") for path in left)))
            if left:
                self.path = _newest(left)
                self._lock = left.pop(self.path)
            else:
                path, lock = _make(root / digest)
                self.path = path
                self._lock = lock
            for lock in left.values():
                os.close(lock)
        self.previous_owner = self._node
        self._node = node

    @property
    def unstored(self) -> bool:
        """Whether the job has ended and its last state is still here because it could not be stored."""
        return (self.path / _UNSTORED).exists()

    @unstored.setter
    def unstored(self, so: bool) -> None:
        if so:
            (self.path / _UNSTORED).touch()
        else:
            (self.path / _UNSTORED).unlink(missing_ok=True)

    @property
    def holds_state(self) -> bool:
        return bool(_labels(self.path))

    def status_page(self, local_rank: int) -> Path:
        return self.path / f"board-{local_rank}"

    def slots(self, local_rank: int) -> str:
        return str(self.path / f"slots-{local_rank}")

    def touch(self) -> None:
        """Show that this folder's agent is alive. The agent calls this now and then."""
        with contextlib.suppress(OSError):
            os.utime(self.path / "node")

    def forget_slots(self) -> None:
        """Remove the states in memory, so that no worker continues from them."""
        for path in (*self.path.glob("slots-*"), *self.replicas.glob("*")):
            path.unlink(missing_ok=True)  # threads that store and replicate may rename files at the same time

    @property
    def replicas(self) -> Path:
        return self.path / "replicas"

    def stacks(self, local_rank: int) -> Path:
        return self.path / f"stacks-{local_rank}"

    def make_output_folder(self) -> Path:
        """Return an empty folder for the workers' output, which is used unless the user named another folder."""
        folder = self.path / "output"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def close(self, keep: bool, used: bool = True, ended: bool = False) -> None:
        """Release the folder. With `keep`, its state stays for the job's next agent.

        A state that stays is recorded as this node's if `used`, or else as the previous owner's. If the job has
        `ended`, everything that the job's dead agents left here is removed, except for states that were not stored.
        """
        with _locked_folder(self.path.parent):
            if ended:
                for path, lock in _take_abandoned(self.path.parent).items():
                    if not (path / _UNSTORED).exists():
                        _remove(path)
                    os.close(lock)
            if not (keep and self.holds_state):
                _remove(self.path)
                with contextlib.suppress(OSError):
                    self.path.parent.rmdir()
            elif self.previous_owner and not used:
                self._node = self.previous_owner
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
def _locked_folder(folder: Path) -> Iterator[None]:
    """Lock a job's folder for the block, so that agents that start together look through it one at a time."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except (FileExistsError, FileNotFoundError) as exc:  # another agent just removed it
            if time.monotonic() > deadline:
                raise EDLError(f"{folder}, the job's folder in memory, cannot be used: {exc.strerror}") from exc
            continue
        # An agent that holds the lock for longer was stopped. The folders that it locked do not count as abandoned.
        if (_locked(file) or time.monotonic() > deadline) and _is(folder, file):
            break
        os.close(file)
        time.sleep(_LOCK_POLL_S)
    try:
        yield
    finally:
        os.close(file)


def _take_abandoned(job: Path) -> dict[Path, int]:
    """Lock the folders of agents that are gone. Returns the locks by folder."""
    taken: dict[Path, int] = {}
    try:
        paths = list(job.iterdir())
    except FileNotFoundError:  # removed by an agent that did not wait for us
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
    """Return the folder with the newest state: the latest generation and step of the run whose agent died last."""
    died = {path: (path / "node").stat().st_mtime if _read_text(path / "node") else 0.0 for path in folders}
    newest = {path: max(labels) for path in died if (labels := _labels(path))}
    if not newest:
        return max(died, key=lambda path: died[path])
    run = _read_text(max(newest, key=lambda path: died[path]) / "run")
    return max(newest, key=lambda path: (_read_text(path / "run") == run, newest[path], died[path]))


def _labels(path: Path) -> list[tuple[int, int]]:
    prefixes = {file.with_suffix("") for file in path.glob("slots-*")}
    return [(found.header.generation, found.header.step) for prefix in prefixes for found in find_slots(prefix)]


def _make(job: Path) -> tuple[Path, int]:
    number = -1
    while True:
        number += 1
        path = job / str(number)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileExistsError, FileNotFoundError):
            continue  # another agent is removing it
        if _locked(lock) and _is(path / "lock", lock):
            return path, lock
        os.close(lock)


def _remove(folder: Path) -> None:
    """Rename, then remove a folder whose lock this process holds: another agent may reuse the folder's name."""
    gone = folder.with_name(f"{folder.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, file: int) -> bool:
    """Return whether the open `file` is still at `path`. An agent that held the lock may have removed the file."""
    try:
        return path.samefile(f"/proc/self/fd/{file}")
    except OSError:
        return False


def _remove_abandoned(root: Path, kept: str) -> None:
    """Remove the folders of agents that died over an hour ago, except folders of the job `kept`, which begins here."""
    for job in root.iterdir():
        if job.name == kept:
            continue
        with contextlib.suppress(OSError):  # another agent may be removing the same folder
            if not any(_abandoned_long_ago(folder) for folder in job.iterdir()) and not _is_old(job):
                continue
            with _locked_folder(job):
                for folder, lock in _take_abandoned(job).items():
                    if _abandoned_long_ago(folder):
                        _remove(folder)
                    os.close(lock)
                job.rmdir()  # succeeds only if it is empty


def _abandoned_long_ago(folder: Path) -> bool:
    try:
        return _is_old(folder / "node")
    except OSError:
        return False


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime >= _ABANDONED_S
