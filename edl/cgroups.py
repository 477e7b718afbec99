"""Counts processes in this container that the kernel killed for lack of memory, in cgroups of version 1 and 2.

A container's status may not show such kills: Kubernetes reports `OOMKilled` only if the container's first process was
killed, and the kernel usually kills the largest process, which is a child of the agent. The kernel counts such kills in
the cgroup of the killed process:

- version 2: `oom_kill` in `memory.events`, including the cgroups below this cgroup
  (https://docs.kernel.org/admin-guide/cgroup-v2.html, "memory.events");
- version 1: `oom_kill` in `memory.oom_control`, since Linux 4.13, without the cgroups below this cgroup
  (https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, "OOM Control").

Both counters also include kills that happened because the whole machine ran out of memory.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from edl.mounts import unescape

_MIN_MOUNT_FIELDS: Final = 5  # in a line of mountinfo before its dash, up to the mount point: see proc(5)


def read_oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes in this process's cgroup were killed for lack of memory since the cgroup was created.

    `root` is the folder that contains `proc` and `sys`. Returns None if the kernel does not report this: there is no
    memory cgroup, the process is in the root cgroup, or the kernel is old.
    """
    path = find_events_file(root)
    try:
        text = "" if path is None else path.read_text("ascii", "replace")
    except OSError:
        return None
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def find_events_file(root: Path = Path("/")) -> Path | None:
    """Return the file with the counter `oom_kill` for this process's memory cgroup; None if no such file is mounted."""
    try:
        membership = (root / "proc/self/cgroup").read_text("utf-8", "surrogateescape")
        mounts = (root / "proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return None
    paths: dict[int, str] = {}
    for line in membership.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    # If both versions are mounted, a controller with its own line is in version 1.
    for version, name in ((1, "memory.oom_control"), (2, "memory.events")):
        if version in paths and (folder := _find_folder(mounts, version, paths[version], root)):
            return folder / name
    return None


def _find_folder(mounts: str, version: int, path: str, root: Path) -> Path | None:
    """Return where the cgroup at `path` in its hierarchy is mounted; None if unknown.

    A container sees its own cgroup, or the cgroup of an enclosing container, mounted as the root of the hierarchy,
    while `path` may be the path on the machine or the path in the container (`/`). The counter of a wrong cgroup would
    be worse than no counter.
    """
    for line in mounts.splitlines():
        fields, dash, rest = line.partition(" - ")
        parts, kind = fields.split(" "), rest.split(" ")
        if not dash or len(parts) < _MIN_MOUNT_FIELDS or len(kind) < 3:
            continue
        if kind[0] != ("cgroup2" if version == 2 else "cgroup"):
            continue
        if version == 1 and "memory" not in kind[2].split(","):
            continue
        mount_root, point = unescape(parts[3]), root / unescape(parts[4]).lstrip("/")
        if path == mount_root:
            return point
        below = path.removeprefix(mount_root.rstrip("/") + "/")
        if below != path and ".." not in below.split("/") and (point / below).is_dir():
            return point / below
    return None
