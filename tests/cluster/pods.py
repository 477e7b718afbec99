"""Pods that run this machine's Python, environment and project, mounted read-only into an almost empty image."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.machine import ROOT

USER = 65532  # "nonroot" of the distroless images
NO_DNS = {
    "nameservers": ["127.0.0.1"],
    "options": [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "1"}],
}
SYSTEM = ("/usr", "/etc/alternatives")


def make_root(folder: Path) -> Path:
    """Fill an image's folder, and return it: places to mount at, and users."""
    for name in ("usr", "root", "tmp", "etc", "proc", "sys", "dev", "var", "run"):
        (folder / name).mkdir(mode=0o755, parents=True)
    (folder / "tmp").chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    (folder / "var/run").symlink_to("../run")
    (folder / "etc/passwd").write_text(f"root:x:0:0:root:/root:/bin/sh\nnonroot:x:{USER}:{USER}:nonroot:/tmp:/bin/sh\n")
    (folder / "etc/group").write_text(f"root:x:0:\nnonroot:x:{USER}:\n")
    (folder / "etc/nsswitch.conf").write_text("hosts: files dns\n")
    return folder


def _links(path: Path) -> Iterable[Path]:
    """Each place on the way from a link to its file."""
    while path.is_symlink():
        yield path
        path = path.parent / path.readlink()
    yield path


def python_folders() -> list[Path]:
    """Folders that a process with this interpreter reads."""
    folders = {ROOT, Path(sys.prefix), Path(sys.base_prefix)}
    folders |= {link.parent.parent for link in _links(Path(sys.executable))}
    folders |= {Path(entry) for entry in sys.path if entry and Path(entry).is_dir()}
    folders |= {Path(name) for name in SYSTEM}
    return sorted({Path(os.path.normpath(folder)) for folder in folders if folder.exists()})


def readable_mounts(folders: Iterable[Path]) -> list[Path]:
    """The fewest paths to mount, so that a user who is not root reads them all.

    A folder that is its owner's alone is mounted entry by entry: the container makes the folder itself anew, open.
    """
    mounts: list[Path] = []
    for folder in sorted(folders):
        if any(folder == mount or mount in folder.parents for mount in mounts):
            continue
        mode = folder.stat().st_mode
        if not stat.S_ISDIR(mode) or mode & 0o005 == 0o005:
            mounts.append(folder)
        elif os.access(folder, os.R_OK | os.X_OK):
            entries = (entry for entry in folder.iterdir() if entry.name != ".git" and not entry.is_symlink())
            mounts += readable_mounts(entries)
    return mounts


def pod_template(
    image: str,
    command: Sequence[str] | None = None,
    *,
    host: bool = True,
    gpus: int = 0,
    cpu: str = "50m",
    memory: str = "512Mi",
    env: Mapping[str, str] | None = None,
    reads: Sequence[Path] = (),
    writes: Sequence[Path] = (),
) -> dict[str, Any]:
    """A PodTemplateSpec with a container `edl` whose command is, unless given, this interpreter's `python -m edl`.

    Args:
        image: its image.
        command: the container's command.
        host: mount this machine's Python and project; else the image has them.
        gpus: `nvidia.com/gpu` as request and limit.
        cpu: its request.
        memory: its request and limit.
        env: added to the environment.
        reads: more folders of this machine, mounted read-only at their own paths.
        writes: folders of this machine that the pod may write; they are opened to everybody.
    """
    mounts = readable_mounts([*python_folders(), *reads]) if host else []
    for folder in writes:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
    volumes: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "128Mi"}},
    ]
    volume_mounts: list[dict[str, Any]] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for index, path in enumerate([*mounts, *writes]):
        volumes.append({"name": f"host-{index}", "hostPath": {"path": str(path)}})
        volume_mounts.append({"name": f"host-{index}", "mountPath": str(path), "readOnly": index < len(mounts)})
    environment = {
        "HOME": "/tmp",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin" if host else "",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'serving'}" if host else "",  # this checkout, whichever is installed
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        **(env or {}),
    }
    quantities: dict[str, str] = {"memory": memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    python = sys.executable if host else "python"
    return {
        "metadata": {},
        "spec": {
            # Without a DNS server in the cluster, each reverse look-up of torch's would wait for its timeouts.
            **({"dnsPolicy": "None", "dnsConfig": NO_DNS} if host else {}),
            "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
            "containers": [
                {
                    "name": "edl",
                    "image": image,
                    "imagePullPolicy": "Never" if host else "IfNotPresent",
                    "command": list(command or [python, "-m", "edl"]),
                    "workingDir": str(ROOT) if host else "/tmp",
                    "env": [{"name": name, "value": value} for name, value in environment.items() if value],
                    "resources": {"requests": {"cpu": cpu, **quantities}, "limits": quantities},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": volume_mounts,
                }
            ],
            "volumes": volumes,
        },
    }
