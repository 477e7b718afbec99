"""Processes that have a GPU open, and waiting until they have let go of its memory.

CUDA gives a context's memory back when the last process that has the device's file open has ended, its children that
inherited the file among them. NVML (the package `nvidia-ml-py`, where it is installed) lists who holds memory.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["GPU_DEVICES", "find_holders", "wait_for_release"]

GPU_DEVICES: Final = ("/dev/nvidia[0-9]*", "/dev/kfd")
"""Patterns of the files that a process opens to use a GPU of NVIDIA or AMD."""
_POLL_S: Final = 0.005
"""Between two looks at processes that are to end: recovery waits for it, and a look takes a tenth of that."""
_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO of Linux; NVML names processes as they are known there

logger = logging.getLogger(__name__)


def find_holders(groups: Collection[int], devices: Sequence[str] = GPU_DEVICES) -> dict[int, str]:
    """Find the processes of some process groups that have a GPU open. On a host without a GPU this returns at once.

    Args:
        groups: ids of the process groups.
        devices: patterns of the files that a process opens to use a GPU.

    Returns:
        When they started, in the kernel's ticks, by process id: together no later process has the same.
    """
    if not groups or not any(_exists(pattern) for pattern in devices):
        return {}
    found = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        fields = _stat(int(path.name))
        if fields and int(fields[2]) in groups and _has_open(path, devices):
            found[int(path.name)] = fields[19]
    return found


def wait_for_release(holders: dict[int, str], deadline: float) -> bool:
    """Wait until these processes have ended, and NVML does not list them any more.

    Args:
        holders: what `find_holders` found.
        deadline: of `time.monotonic()`.

    Returns:
        Whether they have, before the deadline.
    """
    while left := [pid for pid, began in holders.items() if _lives(pid, began)] or sorted(_listed() & set(holders)):
        if time.monotonic() > deadline:
            logger.warning("processes %s still hold memory of a GPU: the new workers start all the same", left)
            return False
        time.sleep(_POLL_S)
    return True


def _exists(pattern: str) -> bool:
    folder, _, name = pattern.rpartition("/")
    with contextlib.suppress(OSError):
        return any(fnmatch.fnmatchcase(path.name, name) for path in Path(folder).iterdir())
    return False


def _has_open(process: Path, devices: Sequence[str]) -> bool:
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if any(fnmatch.fnmatchcase(target, pattern) for pattern in devices):
                    return True
    return False


def _lives(pid: int, began: str) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX" and fields[19] == began


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def _listed() -> set[int]:
    """Return the processes that hold memory of a GPU, where NVML is installed and names them as this process does."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return set()
    if Path("/proc/self/ns/pid").stat().st_ino != _INITIAL_PID_NAMESPACE:
        return set()
    return _ask_nvml(nvml)


def _ask_nvml(nvml: Any) -> set[int]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return set()
    try:
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {process.pid for device in devices for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)}
    except nvml.NVMLError:
        return set()
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
