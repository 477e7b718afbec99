"""Count the processes of this container that the kernel killed for lack of memory, in a cgroup of version 2.

Kubernetes reports `OOMKilled` only if the container's first process was killed, and the kernel usually kills the
largest, a child of the agent. The kernel counts all such kills in `oom_kill` of `memory.events`, also those of cgroups
below, and those when the whole machine ran out of memory (https://docs.kernel.org/admin-guide/cgroup-v2.html).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from edl.mounts import unescape

_MIN_MOUNT_FIELDS: Final = 5  # in a line of mountinfo before its dash, up to the mount point: see proc(5)


def read_oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes in this process's cgroup were killed for lack of memory since it was created.

    `root` is the folder that contains `proc` and `sys`. None if the kernel does not say: no memory cgroup of version 2,
    or the root cgroup.
    """
    path = find_events_file(root)
    try:
        text = "" if path is None else path.read_text("ascii", "replace")
    except OSError:
        return None
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def find_events_file(root: Path = Path("/")) -> Path | None:
    """Return the file with the counter `oom_kill` of this process's cgroup, None if it is not mounted.

    A container sees its own cgroup, or that of an enclosing container, mounted as the root of the hierarchy, while its
    path may be the machine's view or the container's (`/`). A wrong cgroup's counter would be worse than none.
    """
    try:
        membership = (root / "proc/self/cgroup").read_text("utf-8", "surrogateescape")
        mounts = (root / "proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return None
    found = re.search(r"^0::(.*)$", membership, re.MULTILINE)
    if found is None:
        return None
    path = found[1]
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        parts = fields.split(" ")
        if not kind.startswith("cgroup2 ") or len(parts) < _MIN_MOUNT_FIELDS:
            continue
        mount_root, point = unescape(parts[3]), root / unescape(parts[4]).lstrip("/")
        if path == mount_root:
            return point / "memory.events"
        below = path.removeprefix(mount_root.rstrip("/") + "/")
        if below != path and ".." not in below.split("/") and (point / below).is_dir():
            return point / below / "memory.events"
    return None
