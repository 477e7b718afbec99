"""A pytest plugin with a real Slurm cluster: the fixture `slurm`, two nodes on this host.

Debian's slurmd is built for one node on a host. Two run here because each node has a host name of its own, with the
same address and another port.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.plugins_consul import free_ports
from tests.servers import ROOT, START_S, lack
from tests.slurm_guard import processes_of

ASK_S = 60.0
NODES = ("127.0.0.2", "127.0.0.3")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue")

CONF = """\
ClusterName=test
# Job ids, and so EDL's ports and names, are others than those of another cluster on this host.
FirstJobId={first_job}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until credentials of its last run have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
{plugins}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
MailProg=/bin/true
PlugStackConfig=/dev/null
MpiDefault=none
# Signals reach the tasks only, as with proctrack/cgroup, which needs root.
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=20000,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=60
NodeName=127.0.0.2 NodeHostname=127.0.0.2 NodeAddr=127.0.0.2 Port={first_port} CPUs=4
NodeName=127.0.0.3 NodeHostname=127.0.0.3 NodeAddr=127.0.0.3 Port={second_port} CPUs=4
PartitionName=low Nodes=127.0.0.[2-3] Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=high Nodes=127.0.0.[2-3] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def slurm_programs() -> Path:
    """The folder of Slurm's programs; skips the test without them, and fails it in CI."""
    fetched = ROOT / ".tools/slurm/bin"
    if (fetched / "slurmd").exists():
        return fetched
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not missing:
        return Path(str(shutil.which("slurmd"))).parent
    return lack(
        f"Slurm's {', '.join(missing)} are neither in .tools/slurm/bin nor on PATH: tools/slurm.sh fetches them"
    )


def _parent(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid).parent()
    except psutil.NoSuchProcess:
        return None


def _is_step(process: psutil.Process) -> bool:
    try:
        return any("slurmstepd" in argument for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False


class SlurmCluster:
    """Two nodes, `NODES`, and the partitions `low` and `high`, which preempts jobs of `low`.

    Args:
        folder: for everything that the daemons write; its path must be short, since a socket lies there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._programs = slurm_programs()
        controller, first, second = free_ports(3)
        plugins = self._programs.parent / "package/plugins"
        self.conf.write_text(
            CONF.format(
                folder=folder, user=os.getuid(), first_job=random.randrange(1, 1 << 24),
                controller_port=controller, first_port=first, second_port=second,
                plugins=f"PluginDir={plugins}" if plugins.exists() else "",
            )
        )  # fmt: skip
        (folder / "munge.key").touch(0o600)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        self.environ = {
            **os.environ,
            "SLURM_CONF": str(self.conf),
            "PATH": f"{self._programs}:{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        }
        self._guard: subprocess.Popen[bytes] | None = None
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._slurmd: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm_guard", str(self.conf)],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        munged = ["munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket"]
        for name in ("key", "log", "pid", "seed"):
            munged.append(f"--{name}-file={self.folder}/munge.{name}")
        self._daemons.append(self._spawn(*munged))
        deadline = time.monotonic() + START_S
        while not (self.folder / "munge.socket").exists():
            self._check(deadline)
        self._daemons.append(self._spawn("slurmctld", "-D"))
        for node in NODES:
            self._start_slurmd(node)
        while self._nodes() != ["idle", "idle"]:
            self._check(deadline)

    def kill_node(self, node: str, tasks: Iterable[int]) -> None:
        """Kill a node's daemon, and the steps that it runs with these tasks; the controller takes it for failed."""
        steps = {parent.pid for parent in map(_parent, tasks) if parent is not None and _is_step(parent)}
        self._slurmd[node].kill()
        self._slurmd[node].wait()
        for pid in (*steps, *tasks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def start_node(self, node: str) -> None:
        """Start a node that was killed, and wait until both are idle: `ReturnToService=2` lets it come back."""
        self._start_slurmd(node)
        deadline = time.monotonic() + START_S
        while self._nodes() != ["idle", "idle"]:
            self._check(deadline)

    def processes(self) -> list[int]:
        """The daemons, the steps, and what they run."""
        return processes_of(str(self.conf))

    def stop(self) -> None:
        """Kill all daemons and all that they started."""
        if self._guard is not None:
            self._guard.communicate()
        for daemon in (*self._daemons, *self._slurmd.values()):
            daemon.wait(ASK_S)

    def ask(self, *command: str, cwd: Path | None = None) -> str:
        """What a program of Slurm's prints.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            command, env=self.environ, cwd=cwd, capture_output=True, text=True, timeout=ASK_S, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job, in Slurm's words, such as RUNNING."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def _nodes(self) -> list[str]:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%T"],
            env=self.environ, capture_output=True, text=True, timeout=ASK_S, check=False,
        )  # fmt: skip
        return done.stdout.split()

    def _start_slurmd(self, node: str) -> None:
        stepd = str(self._programs / "slurmstepd")
        self._slurmd[node] = self._spawn("slurmd", "-D", "-N", node, "-d", stepd)

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.out").open("ab") as output:
            return subprocess.Popen(
                [str(self._programs / program), *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environ, start_new_session=True,
            )  # fmt: skip

    def _check(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            logs = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log")]
            output = (self.folder / "daemons.out").read_text(errors="replace")
            raise RuntimeError(f"Slurm did not start within {START_S:g} s:\n{output}\n" + "\n".join(logs))
        time.sleep(0.05)


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A running cluster, the same for all tests."""
    programs = slurm_programs()
    assert programs.is_dir()
    folder = Path(tempfile.mkdtemp(prefix="edl-slurm-"))
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
