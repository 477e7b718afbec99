"""Processes killed for memory, in files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.cgroups import MemoryCgroup, find_memory_cgroup, read_oom_kills

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
    assert find_memory_cgroup(machine.root) == MemoryCgroup(2, machine.root / "sys/fs/cgroup")
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
    assert find_memory_cgroup(machine.root) == MemoryCgroup(1, machine.root / "sys/fs/cgroup/memory")
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
    assert find_memory_cgroup(machine.root) is None
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
