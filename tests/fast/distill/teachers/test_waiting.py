"""What students wait for, and what fails at once: permanent mistakes, each with what was meant."""

from __future__ import annotations

import itertools
import logging
import traceback
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edl.cli import main
from edl.cli.label import parser, plan_of
from edl.collective.agent.health.failures import ExitCause, find_exit_cause
from edl.discovery import Registry, Snapshot
from edl.distill import DistillReader, Options, Teachers
from edl.distill.loader import resolve_teachers
from edl.distill.teachers import TeacherWatcher, teachers_from_env
from edl.errors import NoTeacherError, SettingsError
from edl.protocol.transport import grpc
from tests.fast.distill.conftest import instance_of
from tests.fast.distill.reading import check, samples
from tests.fast.distill.teachers.foreign import ForeignServer
from tests.waiting import wait_until

PATIENT = Options(teacher_timeout_s=60)


def reader_of(teachers: Any, output: str = "y") -> DistillReader:
    made = DistillReader(["x", None], [output], teachers=teachers, teacher_batch_size=4, options=PATIENT)
    return made.set_sample_generator(samples(8))


@pytest.mark.parametrize("name", ["host:port", "10.0.0.7:8500", "my digits", "digits/2", "-digits", "d" * 129])
def test_impossible_services_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = r"Give addresses \(host:port\) as Teachers\(endpoints" if ":" in name else "1 to 128 letters"
    with pytest.raises(SettingsError, match=words):
        Teachers(name)
    with pytest.raises(SettingsError, match=words):
        DistillReader(["x"], ["y"]).set_dynamic_teacher(None, name)
    monkeypatch.setenv("EDL_SERVICE", name)
    with pytest.raises(SettingsError, match=words):
        teachers_from_env()
    label = ["label", "x.npy", "--inputs", "x", "--outputs", "y", "--output", str(tmp_path / "labels")]
    for command in (label, ["teachers", "--discovery", f"sqlite:///{tmp_path}/none", "--", name]):
        assert main(command) == 2
        assert f"service {name!r}: a " in capsys.readouterr().err


def test_what_goes_with_a_service_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The URL of a list of one service; the options of `edl label` where the environment names the service."""
    assert resolve_teachers(["digits"], "sqlite:///x") == [Teachers("digits", discovery="sqlite:///x")]
    assert resolve_teachers(["small", Teachers("large")]) == [Teachers("small"), Teachers("large")], "an ensemble"
    with pytest.raises(SettingsError, match="'b:2' is an address, but others are services"):
        resolve_teachers(["small", "b:2"])
    assert resolve_teachers(["a:1", "", "b:2"]) == [Teachers(endpoints=("a:1", "b:2"))], "two teachers of one model"
    monkeypatch.setenv("EDL_SERVICE", "digits")
    told = ["x.npy", "--inputs", "x", "--outputs", "y", "--output", "z", "--model", "m", "--discovery", "sqlite:///x"]
    plan = plan_of(parser().parse_args(told))
    assert plan.teachers == Teachers("digits", discovery="sqlite:///x", model="m")


UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'triton-grpc-protocol-k'")
DENIED = (grpc.StatusCode.PERMISSION_DENIED, "RBAC")
UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, "no token")


@pytest.mark.parametrize(
    ("server", "asked", "words"),
    [
        ({"output": "logits"}, {"output": "logit"}, "has no output 'logit', only logits; did you mean 'logits'"),
        ({"model": "digits"}, {"model": "digts"}, "has no model 'digts', only digits; did you mean 'digits'"),
        (
            {"refused": {"ModelReady": (grpc.StatusCode.NOT_FOUND, "no model"), "RepositoryIndex": DENIED}},
            {"model": "digts"},
            "no model",
        ),
        ({"others": ["n"]}, {}, "serves m, n: name one"),
        ({"left_out": ["RepositoryIndex"]}, {}, r"not implement RepositoryIndex: name the model, Teachers\(model"),
        ({"refused": {"RepositoryIndex": DENIED}}, {}, r"RBAC \(RepositoryIndex\): name the model"),
        ({"refused": {"RepositoryIndex": UNAVAILABLE}}, {}, r"restricted.*\(RepositoryIndex\): name the model"),
        ({"refused": {"RepositoryIndex": UNAUTHENTICATED}}, {}, "EDL_TOKEN_FILE.*: name the model"),
        ({"refused": {"ServerReady": UNAUTHENTICATED}}, {}, r"UNAUTHENTICATED.*EDL_TOKEN_FILE"),
        ({"left_out": ["ModelMetadata"]}, {}, "does not implement ModelMetadata"),
    ],
)
def test_what_all_teachers_lack_fails_at_once(server: dict[str, Any], asked: dict[str, str], words: str) -> None:
    with ForeignServer(**server) as one, ForeignServer(**server) as two:
        teachers = Teachers(endpoints=(one.endpoint, two.endpoint), model=asked.get("model", ""))
        with (
            reader_of(teachers, asked.get("output", "y")) as reader,
            pytest.raises(SettingsError, match=words) as found,
        ):
            list(reader())
    assert one.endpoint in str(found.value)


def test_a_teacher_may_still_come(caplog: pytest.LogCaptureFixture) -> None:
    """One of two lacks the output, and the other is away. What was served once is waited for when it is gone."""
    with ForeignServer() as later:
        pass
    with ForeignServer(output="z") as other, reader_of([other.endpoint, later.endpoint]) as reader:
        epoch = reader()

        def reasons() -> list[str]:
            return [teacher.why for teacher in reader.stats().teachers.values()]

        wait_until(lambda: len(reasons()) == 2 and all(reasons()))
        with ForeignServer(port=later.port):
            check(list(epoch), 8)
        epoch = reader()
        wait_until(lambda: not reader.stats().teachers_live)
        with ForeignServer(port=later.port, output="z"):
            wait_until(lambda: all("no output 'y'" in why for why in reasons()))
        with ForeignServer(port=later.port):
            check(list(epoch), 8)
    assert all(record.exc_info is None for record in caplog.records)


def test_hidden_teachers_are_known_of(registry: Registry, url: str) -> None:
    """With `max_teachers`, those that are left to other students may have what this one asks for."""
    seen: list[tuple[Snapshot, str, bool]] = []
    with registry.register(instance_of("127.0.0.1:9", "s", "one"), ttl_s=600):
        for others, whole in ((0, True), (1, False)):
            with ExitStack() as stack:
                if others:
                    stack.enter_context(registry.register(instance_of("127.0.0.1:9", "s", "two"), ttl_s=600))
                teachers = Teachers("s", discovery=url, max_teachers=1)
                stack.enter_context(closing(TeacherWatcher(teachers, lambda *found: seen.append(found))))
                wait_until(lambda whole=whole: seen and len(seen[-1][0].instances) == 1 and seen[-1][2] == whole)


def test_near_service_is_named(registry: Registry, url: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is waited for all the same: `digits-2` may be about to start while `digits` runs."""
    near = "; did you mean 'digits'?"
    seen: list[tuple[Snapshot, str, bool]] = []
    with registry.register(instance_of("127.0.0.1:9", "digits"), ttl_s=600):
        watcher = TeacherWatcher(Teachers("digts", discovery=url), lambda *found: seen.append(found))
        with closing(watcher):
            wait_until(lambda: seen and seen[-1][1] == near)
            with registry.register(instance_of("127.0.0.1:9", "digts"), ttl_s=600):
                wait_until(lambda: seen[-1][0].instances)
                assert not seen[-1][1]
            wait_until(lambda: not seen[-1][0].instances)
            assert not seen[-1][1], "it was there, and may come back"
        assert sum(near in text for text in caplog.messages) == 1
        reader = DistillReader(["x", None], ["y"], options=Options(teacher_timeout_s=0.5))
        reader.set_dynamic_teacher(url, "digts").set_sample_generator(samples(1))
        with reader, pytest.raises(NoTeacherError, match="none is registered; did you mean 'digits'") as raised:
            list(reader())
        text = "".join(traceback.format_exception(raised.value))
        assert find_exit_cause(1, text) is ExitCause.NO_TEACHER, "`edl run` knows it by these words"


def test_each_address_of_a_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fixed endpoints: a DNS name may have several addresses, and others later."""
    monkeypatch.setattr("edl.distill.teachers._RESOLVE_S", 0.001)
    known: dict[str, list[str]] = {"pods": ["10.0.0.1", "fd00::2"]}
    seen: list[tuple[set[str], str]] = []

    def resolve(host: str) -> list[str]:
        if host not in known:
            raise OSError("no such name")
        return known[host]

    def await_endpoints(*endpoints: str, stale: str = "") -> None:
        wait_until(lambda: seen and seen[-1] == ({*endpoints, "10.0.0.9:8500"}, stale))

    def changed(snapshot: Snapshot, *_: Any) -> None:
        seen.append(({each.endpoint for each in snapshot.instances}, snapshot.stale))

    with closing(TeacherWatcher(Teachers(endpoints=("pods:8500", "10.0.0.9:8500")), changed, resolve)):
        await_endpoints("10.0.0.1:8500", "[fd00::2]:8500")
        known["pods"] = ["10.0.0.1", "10.0.0.3"]
        await_endpoints("10.0.0.1:8500", "10.0.0.3:8500")
        del known["pods"]
        await_endpoints("10.0.0.1:8500", "10.0.0.3:8500", stale="the name 'pods' cannot be resolved: no such name")
        known["pods"] = ["10.0.0.4"]
        await_endpoints("pods:8500")


def test_a_failing_registry_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = itertools.count()

    def watch(service: str) -> None:
        next(tries)
        raise ValueError("odd")

    fake = SimpleNamespace(watch=watch, close=lambda: None)
    monkeypatch.setattr("edl.distill.teachers.open_registry", lambda url: fake)
    monkeypatch.setattr("edl.distill.teachers._RETRY_S", 0.001)
    seen: list[Snapshot] = []
    with (
        caplog.at_level(logging.INFO),
        closing(TeacherWatcher(Teachers("s", discovery="sqlite:///x"), lambda snapshot, *_: seen.append(snapshot))),
    ):
        wait_until(lambda: len(seen) > 5)
    assert seen[-1].stale == "ValueError: odd"
    assert sum(record.exc_info is not None for record in caplog.records) == 1
