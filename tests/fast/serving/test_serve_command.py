"""`edl serve` and `edl register`: discovery, draining, how they end, and what they say; and `LocalTeacher`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from edl.cli import main
from edl.discovery import Instance, Registry, open_registry
from edl.errors import EDLError, SettingsError
from edl.protocol import names
from edl.protocol.transport import grpc
from edl.settings import Credentials, LoadSettings
from edl.testing import LocalTeacher
from edl_serving import cmd_register, cmd_serve
from edl_serving.cmd_register import RegisterConfig, keep_registered, newest_version, parse_endpoint
from edl_serving.registration import (
    InstanceReconciler,
    ProbeStatus,
    ReadinessTracker,
    ReadyFile,
    RegistrationSettings,
    TeacherRegistration,
    warn_of_loopback,
)
from tests.certificates import Authority, put
from tests.fast.serving.conftest import TIMEOUT_S, Client, StartInside, outputs_of
from tests.fast.serving.fakes import Base
from tests.fast.serving.test_monitoring import ask
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

X = np.arange(8, dtype=np.float32).reshape(2, 4)
ECHO = ["--factory", "edl.testing.models:echo"]
LONG = {"ttl": "5m"}
"""Of a lease: on a busy machine a teacher may get no turn for some seconds."""


def instances(url: str, service: str) -> tuple[Instance, ...]:
    with open_registry(url) as registry:
        return registry.snapshot(service).instances


def page(teacher: LocalTeacher, path: str) -> tuple[int, str]:
    return ask(teacher.metrics_port, path)


@contextlib.contextmanager
def being_computed(teacher: LocalTeacher) -> Iterator[Any]:
    """A request that the teacher is busy with, a future."""
    with contextlib.closing(Client(teacher.endpoint)) as client:
        call = client.start(X)
        wait_until(lambda: 'edl_teacher_in_flight{model="m"} 1.0' in page(teacher, "/metrics")[1])
        yield call


def test_sigterm_drains_and_leaves(url: str, tmp_path: Path) -> None:
    serve = {"metrics-port": 0, "tag": ["a", "b"], "meta": {"rack": "r7"}, "capacity": 2, "model-version": "v9", **LONG}
    serve |= {"linger": "10ms", "drain-timeout": "60s"}
    gate, model = tmp_path / "gate", "tests.fast.serving.fakes:gated_echo"
    with LocalTeacher(model, service="s", discovery=url, serve=serve, gate=str(gate)) as teacher:
        (instance,) = instances(url, "s")
        assert instance.endpoint == teacher.endpoint
        assert (instance.model, instance.capacity, instance.state, instance.tags) == ("m", 2.0, "ready", ("a", "b"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert instance.meta == {"rack": "r7", "version": "v9", "pid": str(teacher.pid), "boot": boot}
        assert re.search(r"registered as s/\S+ at sqlite:", teacher.log)
        ready = 200, "[+]discovery ok\n[+]model ok\nreadyz check passed\n"
        assert page(teacher, "/readyz") == ready
        with being_computed(teacher) as call:
            teacher.terminate()
            wait_until(lambda: [one.state for one in instances(url, "s")] == ["draining"])
            wait_until(lambda: "[-]model failed: draining" in page(teacher, "/readyz")[1])
            assert page(teacher, "/readyz")[0] == 503
            assert page(teacher, "/livez")[0] == 200, "a teacher that drains is not to be killed"
            gate.touch()
            np.testing.assert_array_equal(outputs_of(call.result())["y"], X)
        assert teacher.wait() == 0
        assert instances(url, "s") == ()


def test_a_second_sigterm_ends_at_once() -> None:
    serve = {"metrics-port": 0, "drain-timeout": "1h"}
    with LocalTeacher("echo", delay_s=3600, serve=serve) as teacher, being_computed(teacher) as call:
        teacher.terminate()
        wait_until(lambda: "a second signal ends the process at once" in teacher.log)
        teacher.terminate()
        assert teacher.wait() == -signal.SIGTERM
        assert call.exception().code() is grpc.StatusCode.UNAVAILABLE


def test_too_long_drain_exits_1() -> None:
    with LocalTeacher("echo", delay_s=3600, serve={"drain-timeout": "500ms", "metrics-port": 0}) as teacher:
        with being_computed(teacher) as call:
            teacher.terminate()
            assert teacher.wait() == 1
            assert call.exception().code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert "requests were left unanswered" in teacher.log


MODEL = """
    def double(inputs):
        return {"y": inputs["x"] * 2}

    def nested(inputs):
        return {"y": inputs}

    def breaks(inputs):
        return int("not a number")

    class Broken:
        def __init__(self):
            raise RuntimeError("the weights are gone")

    class Cold:
        inputs, outputs = ["x:float32[4]"], ["y:float32[4]"]

        def __call__(self, inputs):
            return inputs

        def warm_up(self, max_rows):
            raise RuntimeError("too cold")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with models in it."""
    (tmp_path / "teacher.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "module.py").write_text("import torch\n\nnet = torch.nn.Linear(4, 2)\ndef build(): return net\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the current folder is added to it
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--callable", "teacher.py:double"], "the model's inputs are unknown"),
        ([*ECHO, "--port", "{taken}"], "listen on 127.0.0.1:{taken}: Address already in use; use another --port"),
        ([*ECHO, "--host", "192.0.2.1"], "no such address; give --host 127.0.0.1 for"),
        (["--callable", "module.py:net", "--input", "x:float32[4]"], "give --torch-factory a function that returns it"),
        ([*ECHO, "--metrics-port", "{taken}"], "metrics cannot listen on 127.0.0.1:{taken}"),
        ([*ECHO, "--ready-file", "no/such/folder"], "--ready-file: no such folder"),
        ([*ECHO, "--exit-with", "{gone}"], "there is no such process"),
        ([*ECHO, "--discovery", "sqlite:///proc/x"], "/proc/x"),
    ],
)
def test_what_the_user_got_wrong_is_named(
    arguments: list[str], words: str, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDL_DISCOVERY", url)
    gone = subprocess.Popen(["true"])
    gone.wait()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        known = {"taken": listener.getsockname()[1], "gone": gone.pid, "folder": folder}
        with pytest.raises(SettingsError, match=re.escape(words.format(**known))):
            cmd_serve.main(["--model", "m", *(argument.format(**known) for argument in arguments)])
    assert (folder / "teacher.py").is_file()


NET = ["--torch-factory", "module.py:build", "--device", "cpu", "--input", "x:float32[5]"]


@pytest.mark.parametrize(
    ("source", "words", "last"),
    [
        (["--factory", "teacher.py:Broken"], "RuntimeError: the weights are gone", ""),
        (["--factory", "teacher.py:Cold"], "RuntimeError: too cold", ""),
        (
            ["--callable", "teacher.py:breaks", "--input", "x:float32[4]", "--output", "y:float32[4]"],
            "in breaks",
            "edl serve: it was called with a dictionary of arrays by input, zeros of the types and sizes of --input "
            "'x:float32[4]'",
        ),
        (
            ["--callable", "teacher.py:breaks", "--sample", "sample.npz"],
            "ValueError: invalid literal",
            "edl serve: it was called with a dictionary of arrays by input, the batch in --sample 'sample.npz'",
        ),
        (
            ["--callable", "teacher.py:nested", "--input", "x:float32[4]", "--output", "y:float32[4]"],
            "",
            "edl serve: the model was called with a dictionary of arrays by input, zeros of the types and sizes of "
            "--input 'x:float32[4]', and failed: TypeError: output 'y' is a dict, not an array: write, for example, "
            "return {'y': inputs['x']}",
        ),
        *(  # found by calling it, or called to warm up
            (
                [*NET, *output],
                "",
                "edl serve: the model was called with zeros of the types and sizes of --input 'x:float32[5]', and "
                "failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
            )
            for output in ([], ["--output", "y:float32[2]"])
        ),
    ],
)
def test_breaking_model_shows_its_stack(
    source: list[str], words: str, last: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(folder / "sample.npz", x=np.zeros((2, 5), np.float32))
    assert main(["serve", "--model", "m", *source, "--discovery", "none"]) == 3
    said = capsys.readouterr().err
    assert words in said
    if last:
        assert said.splitlines()[-1].startswith(last)
    if words:
        stack = said[said.index("Traceback") :]
        assert "teacher.py" in stack
        assert "edl_serving" not in stack
        assert stack.count("Traceback") == 1
    else:
        assert "Traceback" not in said


# LocalTeacher.
MARK = {"tag": f"edl-mark-{os.getpid()}-"}  # of this process: 12 is not to find those of 123


@pytest.fixture
def processes() -> Iterator[Callable[[], list[int]]]:
    """Process ids of teachers that run."""

    def running() -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdecimal() and MARK["tag"].encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found

    yield running
    for pid in running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_teacher_is_paused_killed_and_let_go(processes: Callable[[], list[int]]) -> None:
    teacher = LocalTeacher("echo", serve=MARK)
    with contextlib.closing(Client(teacher.endpoint)) as client:
        teacher.pause()
        call = client.start(X)
        teacher.resume()
        np.testing.assert_array_equal(outputs_of(call.result())["y"], X)
    teacher.kill()
    assert teacher.returncode == -signal.SIGKILL
    assert not teacher.is_alive()
    teacher.close()
    assert "is served on" in teacher.log
    another = LocalTeacher("echo", serve=MARK, wait=False)
    another.pause()
    assert processes() == [another.pid]
    del another
    assert processes() == []


PARENT = """
import sys, threading
from edl.testing import LocalTeacher
teachers = [LocalTeacher("echo", serve={"tag": sys.argv[1]}, wait=False) for _ in range(2)]
for teacher in teachers:
    teacher.wait_ready()
teachers[0].pause()
print("up", flush=True)
threading.Event().wait()
"""


def test_killed_parent_takes_teachers_along(processes: Callable[[], list[int]]) -> None:
    """Paused or not."""
    # `-c` carries the mark in its own arguments too, so it counts as one of three.
    with subprocess.Popen([sys.executable, "-c", PARENT, MARK["tag"]], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        assert len(processes()) == 3
        parent.kill()
        left = list(Path(tempfile.gettempdir()).glob(f"edl-teacher-{parent.pid}-*"))
    wait_until(lambda: processes() == [])
    assert left == []


def test_teacher_that_cannot_start_says_why(processes: Callable[[], list[int]]) -> None:
    with pytest.raises(EDLError, match=r"ended with code 2 before it was ready:(.|\n)*no 'nonesuch'"):
        LocalTeacher("nonesuch", serve=MARK)
    with pytest.raises(EDLError, match="not ready within"):
        LocalTeacher("echo", serve=MARK, timeout_s=0.05)
    assert processes() == []


# Registration, and `edl register`.


@pytest.mark.parametrize("end", ["unhealthy", "draining"])
def test_late_registration_writes_no_file(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A registry that answers late shows an instance of a teacher that is not ready any more."""
    asked, answered = SimpleQueue[Instance | None](), threading.Event()
    publish = InstanceReconciler._publish

    def publish_late(reconciler: InstanceReconciler, desired: Instance | None) -> None:
        asked.put(desired)
        assert answered.wait(TIMEOUT_S)
        publish(reconciler, desired)

    monkeypatch.setattr(InstanceReconciler, "_publish", publish_late)
    settings = RegistrationSettings("s", url, load=LoadSettings(publish=False))
    path = tmp_path / "ready"
    with ReadyFile(str(path)) as file, TeacherRegistration(settings, "127.0.0.1", 0.0, file) as registration:
        registration._instance = instance = settings.instance("127.0.0.1", 1, "m", {})
        reconciler = registration._reconciler
        assert reconciler is not None
        reconciler.set_desired(instance)
        assert asked.get(timeout=TIMEOUT_S) == instance
        if end == "unhealthy":
            registration._on_health_change(False)
        else:
            registration.start_draining()
        answered.set()
        assert asked.get(timeout=TIMEOUT_S) != instance, "the next change comes when the first one is done"
        assert not path.exists(), "it says that the teacher is ready"
        if end == "unhealthy":
            registration._on_health_change(True)
            assert asked.get(timeout=TIMEOUT_S) == instance
            assert reconciler.wait_until_current(TIMEOUT_S)
            assert path.exists()


def test_two_teachers_of_one_id_are_told_so(registry: Registry, url: str, caplog: pytest.LogCaptureFixture) -> None:
    for port, warned in ((8500, False), (8501, True)):
        with registry.register(Instance("digits", "one", "127.0.0.1", 8500), 60.0):
            with contextlib.closing(InstanceReconciler(url, 60.0)) as reconciler:
                reconciler.set_desired(Instance("digits", "one", "127.0.0.1", port))
                assert reconciler.wait_until_current(TIMEOUT_S)
            assert ("give each teacher its own --id" in caplog.text) is warned


def test_loopback_is_of_no_use_in_a_cluster(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_loopback("sqlite:///d", "127.0.0.1", "--host ADDRESS")
    warn_of_loopback("etcd://e:2379,f:2379", "10.0.0.1", "--host ADDRESS")
    assert not caplog.text
    warn_of_loopback("etcd://e:2379,f:2379", "::1", "--host ADDRESS")
    assert "only students on this host" in caplog.text


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("host:8001", ("host", 8001)),
        ("[::1]:8001", ("::1", 8001)),
        ("unix:/run/x.sock", ("unix:/run/x.sock", 0)),
        ("host", None),
        ("host:0", None),
        ("::1:8001", None),
        ("unix:relative", None),
    ],
)
def test_endpoints(text: str, parsed: tuple[str, int] | None) -> None:
    if parsed is not None:
        assert parse_endpoint("ENDPOINT", text) == parsed
    else:
        with pytest.raises(SettingsError, match="expected host:port"):
            parse_endpoint("ENDPOINT", text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["localhost:99999", "--model", "m"], "ENDPOINT 'localhost:99999'"),
        (["localhost:1"], "name the service: --service NAME"),
        (["localhost:1", "--model", "m", "--interval", "0s"], "--interval 0: expected a value above 0"),
        (["localhost:1", "--model", "m", "--priority", "high"], "--priority 'high': expected lowest, default, auto"),
        (["localhost:1", "--model", "m", "--service", "a b"], "service 'a b'"),
        (["localhost:1", "--model", "m", "--store", "none"], "--store none"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        cmd_register.main(arguments)


def test_silence_counts_and_a_no_is_final() -> None:
    tracker = ReadinessTracker(failures=3)
    silent, yes, no = ProbeStatus.NO_ANSWER, ProbeStatus.READY, ProbeStatus.NOT_READY
    story = [
        *((silent, False), (yes, True), (silent, True), (silent, True), (yes, True), (silent, True), (silent, True)),
        *((silent, False), (silent, False), (yes, True), (no, False), (silent, False), (yes, True)),
    ]
    assert [tracker.record_probe(answer) for answer, _ in story] == [turn for _, turn in story]
    assert [newest_version(all_) for all_ in (["9", "10", "old"], ["a", "b"], [])] == ["10", "b", ""]


@pytest.fixture
def registering(url: str, stack: contextlib.ExitStack) -> Callable[..., threading.Event]:
    """Registers servers in threads, with options as on the command line."""

    def start(endpoint: str, **options: Any) -> threading.Event:
        defaults = {"service": "s", "model": "m", "interval": 0.02, "timeout": TIMEOUT_S, "ttl": 300.0}
        config = RegisterConfig.of(endpoint, {"store": url, **defaults, **options})
        ended = threading.Event()
        thread = threading.Thread(target=keep_registered, args=(config, ended))
        thread.start()
        stack.callback(thread.join, TIMEOUT_S)
        stack.callback(ended.set)
        return ended

    return start


def test_a_server_enters_leaves_and_returns(
    inside: StartInside,
    registering: Callable[..., threading.Event],
    registry: Registry,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As its readiness and the connection to it come and go; a probe that is never answered counts as none."""

    class Faulty(Base):
        fault = ""

        def find_fault(self) -> str:
            return self.fault

    ca, model, ready = Authority(), Faulty(), tmp_path / "ready"
    token = put(tmp_path / "token", "token-of-a-test-0123456789")
    server = inside(model, credentials=Credentials(token_file=token, **ca.issue().save(tmp_path)))
    proxy = TcpProxy("127.0.0.1", server.port)
    endpoint = f"127.0.0.1:{proxy.port}"
    options = {"capacity": 2.5, "tag": ["gpu"], "meta": {"rack": "r7"}, "priority": "lowest", "id": "t1"}
    options |= {"ready_file": str(ready), "advertise": "teachers.example:8001", "failures": 2, "timeout": 0.5}
    options |= {"tls_ca": ca.save(tmp_path), "token_file": token}

    def wait_for(count: int) -> Any:
        return wait_until(lambda: len(found := registry.snapshot("s").instances) == count and (found or True))

    registering(endpoint, **options)
    (instance,) = wait_for(1)
    assert (instance.endpoint, instance.id, instance.model) == ("teachers.example:8001", "t1", "m")
    assert (instance.capacity, instance.tags) == (2.5, ("gpu",))
    assert instance.meta == {"rack": "r7", "version": "1", "priority": "lowest", names.TLS_META: "1"}
    wait_until(ready.exists)
    proxy.silent = True
    wait_for(0)
    wait_until(lambda: not ready.exists())
    proxy.silent = False
    proxy.cut()  # what was lost in between would be missing from the connection for ever
    assert wait_for(1) == (instance,)
    model.fault = "the engine is away"
    wait_for(0)
    assert "its model 'm' is not" in caplog.text or "says that it is not ready" in caplog.text
    model.fault = ""
    wait_for(1)
    assert "out of discovery until it is ready again" in caplog.text
    proxy.close()


def test_sigterm_takes_the_server_out(inside: StartInside, registry: Registry, url: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "edl", "register", inside(Base()).target, "--model", "m", "--discovery", url]
    options = ["--ttl", "5m", "--ready-file", str(ready), "--exit-with", str(os.getpid())]
    with subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL) as process:
        try:
            wait_until(ready.exists)
            assert len(registry.snapshot("m").instances) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
            assert registry.snapshot("m").instances == ()
            assert not ready.exists()
        finally:
            process.kill()
