"""What Linux tells: network file systems, processes killed for memory, and `edl` as process 1 of a container.

The tables of mounts and cgroups are written here, but for this process's own.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edl import mounts, settings
from edl.cgroups import find_events_file, read_oom_kills
from edl.discovery import open_registry, open_store
from edl.errors import DiscoveryError, SettingsError
from tests.waiting import DEADLINE_S

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
36 27 0:33 / /net rw,relatime - autofs systemd-1 rw,fd=51
88 36 0:52 /export /net/ann rw,relatime - nfs4 filer:/export/ann rw,vers=4.2
90 88 0:60 / /net/ann/local rw - xfs /dev/sdb1 rw
91 27 0:61 / /mnt/with\040blank rw master:2 shared:9 - cifs //server/share rw
92 27 0:62 / /remote rw - fuse.sshfs host:/ rw
93 27 0:63 / /encrypted rw - fuse.gocryptfs /cipher rw
94 27 0:64 / /over rw - nfs a:/b rw
95 94 0:65 / /over rw - tmpfs tmpfs rw
96 27 0:66 / /scratch rw - lustre 10.0.0.1@o2ib:/scratch rw
torn line
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/var/lib/edl.sqlite", "ext4", False),
        ("/net/ann/.cache/edl/discovery.sqlite", "nfs4", True),
        ("/net/annette/x", "autofs", False),
        ("/net/ann/local/x", "xfs", False),
        ("/mnt/with blank/x", "cifs", True),
        ("/remote/x", "fuse.sshfs", True),
        ("/over/x", "tmpfs", False),
        ("/scratch", "lustre", True),
        ("/encrypted", "fuse.gocryptfs", False),
    ],
)
def test_the_type_under_a_path_is_found(path: str, kind: str, shared: bool) -> None:
    assert mounts.file_system(path, TABLE) == kind
    assert mounts.is_shared(kind) is shared


@pytest.fixture
def on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    table = f"{TABLE}99 27 0:77 / {tmp_path} rw - nfs4 filer:/t rw\n"
    monkeypatch.setattr(mounts, "read_mounts", lambda: table)  # a fake: nothing here serves NFS
    return f"sqlite:///{tmp_path}/cache/discovery.sqlite"


def test_a_file_on_nfs_is_refused(on_nfs: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for opened in (open_registry, open_store):
        with pytest.raises(SettingsError, match=r"nfs4.*consul://.*EDL_SHARED_FILE") as caught:
            opened(on_nfs)
        assert not isinstance(caught.value, DiscoveryError), "trying again does not help"
    assert not Path(on_nfs.removeprefix("sqlite://")).parent.exists(), "nothing was made there"
    link = tmp_path_factory.mktemp("home") / "cache"
    link.symlink_to(tmp_path)
    with pytest.raises(SettingsError, match="nfs4"):
        open_registry(f"sqlite:///{link}/discovery.sqlite")


def test_who_knows_better_is_warned(
    on_nfs: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EDL_SHARED_FILE", "1")
    caplog.set_level(logging.WARNING, "edl.discovery")
    with open_registry(on_nfs) as registry, registry.watch("s") as watch:
        assert watch.get(DEADLINE_S) is not None
    assert len([record for record in caplog.records if "nfs4" in record.getMessage()]) == 1, "once a file"
    monkeypatch.setenv("EDL_SHARED_FILE", "maybe")
    with pytest.raises(SettingsError, match="EDL_SHARED_FILE='maybe'"):
        open_registry(on_nfs)


def shared_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory on NFS, and where this machine has its own files."""
    home, local = folder / "home", folder / "local"
    local.mkdir()
    (folder / "mountinfo").write_text(f"{TABLE}99 27 0:70 / {home} rw - nfs4 filer:/home rw\n")
    monkeypatch.setattr(mounts, "_MOUNTS", folder / "mountinfo")
    monkeypatch.setattr(settings, "_LOCAL", local)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    return local


def test_default_file_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where homes are shared, as on most clusters, what needs no cluster goes on to need none."""
    local = shared_home(tmp_path, monkeypatch)
    url = settings.default_discovery_url()
    assert url == f"sqlite:///{local}/edl-{os.getuid()}/discovery.sqlite"
    with open_store(url) as store:
        store.put("key", b"value")
    assert (local / f"edl-{os.getuid()}").stat().st_mode & 0o077 == 0
    monkeypatch.setenv("EDL_SHARED_FILE", "1")
    assert settings.default_discovery_url() == f"sqlite:///{tmp_path}/home/.cache/edl/discovery.sqlite"


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_default_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = shared_home(tmp_path, monkeypatch) / f"edl-{os.getuid()}"
    if kind == "link":
        folder.symlink_to(tmp_path)
    elif kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.touch()
    with pytest.raises(SettingsError, match=r"EDL_DISCOVERY, sqlite:///PATH"):
        settings.default_discovery_url()


V1_TABLE = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"

V2_TABLE = "low 0\nhigh 0\nmax 31\noom 4\noom_kill 3\noom_group_kill 0\n"


class Machine:
    """A folder with the files of `/proc` and `/sys` that tell of cgroups."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def member(self, *lines: str) -> None:
        self.write("/proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def mount(self, *lines: str) -> None:
        self.write("/proc/self/mountinfo", "".join(f"{line}\n" for line in lines))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v2_mount(root: str = "/", point: str = "/sys/fs/cgroup") -> str:
    return f"30 23 0:26 {root} {point} ro,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup rw,nsdelegate"


def v1_mount(root: str = "/", point: str = "/sys/fs/cgroup/memory", controllers: str = "memory") -> str:
    return f"36 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,{controllers}"


def test_version_2_in_a_pod(machine: Machine) -> None:
    machine.member("0::/")
    machine.mount("29 23 0:25 / /sys rw - sysfs sysfs rw", v2_mount())
    machine.write("/sys/fs/cgroup/memory.events", V2_TABLE)
    assert find_events_file(machine.root) == machine.root / "sys/fs/cgroup/memory.events"
    assert read_oom_kills(machine.root) == 3


def test_version_2_on_a_host(machine: Machine) -> None:
    """At a mount point with blanks."""
    machine.member("0::/user.slice/job.scope")
    machine.mount(v2_mount(point="/sys/my\\040groups"))
    machine.write("/sys/my groups/memory.events", "oom_kill 99\n")
    machine.write("/sys/my groups/user.slice/job.scope/memory.events", V2_TABLE)
    assert read_oom_kills(machine.root) == 3


def test_version_1_of_a_container(machine: Machine) -> None:
    """Without a cgroup namespace, the container's own cgroup is mounted, and its path is the machine's."""
    machine.member("9:name=systemd:/docker/1f", "4:hugetlb,memory:/docker/1f", "0::/docker/1f")
    machine.mount(
        v1_mount("/docker/1f", "/sys/fs/cgroup/cpu", "cpu,cpuacct"),
        v1_mount("/docker/1f", controllers="hugetlb,memory"),
    )
    machine.write("/sys/fs/cgroup/memory/memory.oom_control", V1_TABLE)
    assert read_oom_kills(machine.root) == 2


def test_hybrid_prefers_the_controllers_own(machine: Machine) -> None:
    """Where version 2 is mounted without the memory controller, its files do not count memory."""
    machine.member("4:memory:/job", "0::/job")
    machine.mount(v2_mount(point="/sys/fs/cgroup/unified"), v1_mount())
    machine.write("/sys/fs/cgroup/unified/job/memory.events", V2_TABLE)
    machine.write("/sys/fs/cgroup/memory/job/memory.oom_control", V1_TABLE)
    assert read_oom_kills(machine.root) == 2


@pytest.mark.parametrize("path", ["/gone", "/job/../../etc"])
def test_anothers_counter_is_not_taken(machine: Machine, path: str) -> None:
    machine.member(f"0::{path}")
    machine.mount(v2_mount())
    machine.write("/sys/fs/cgroup/memory.events", V2_TABLE)
    machine.write("/etc/memory.events", V2_TABLE)
    assert find_events_file(machine.root) is None
    assert read_oom_kills(machine.root) is None


@pytest.mark.parametrize("text", ["low 0\noom 4\n", "oom_kill\n", "oom_kill x\n", "\xff\xfe"])
def test_unknown_is_not_none_killed(machine: Machine, text: str) -> None:
    """An old kernel or the root cgroup does not count: that is no 0."""
    machine.member("0::/")
    machine.mount(v2_mount(), "", "garbage - ", "36 31 0:32 / - cgroup2")
    machine.write("/sys/fs/cgroup/memory.events", text)
    assert read_oom_kills(machine.root) is None


def test_no_cgroups_at_all(machine: Machine) -> None:
    assert read_oom_kills(machine.root) is None
    machine.member("garbage", "1:memory", "::")
    machine.mount("garbage")
    assert read_oom_kills(machine.root) is None
    found = read_oom_kills()
    assert found is None or found >= 0, "this machine's own"


AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")

NEW_PID_NAMESPACE = ("unshare", *AS_ROOT, "--pid", "--fork", "--kill-child", "--mount-proc")

START = """
import os, signal, subprocess, sys
from edl.init_process import run_init
if (code := run_init()) is not None:
    sys.exit(code)
print("ready", os.getpid(), flush=True)
"""


@contextmanager
def container(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python as process 1 of a process namespace of its own, and its first line."""
    command = [*NEW_PID_NAMESPACE, sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if "not permitted" in line:
                pytest.skip(f"a process namespace is not permitted here: {line.strip()}")
            yield process, line
        finally:
            process.kill()


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to what is process 1 in there."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), number)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))", 0),  # signals that init blocks are free
        ("sys.exit(69)", 69),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_exit_code_is_the_programs(code: str, expected: int) -> None:
    with container("-c", START + code) as (process, line):
        assert line == "ready 2\n"
        assert process.wait(DEADLINE_S) == expected


def test_signals_reach_the_program() -> None:
    """Its handlers, and a program without one ends: without an init, SIGTERM would be lost."""
    code = """
signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
print("handlers", flush=True)
while True: signal.pause()
"""
    with container("-c", START + code) as (process, line):
        assert process.stdout is not None
        assert line + process.stdout.readline() == "ready 2\nhandlers\n"
        end(process, signal.SIGUSR1)
        assert process.stdout.readline() == "usr1\n"
        end(process)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_orphans_leave_no_zombies() -> None:
    """Processes whose parents die before them."""
    code = """
from tests.waiting import wait_until
for _ in range(10):
    subprocess.run(["sh", "-c", "sleep 0.1 & exit 0"], check=True)
wait_until(lambda: sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) == [1, os.getpid()])
"""
    with container("-c", START + code) as (process, _):
        assert process.wait(DEADLINE_S) == 0


def test_edl_as_process_1_ends_at_once(tmp_path: Path) -> None:
    """`edl teachers --watch` has no handler for SIGTERM, and ends all the same."""
    with container("-m", "edl", "teachers", "--watch", "--discovery", f"sqlite:///{tmp_path}/d.sqlite") as (process, _):
        end(process)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
