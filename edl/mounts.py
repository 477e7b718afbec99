"""Finds the file system of a path, and whether other machines may share this file system."""

from __future__ import annotations

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")

# Kernel modules and FUSE programs that share one tree between machines. SQLite's WAL needs memory that all processes
# share, which none of them provides between machines: https://www.sqlite.org/wal.html, "Disadvantages".
# Not 9p and virtiofs: sandboxes such as gVisor and Kata use these for their whole, private root.
_SHARED = frozenset(
    {
        *("acfs", "afs", "aufs_nfs", "beegfs", "ceph", "cifs", "coda", "cvfs", "daos", "fhgfs", "gfs", "gfs2"),
        *("glusterfs", "gpfs", "lustre", "lustre_lite", "mapr", "ncpfs", "nfs", "nfs4", "nfsd", "ocfs2", "orangefs"),
        *("panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf", "vmhgfs", "wekafs"),
    }
)
_SHARED_FUSE = frozenset(
    {
        *("alluxio", "ceph-fuse", "cephfs", "cvmfs2", "davfs", "dfuse", "gcsfuse", "glusterfs", "goofys", "hdfs"),
        *("juicefs", "lizardfs", "mfs", "moosefs", "mount-s3", "rclone", "s3fs", "seaweedfs", "smbnetfs", "sshfs"),
        *("vmhgfs-fuse"),
    }
)


def read_mounts() -> str:
    """Return this process's mounts as the kernel lists them; empty if unavailable."""
    try:
        return _MOUNTS.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


def file_system(path: str, mounts: str) -> str:
    """Return the type of the file system that contains `path`, as in `proc(5)`; empty if `mounts` does not say.

    `path` is absolute, without symbolic links; it need not exist. `mounts` has the format of `/proc/self/mountinfo`.
    """
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields, dash, rest = line.partition(" - ")
        parts = fields.split(" ")
        if not dash or len(parts) < 5 or not rest:
            continue
        point = unescape(parts[4])
        covers = path == point or path.startswith(point.rstrip("/") + "/")
        if covers and len(point) >= best:  # of several mounts at one place, the last is on top
            best, kind = len(point), rest.split(" ")[0]
    return kind


def is_shared(kind: str) -> bool:
    """Return whether file systems of this type are shared between machines."""
    program = kind.removeprefix("fuse.")
    return kind in _SHARED or (program != kind and program in _SHARED_FUSE)


def unescape(text: str) -> str:
    """Decode a path from mountinfo, in which characters such as blanks are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
