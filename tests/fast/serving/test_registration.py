"""A teacher in discovery: the ready file, the reconciler, and `edl register`, which probes a server of another make."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from edl.discovery import Instance, Registry
from edl.errors import SettingsError
from edl.notifier import ReentrantEvent
from edl.settings import Credentials, LoadSettings
from edl_serving import cmd_register
from edl_serving.cmd_register import RegisterConfig, keep_registered, parse_endpoint
from edl_serving.registration.address import is_loopback, warn_of_loopback
from edl_serving.registration.probe import (
    ProbeStatus,
    ReadinessProbe,
    ReadinessTracker,
    RegistryAction,
    newest_version,
)
from edl_serving.registration.ready_file import ReadyFile
from edl_serving.registration.reconciler import InstanceReconciler
from edl_serving.registration.settings import RegistrationSettings
from edl_serving.registration.teacher import TeacherRegistration
from tests.certificates import Authority, put
from tests.fast.serving.conftest import TIMEOUT_S, StartInside
from tests.fast.serving.models import Base
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until


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


def test_a_registry_s_refusal_is_raised(url: str) -> None:
    with contextlib.closing(InstanceReconciler(url, 60.0)) as reconciler:
        reconciler.set_desired(Instance("not a name", "one", "127.0.0.1", 1))
        with pytest.raises(SettingsError, match="not a name"):
            reconciler.wait_until_current(TIMEOUT_S)


def test_two_teachers_of_one_id_are_told_so(registry: Registry, url: str, caplog: pytest.LogCaptureFixture) -> None:
    for port, warned in ((8500, False), (8501, True)):
        with registry.register(Instance("digits", "one", "127.0.0.1", 8500), 60.0):
            with contextlib.closing(InstanceReconciler(url, 60.0)) as reconciler:
                reconciler.set_desired(Instance("digits", "one", "127.0.0.1", port))
                assert reconciler.wait_until_current(TIMEOUT_S)
            assert ("give each an --id of its own" in caplog.text) is warned


def test_loopback_is_of_no_use_in_a_cluster(caplog: pytest.LogCaptureFixture) -> None:
    assert [is_loopback(host) for host in ("localhost", "[::1]", "10.0.0.1")] == [True, True, False]
    warn_of_loopback("sqlite:///d", "127.0.0.1", "--host ADDRESS")
    assert not caplog.text
    warn_of_loopback("etcd://e:2379,f:2379", "127.0.0.1", "--host ADDRESS")
    assert "only students on this host" in caplog.text


# `edl register`.


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("host:8001", ("host", 8001)),
        ("[::1]:8001", ("::1", 8001)),
        ("unix:/run/x.sock", ("unix:/run/x.sock", 0)),
        ("host", None),
        (":8001", None),
        ("host:0", None),
        ("host:65536", None),
        ("::1:8001", None),
        ("http://host:8001", None),
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
        (["localhost:1"], "name the model: --model NAME"),
        (["--model", "m"], "required: ENDPOINT"),
        (["localhost:1", "--model", "m", "--interval", "0s"], "--interval 0: expected more than nothing"),
        (["localhost:1", "--model", "m", "--priority", "high"], "--priority 'high': expected lowest, default, auto"),
        (["localhost:1", "--model", "m", "--intervall", "5s"], "unknown option '--intervall'; did you mean"),
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
    keep, enter, leave = RegistryAction.KEEP, RegistryAction.REGISTER, RegistryAction.DEREGISTER
    story = [
        *((silent, keep), (yes, enter), (silent, keep), (silent, keep), (yes, keep), (silent, keep), (silent, keep)),
        *((silent, leave), (silent, keep), (yes, enter), (no, leave), (silent, keep), (yes, enter)),
    ]
    assert [tracker.record_probe(answer) for answer, _ in story] == [turn for _, turn in story]
    assert [newest_version(all_) for all_ in (["9", "10", "old"], ["a", "b"], [])] == ["10", "b", ""]


@pytest.fixture
def registering(url: str, stack: contextlib.ExitStack) -> Callable[..., ReentrantEvent]:
    """Registers servers in threads, with options as on the command line."""

    def start(endpoint: str, **options: Any) -> ReentrantEvent:
        defaults = {"service": "s", "model": "m", "interval": 0.02, "timeout": TIMEOUT_S, "ttl": 300.0}
        config = RegisterConfig.of(endpoint, {"store": url, **defaults, **options})
        ended = ReentrantEvent()
        thread = threading.Thread(target=keep_registered, args=(config, ended))
        thread.start()
        stack.callback(thread.join, TIMEOUT_S)
        stack.callback(ended.set)
        return ended

    return start


def test_a_server_enters_leaves_and_returns(
    inside: StartInside,
    registering: Callable[..., ReentrantEvent],
    registry: Registry,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As its readiness and the connection to it come and go; a probe that is never answered counts as none."""

    class Faulty(Base):
        fault = ""

        def find_fault(self) -> str:
            return self.fault

    model, ready = Faulty(), tmp_path / "ready"
    server = inside(model)
    proxy = TcpProxy("127.0.0.1", server.port)
    endpoint = f"127.0.0.1:{proxy.port}"
    options = {"capacity": 2.5, "tag": ["gpu"], "meta": {"rack": "r7"}, "priority": "lowest", "id": "t1"}
    options |= {"ready_file": str(ready), "advertise": "teachers.example:8001", "failures": 2, "timeout": 0.5}

    def wait_for(count: int) -> Any:
        return wait_until(lambda: len(found := registry.snapshot("s").instances) == count and (found or True))

    registering(endpoint, **options)
    (instance,) = wait_for(1)
    assert (instance.endpoint, instance.id, instance.model) == ("teachers.example:8001", "t1", "m")
    assert (instance.capacity, instance.tags) == (2.5, ("gpu",))
    assert instance.meta == {"rack": "r7", "version": "1", "priority": "lowest"}
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("token", "no token: this teacher takes"),
        ("CA", "signed by no CA in"),
        ("nothing", "speaks TLS, and this side"),
        ("model", "its model 'other' is not"),
    ],
)
def test_probes_say_what_is_wrong(inside: StartInside, tmp_path: Path, wrong: str, words: str) -> None:
    ca, secret = Authority(), "token-of-a-test-0123456789"
    token = put(tmp_path / "token", secret)
    server = inside(Base(), credentials=Credentials(token_file=token, **ca.issue().save(tmp_path)))
    trusted = (Authority() if wrong == "CA" else ca).save(tmp_path)
    told = {} if wrong == "nothing" else {"ca": trusted} | ({} if wrong == "token" else {"token_file": token})
    model = "other" if wrong == "model" else "m"
    with contextlib.closing(ReadinessProbe(server.target, model, TIMEOUT_S, Credentials(**told))) as probe:
        result = wait_until(lambda: (found := probe.probe()).status is not ProbeStatus.READY and found)
    assert words in result.reason
    assert secret not in result.reason
