"""`edl run`'s command line: digests of commands, addresses, where nodes meet, and what a Slurm step's tasks do."""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from edl.cli import main
from edl.collective.agent.command_line import endpoint as endpoint_module
from edl.collective.agent.command_line.cli import _command, _launch, _program
from edl.collective.agent.command_line.endpoint import RendezvousEndpoint, own_address, warn_of_slow_name
from edl.collective.agent.command_line.options import parse_options, parser
from edl.collective.agent.command_line.served_store import keep_for_later, served_store
from edl.collective.agent.command_line.slurm import SlurmStep, TaskRuns
from edl.collective.agent.ending import StopSignals
from edl.collective.agent.processes.zygote import ProgramSpec
from edl.discovery.served.addresses import ListenAddress
from edl.discovery.served.host import KEPT
from edl.errors import DiscoveryError, SettingsError
from edl.settings import Credentials
from tests.certificates import HERE, Authority
from tests.plugins_consul import free_ports
from tests.waiting import wait_until


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return two projects, which have a script of the same name."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.sh").touch()
    return tmp_path / "first", tmp_path / "second"


def digests(folders: tuple[Path, Path], *argv: str) -> set[str]:
    """Return the digests of a command that is given in several folders."""
    found = set()
    for folder in folders:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            found.add(_command(parse_options(list(argv), None)))
    return found


def test_projects_have_their_own_commands(folders: tuple[Path, Path]) -> None:
    for argv in (("-m", "train"), ("--no-python", "bash", "train.sh"), ("train.sh",)):
        assert len(digests(folders, *argv)) == 2
    script = ("--no-python", "bash", "-e", str(folders[0] / "train.sh"), "out.log")
    relative = digests((folders[0], folders[0]), *script[:3], "train.sh", "out.log")
    assert digests(folders, *script) == relative, "it is named from anywhere"


def test_help_shows_our_options_first() -> None:
    text = parser().format_help()
    assert text.startswith("usage: edl run [OPTIONS] train.py")
    assert text.index("--checkpoint URL") < text.index("  --nnodes MIN:MAX ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "3:2", "t.py"], "--nnodes 3:2"),
        (["--nnodes", "many", "t.py"], "--nnodes many"),
        (["--nnodes", "1:2", "t.py"], "several nodes need --rdzv-id NAME"),
        (["--rdzv-id", "a/b", "t.py"], "--rdzv-id 'a/b'"),
        (["--nproc-per-node", "none", "t.py"], "--nproc-per-node none"),
        (["--nnodes", "2", "--rzdv-id", "x", "t.py"], "unknown option '--rzdv-id'; did you mean '--rdzv-id'"),
        (["--regroup-timeout", "30", "t.py"], "--regroup-timeout was removed: remove it"),
        (["--nnodes", "2"], "which script?"),
        (["no-such-script.py"], "no-such-script.py"),
        (["--preload", "torch vision", "t.py"], "--preload torch vision"),
        (["--no-python", "-m", "t.py"], "--no-python and --module are mutually exclusive"),
        (["--no-python", "no-such-program"], "no-such-program"),
        (["--log-dir", "/proc/logs", "t.py"], "--log-dir /proc/logs"),
        (["--redirects", "x", "t.py"], "--redirects"),
        (["--tls-ca", "ca.pem", "t.py"], "cert"),
        (["--store", "redis://x", "t.py"], "unknown scheme 'redis'"),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    assert main(["run", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("url", ["kept", "s3://bucket/kept", "file:/kept"])
def test_scripts_may_change_the_folder(url: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders[0])
    with ExitStack() as stack:
        spec = _launch(parse_options(["--checkpoint", url, "train.sh"], None), {}, "sqlite:///store", stack)
    assert spec.checkpoint == (url if ":" in url else str(folders[0] / url))


def test_nobody_joins_a_job_without_a_name(folders: tuple[Path, Path]) -> None:
    """Its node trains on without the store, so that another under its name would train beside it."""
    script = str(folders[0] / "train.sh")
    with ExitStack() as stack:
        alone = _launch(parse_options([script], None), {}, "sqlite:///store", stack)
        named = _launch(parse_options(["--rdzv-id", "run-1", script], None), {}, "sqlite:///store", stack)
        assert (alone.resumable, named.resumable) == (False, True)
        with pytest.raises(SettingsError, match="no other node can join"):
            _launch(parse_options(["--rdzv-id", alone.job, script], None), {}, "sqlite:///store", stack)


def test_other_interpreter(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders[0])
    interpreter = tmp_path / "python"
    interpreter.touch(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(interpreter))
    for options, given in (([], ("-u", "train.sh", "--x")), (["-m"], ("-u", "-m", "train.sh", "--x"))):
        found = _program(parse_options([*options, "train.sh", "--x"], None))
        assert found == ProgramSpec("program", str(interpreter), given)
    monkeypatch.setenv("PYTHON_EXEC", str(tmp_path / "absent"))
    with pytest.raises(SettingsError, match="absent': there is no such program"):
        _program(parse_options(["train.sh"], None))


def test_rendezvous_pairs_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator names a pair of its own: a user's other pair leaves it as it is, and the same one wins."""
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=9")
    assert parse_options(["train.py"], None).rdzv_conf == "last_call_timeout=9"
    argv = ["--rdzv-conf=takeover_timeout=45", "--rdzv-conf=takeover_timeout=9", "train.py", "--rdzv-conf", "its-own"]
    assert parse_options(argv, None).rdzv_conf == "takeover_timeout=45,takeover_timeout=9"


def test_slow_name_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The user hears which line in /etc/hosts answers the question that torch asks."""
    questions: list[Any] = []

    def getnameinfo(sockaddr: Any, flags: int) -> tuple[str, str]:
        questions.append(sockaddr[0])
        raise socket.gaierror("no name")

    monkeypatch.setattr(socket, "getnameinfo", getnameinfo)
    warn_of_slow_name("10.1.2.3")
    assert not caplog.messages, "DNS answered at once, be it that there is no name"
    monkeypatch.setattr(endpoint_module, "_SLOW_NAME_S", 0.0)
    for own in ("10.1.2.3", "2001:db8::1"):
        warn_of_slow_name(own)
    assert questions == ["::ffff:10.1.2.3", "::ffff:10.1.2.3", "2001:db8::1"]
    assert all(f'Add the line "{asked} ' in told for asked, told in zip(questions[1:], caplog.messages, strict=True))


def test_own_address_is_towards_the_store() -> None:
    assert own_address("sqlite:///a/store.sqlite") == "127.0.0.1"
    with pytest.raises(SettingsError, match=r"no route to the store's host no-such-host\.invalid"):
        own_address("consul://no-such-host.invalid:8500")
    own = [each.address for nic in psutil.net_if_addrs().values() for each in nic if each.family == socket.AF_INET6]
    for each in own:
        if "%" not in each and not ipaddress.ip_address(each).is_loopback:
            assert ipaddress.ip_address(own_address(f"edl://[{each}]:29400")).version == 6
    assert own_address("consul://[::1]:8500") == own_address("consul://127.0.0.1:8500")


SERVED_STORE = served_store.__module__


def endpoint(*arguments: str, conf: dict[str, str] | None = None, max_nodes: int = 4) -> RendezvousEndpoint | None:
    return RendezvousEndpoint.of(parser().parse_args([*arguments, "train.py"]), conf or {}, max_nodes)


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        (["--rdzv-endpoint", "node0:29401"], "edl://node0:29401"),
        (["--rdzv-endpoint", "node0"], "edl://node0:29400"),
        (["--rdzv_backend", "c10d", "--rdzv_endpoint=[fd00::1]:7"], "edl://[fd00::1]:7"),
        (["--node-rank", "1", "--master-addr", "node0"], "edl://node0:29500"),
        (["--master-addr", "fd00::1", "--master-port", "1234"], "edl://[fd00::1]:1234"),
        (["--master-port", "1234"], "edl://127.0.0.1:1234"),
        (["--rdzv-endpoint", "node0", "--master-addr", "node1"], "edl://node0:29400"),
        ([], None),
        (["--rdzv-backend", "c10d", "--master-addr", "node0"], None),
        (["--rdzv-endpoint", "node0", "--store", "consul://node1"], None),
        (["--rdzv-endpoint", "node0", "--standalone"], None),
        (["--rdzv-endpoint", "consul://node1"], None),
        (["--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "node0:2379"], None),
    ],
)
def test_endpoints_of_torchrun(arguments: list[str], url: str | None) -> None:
    found = endpoint(*arguments)
    assert (None if found is None else found.url) == url


@pytest.mark.parametrize("text", ["node0:0", "node0:port", "node0:99999", "no de:1", ":1", "fd00::2:29400"])
def test_an_unusable_endpoint_is_named(text: str) -> None:
    with pytest.raises(SettingsError, match="--rdzv-endpoint"):
        endpoint("--rdzv-endpoint", text)


def test_who_serves_and_where_it_listens() -> None:
    def found(host: str, **conf: str) -> RendezvousEndpoint:
        made = endpoint("--rdzv-endpoint", host, conf=conf)
        assert made is not None
        return made

    assert found("localhost").listen == ListenAddress("127.0.0.1", 29400)
    assert found("127.0.0.3").listen == ListenAddress("127.0.0.3", 29400)
    assert found(socket.gethostname()).listen == ListenAddress("::", 29400)
    assert found(socket.gethostname()).own
    assert not found("203.0.113.7").own
    assert found("203.0.113.7", is_host="true").own
    assert not found("localhost", is_host="0").own
    with pytest.raises(SettingsError, match="is_host=perhaps"):
        found("localhost", is_host="perhaps")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What all participants of this process have logged until now."""
    caplog.set_level(logging.INFO, logger=SERVED_STORE)
    return lambda: [record.getMessage() for record in caplog.records if record.name == SERVED_STORE]


def served(
    port: int, credentials: Credentials | None = None, join_timeout_s: float = 60.0, own: bool = True
) -> contextlib.AbstractContextManager[object]:
    at = RendezvousEndpoint("127.0.0.1", port, own)
    return served_store(at, credentials or Credentials(), timeout_s=5.0, join_timeout_s=join_timeout_s)


def test_the_store_of_a_served_endpoint(lines: Callable[[], list[str]]) -> None:
    """One node serves, a second one on the same host waits to, a third one on another host only connects."""
    port = free_ports(1)[0]
    with served(port) as first, served(port) as second, served(port, own=False) as third:
        entry = first.put("a", b"1")
        assert second.get("a") == third.get("a") == entry
        keep_for_later(third, "job", True)
        assert [found.key for found in first.list(KEPT)] == [f"{KEPT}job/{socket.gethostname()}"]
        keep_for_later(third, "job", False)
    assert lines() == [f"this node serves the job's store at port {port}: the job ends with this host"]


def test_late_store_is_waited_for(lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SERVED_STORE}._SILENT_S", 0.0)
    port = free_ports(1)[0]
    found: list[object] = []

    def wait() -> None:
        with served(port, own=False) as store:
            found.append(store.get("a"))

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lines, "it says that it waits")
    assert f"waiting for the store at 127.0.0.1:{port}" in lines()[0]
    assert "nothing listens on that port: start the same command on 127.0.0.1" in lines()[0]
    with served(port):
        waiting.join(60)
    assert found == [None]


def test_nobody_serves_in_time() -> None:
    port = free_ports(1)[0]
    with pytest.raises(DiscoveryError, match=r"no store at .* within 0\.2 s .*join_timeout.*nothing listens"):
        served(port, join_timeout_s=0.2, own=False).__enter__()


@pytest.mark.parametrize("own", [True, False])
def test_another_program_has_the_port(own: bool) -> None:
    """Known at once, and not behind ten minutes, on the host itself and on others."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(SettingsError, match="a program other than EDL answers there: choose a port other than"):
                served(server.server_port, own=own).__enter__()
        finally:
            server.shutdown()
            thread.join()


def test_tls_on_half_of_the_nodes(tmp_path: Path) -> None:
    ca = Authority()
    own = Credentials(ca=ca.save(tmp_path), **ca.issue(*HERE).save(tmp_path))
    port = free_ports(1)[0]
    with served(port, own):
        words = r"requires a client certificate.*EDL_TLS_KEY; either all nodes of a job use TLS"
        with pytest.raises(SettingsError, match=words):
            served(port, own=False).__enter__()
        with served(port, own, own=False) as store:
            assert store.get("a") is None
    with served(port), pytest.raises(SettingsError, match="does not speak TLS"):
        served(port, own, own=False).__enter__()


def test_listening_openly_is_said(lines: Callable[[], list[str]]) -> None:
    port = free_ports(1)[0]
    at = RendezvousEndpoint(socket.gethostname(), port)
    with served_store(at, Credentials(), timeout_s=5.0, join_timeout_s=60.0) as store:
        store.put("a", b"1")
    assert len([line for line in lines() if "without TLS or tokens" in line]) == 1


# Of task 3 of `srun --nodes=3 --ntasks=5` on hosts with two tasks, two tasks and one.
TASK = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[003-004,7],login1",
    "SLURM_CPUS_ON_NODE": "8",
}


def step_of(**changes: str) -> SlurmStep:
    step = SlurmStep.of({**TASK, **changes})
    assert step is not None
    return step


def test_a_task_of_a_step() -> None:
    step = step_of(SLURM_RESTART_COUNT="2")
    assert (step.name, step.tasks, step.rank, step.tasks_here, step.hosts) == ("slurm-test-17.1", 5, 3, 2, 3)
    assert (step.cpus, step.workers, step.restarts) == (4, 1, 2)
    assert step.describe() == "Slurm job 17, requeued 2 times, step 1 of 5 tasks on 3 hosts"
    assert step_of(SLURM_NODEID="2").tasks_here == 1
    assert step_of(SLURM_CPUS_PER_TASK="3").cpus == 3


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NNODES": "2"},  # the batch script itself
        {**TASK, "SLURM_STEP_ID": str(0xFFFFFFFA)},  # the interactive step of salloc
        {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "4000"},  # srun --pty bash
    ],
)
def test_no_step(environ: dict[str, str]) -> None:
    assert SlurmStep.of(environ) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[003-004,7],login1", "gpu003"),
        ("login1,gpu[003-004]", "login1"),
        ("rack[1-2]node[08,10]-ib", "rack1node08-ib"),
        ("", ""),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert step_of(SLURM_STEP_NODELIST=hosts).first_host == first


def test_heterogeneous_hosts_are_unordered() -> None:
    """As `srun -w gpu7 : -w gpu3` sets it: host 0 is gpu7, and the list begins with gpu3."""
    hosts = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[3,7]"}
    first = step_of(SLURM_NODEID="1", SLURMD_NODENAME="gpu3", **hosts)
    second = step_of(SLURM_NODEID="0", SLURMD_NODENAME="gpu7", **hosts)
    found = [parse_options(["train.py"], step) for step in (first, second)]
    assert {options.rdzv_endpoint for options in found} == {"gpu3:29418"}
    assert [options.rdzv_conf for options in found] == ["is_host=1", "is_host=0"]


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({"SLURM_NODEID": "2", "SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_NODEID": "2", "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"SLURM_GPUS_ON_NODE": "4", "ROCR_VISIBLE_DEVICES": "2,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 1),
        ({"SLURM_GPUS_ON_NODE": "0", "CUDA_VISIBLE_DEVICES": ""}, 1),
    ],
)
def test_workers(changes: dict[str, str], workers: int) -> None:
    assert step_of(**changes).workers == workers


def test_tasks_that_share_gpus() -> None:
    step = step_of(SLURM_GPUS_ON_NODE="2", CUDA_VISIBLE_DEVICES="0,1")
    with pytest.raises(SettingsError, match=r"2 tasks .* share the 2 GPU.*--gpus-per-task"):
        parse_options(["train.py"], step)
    assert parse_options(["--nproc-per-node", "1", "train.py"], step).nproc_per_node == "1"


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ((), ("5", "1", "slurm-test-17.1")),
        (("--nnodes=1:5",), ("1:5", "1", "slurm-test-17.1")),
        (("--nproc-per-node", "cpu", "--rdzv-id", "mine"), ("5", "4", "mine")),
        (("--standalone",), ("1:1", "1", "none")),
    ],
)
def test_options_that_follow(argv: tuple[str, ...], found: tuple[str, str, str]) -> None:
    options = parse_options([*argv, "train.py", "--nnodes", "9"], step_of())
    assert (options.nnodes, options.nproc_per_node, options.rdzv_id) == found


def test_repeated_sigterm_does_not_hurry() -> None:
    with StopSignals(lambda: None, slurm=True) as signals:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.stopping
        assert not signals.urgent
        assert signals.number == signal.SIGUSR1
        assert signals.exit_code == 143
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.urgent, "a person at srun"


def meeting_of(*argv: str, **changes: str) -> tuple[str, str]:
    options = parse_options([*argv, "train.py"], step_of(**changes))
    return options.rdzv_endpoint, options.rdzv_conf


def test_several_hosts_meet_at_the_first() -> None:
    assert meeting_of() == ("gpu003:29418", "is_host=0")
    assert meeting_of("--rdzv-conf", "join_timeout=9", SLURM_NODEID="0") == ("gpu003:29418", "join_timeout=9,is_host=1")
    assert meeting_of(SLURM_STEP_NUM_NODES="1") == ("", ""), "a file will do"


def test_a_store_that_is_named_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (("--store", "consul://a"), ("--standalone",), ("--master-addr", "a"), ("--rdzv-endpoint", "a")):
        assert meeting_of(*argv)[0] == ("a" if argv[0] == "--rdzv-endpoint" else "")
    monkeypatch.setenv("EDL_DISCOVERY", "consul://a")
    assert meeting_of()[0] == ""


STEP = step_of(SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_TASK_PID="99")


def name_of(folder: Path, *, ends: bool, step: SlurmStep = STEP, command: str = "a", stored: bool = True) -> str:
    """The name of the next job, which comes to its end or not."""
    with TaskRuns(step, command, folder) as runs:
        if ends:
            runs.count(stored=stored)
        return replace(step, run=runs.ended).name


def test_requeued_task_begins_with_the_first(tmp_path: Path) -> None:
    assert name_of(tmp_path, ends=True) == "slurm-test-17.0"
    assert name_of(tmp_path, ends=True, step=replace(STEP, restarts=1, task_pid=7)) == "slurm-test-17.0"
    assert len({replace(STEP, run=run).rendezvous_port for run in range(3)}) == 3, "runs do not meet each other"


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    name_of(tmp_path, ends=True)
    held, hold = os.pipe()
    child = os.fork()
    if child == 0:
        with TaskRuns(STEP, "a", tmp_path):
            os.write(hold, b"x")
            signal.pause()
    try:
        assert os.read(held, 1) == b"x"
        with pytest.raises(SettingsError, match=r"running slurm-test-17\.0-2, .*--rdzv-id NAME.*--standalone"):
            name_of(tmp_path, ends=False)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert name_of(tmp_path, ends=False) == "slurm-test-17.0-2"


@pytest.mark.parametrize("kind", ["file", "dangling link", "link", "writable"])
def test_folder_of_others_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "edl-slurm-1000"
    if kind == "file":
        folder.touch()
    elif kind == "writable":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.symlink_to(tmp_path if kind == "link" else tmp_path / "missing", target_is_directory=True)
    with pytest.raises(SettingsError, match=r"edl-slurm-1000 .*remove .*--rdzv-id NAME"):
        name_of(folder, ends=False)


def test_unstored_job_is_tried_again(tmp_path: Path) -> None:
    assert name_of(tmp_path, ends=True, stored=False) == "slurm-test-17.0"
    assert name_of(tmp_path, ends=True, stored=False) == "slurm-test-17.0", "the same command"
    assert name_of(tmp_path, ends=False) == "slurm-test-17.0"
    assert name_of(tmp_path, ends=True) == "slurm-test-17.0", "it is stored now"
    assert name_of(tmp_path, ends=False) == "slurm-test-17.0-2"


def test_other_command_is_another_job(tmp_path: Path) -> None:
    assert name_of(tmp_path, ends=True, stored=False) == "slurm-test-17.0"
    assert name_of(tmp_path, ends=False, command="b") == "slurm-test-17.0-2", "the first one's end is not this one's"
    assert name_of(tmp_path, ends=True, command="b", stored=False) == "slurm-test-17.0-2", "it failed before"
    assert name_of(tmp_path, ends=True, command="c") == "slurm-test-17.0-3"
