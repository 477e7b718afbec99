"""Resources of a job are written all or not at all, unless answers are lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import pytest

from edl.cli import main
from edl.cli.kube.logs import FINAL_PHASES, PhaseObserver
from edl.cli.kube.manifests import LocalScript, make_submission
from edl.cli.kube.submit import create_all, parse_options
from edl.cli.kube.workloads import Target
from edl.errors import ConflictError, InvalidObjectError, KubernetesError
from edl.kube.client import KubeClient
from edl.kube.objects import Object, ObjectList
from edl.kube.resource_types import ResourceType

LOST = KubernetesError("no answer in 10 s: whether a change was made is not known")


class FakeApi:
    """Keeps objects, and fails as it is told.

    Attributes:
        objects: by kind and name.
        before: raised by `create` of a kind, which makes nothing.
        after: raised by `create` of a kind, which makes the object.
    """

    def __init__(self) -> None:
        self.namespace = "n"
        self.objects: dict[tuple[str, str], Object] = {}
        self.before: dict[str, BaseException] = {}
        self.after: dict[str, BaseException] = {}

    def names(self) -> list[str]:
        return [f"{kind}/{name}" for kind, name in self.objects]

    def create(self, kind: ResourceType, manifest: Object, namespace: str) -> Object:
        key = kind.kind, manifest["metadata"]["name"]
        if kind.kind in self.before:
            raise self.before[kind.kind]
        if key in self.objects:
            raise ConflictError("there")
        metadata = {**manifest["metadata"], "uid": f"uid-{len(self.objects)}", "namespace": namespace}
        self.objects[key] = {**manifest, "metadata": metadata}
        if kind.kind in self.after:
            raise self.after[kind.kind]
        return self.objects[key]

    def get(self, kind: ResourceType, name: str, namespace: str | None = None) -> Object | None:
        return self.objects.get((kind.kind, name))

    def list(self, kind: ResourceType) -> ObjectList:
        return ObjectList([item for (each, _), item in self.objects.items() if each == kind.kind], "1")

    def patch(self, kind: ResourceType, name: str, patch: Object, namespace: str | None = None) -> Object | None:
        found = self.objects.get((kind.kind, name))
        if found is not None:
            for part, fields in patch.items():
                found[part] = {**found.get(part, {}), **fields}
        return found

    def delete(self, kind: ResourceType, name: str, namespace: str | None = None, *, uid: str = "") -> bool:
        found = self.objects.get((kind.kind, name))
        if found is None or found["metadata"]["uid"] != uid:
            return False
        if "delete" in self.before:
            raise self.before["delete"]
        del self.objects[kind.kind, name]
        return True


def manifests(content: bytes = b"") -> list[dict[str, Any]]:
    return make_submission(parse_options(["--name", "a", "--image", "i", "t.py"]), LocalScript("t.py", "t.py", content))


def submit(api: FakeApi, tell: Callable[[str], None] = lambda _: None) -> list[Object]:
    return create_all(cast(KubeClient, api), manifests(), "n", tell)


SCRIPT = manifests()[0]["metadata"]["name"]
BOTH = [f"ConfigMap/{SCRIPT}", "ElasticJob/a"]


def test_doubtful_job_keeps_its_script() -> None:
    api = FakeApi()
    api.after["ElasticJob"] = LOST
    with pytest.raises(KubernetesError, match=f"job/a may have been created, configmap/{SCRIPT} exists: `edl delete`"):
        submit(api)
    assert api.names() == BOTH


def test_job_owns_its_script() -> None:
    api = FakeApi()
    made = submit(api)
    assert api.names() == BOTH
    (owner,) = api.objects["ConfigMap", SCRIPT]["metadata"]["ownerReferences"]
    assert owner["uid"] == made[1]["metadata"]["uid"]


def test_refused_job_leaves_nothing() -> None:
    api = FakeApi()
    api.before["ElasticJob"] = InvalidObjectError("no")
    with pytest.raises(InvalidObjectError):
        submit(api)
    assert api.names() == []


def test_refusal_is_raised_though_deleting_fails() -> None:
    api, notes = FakeApi(), list[str]()
    api.before |= {"ElasticJob": InvalidObjectError("no"), "delete": LOST}
    with pytest.raises(InvalidObjectError):
        submit(api, notes.append)
    assert "could not be removed again" in notes[-1]


def test_job_of_the_same_name_is_not_ours() -> None:
    api = FakeApi()
    other = {"metadata": {"name": "a", "uid": "other", "namespace": "n"}}
    api.objects["ElasticJob", "a"] = other
    with pytest.raises(ConflictError):
        submit(api)
    assert api.objects == {("ElasticJob", "a"): other}


def test_deleted_jobs_script_is_no_obstacle() -> None:
    """The garbage collector deletes a script some time after its job, which may be submitted again meanwhile."""
    api = FakeApi()
    submit(api)
    before = api.objects["ConfigMap", SCRIPT]["metadata"]["uid"]
    del api.objects["ElasticJob", "a"]
    api.objects["ConfigMap", "b"] = {"metadata": {"name": "b", "uid": "b"}}  # so that uids differ
    submit(api)
    assert api.objects["ConfigMap", SCRIPT]["metadata"]["uid"] != before
    del api.objects["ElasticJob", "a"]
    api.objects["ConfigMap", SCRIPT]["metadata"]["ownerReferences"] = [{"kind": "Deployment", "name": "a", "uid": "d"}]
    with pytest.raises(ConflictError, match="another program"):
        submit(api)


def read_env(job: Object) -> Any:
    return job["spec"]["template"]["spec"]["containers"][0]["env"]


@pytest.mark.parametrize(
    ("teachers", "options", "service"),
    [
        ("digits", [], "digits"),
        ("big", [], "digits"),
        ("plain", [], "plain"),
        ("digits", ["--env", "EDL_SERVICE=mine"], "mine"),
        ("digit", [], ""),
    ],
)
def test_pool_is_found_by_its_service(
    teachers: str, options: list[str], service: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A pool may serve under another name than its own: students ask for that."""
    api = FakeApi()
    for pool, spec in (("big", {"service": "digits"}), ("second", {"service": "digits"}), ("plain", {})):
        api.objects["TeacherPool", pool] = {"metadata": {"name": pool, "uid": pool}, "spec": spec}
    monkeypatch.setattr("edl.cli.kube.submit.open_cluster", lambda options: contextlib.nullcontext(api))
    command = ["submit", "--image", "i", "--name", "a", "--teachers", teachers, "--script-in-image", *options, "t.py"]
    assert main(command) == (0 if service else 2)
    if service:
        assert read_env(api.objects["ElasticJob", "a"]) == [{"name": "EDL_SERVICE", "value": service}]
    else:
        assert "did you mean 'digits'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_ended_job_is_not_suspended(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = FakeApi()
    metadata = {"name": "a", "namespace": "n", "uid": "u"}
    api.objects["ElasticJob", "a"] = {"metadata": metadata, "spec": {}, "status": {"phase": "Succeeded"}}
    monkeypatch.setattr("edl.cli.kube.workloads.open_cluster", lambda options: contextlib.nullcontext(api))
    assert main([command, "a"]) == 0
    assert capsys.readouterr().out == f"job/a: has ended (Succeeded): there is nothing to {command}\n"
    assert api.objects["ElasticJob", "a"]["spec"] == {}


def job(phase: str, ready: int = 0, reason: str = "") -> dict[str, Any]:
    accepted = {"type": "Accepted", "status": "False", "reason": reason, "message": "no such account"}
    conditions = [accepted] if reason else [{"type": "Accepted", "status": "True"}]
    status = {"phase": phase, "readyReplicas": ready, "conditions": conditions}
    return {"metadata": {"name": "a", "namespace": "n", "uid": "u"}, "spec": {}, "status": status}


class Watching:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.notes: list[str] = []
        self._observer = PhaseObserver(Target("job", "a", job("Pending")), self.notes.append, lambda: self.now_s)

    def check(self, found: dict[str, Any], now_s: float = 0.0) -> str:
        self.now_s = now_s
        return self._observer.check(found)


@pytest.mark.parametrize("reason", ["ObjectRefused", "AccessDenied", "QuotaExceeded", "MinAboveMax"])
def test_job_that_runs_has_not_ended(reason: str) -> None:
    seen = Watching()
    assert seen.check(job("Running", 3, reason)) == "Running"
    assert seen.check(job("Pending", 1, reason)) == "Pending", "a worker of two waits for the other"
    assert sum("no such account" in words for words in seen.notes) == 1, "why it does not grow is told, once"
    assert seen.check(job("Succeeded", 0, reason)) == "Succeeded"
    assert Watching().check(job("Rejected", 0, "MinAboveMax")) in FINAL_PHASES


@pytest.mark.parametrize("phase", ["Pending", "Suspended"])
def test_wrong_edit_ends_nothing(phase: str) -> None:
    found = job(phase, 0, "MinAboveMax")
    seen = Watching()
    for now_s in (0.0, 130.0, 1e6):
        assert seen.check(found, now_s) == phase


def test_refused_pod_ends_after_a_while() -> None:
    """The operator tries again, so a moment's refusal ends nothing; one that stays must not be waited for."""
    seen = Watching()
    for now_s, reason in ((0.0, "ObjectRefused"), (100.0, "ObjectRefused"), (100.0, ""), (200.0, "ObjectRefused")):
        assert seen.check(job("Pending", 0, reason), now_s) == "Pending"
    assert seen.check(job("Pending", 1, "ObjectRefused"), 900.0) == "Pending", "a worker of two runs"
    seen.check(job("Pending", 0, "ObjectRefused"), 1000.0)
    assert seen.check(job("Pending", 0, "ObjectRefused"), 1121.0) == "Rejected"
    assert "no such account" in seen.notes[-1]


def test_what_is_waited_for() -> None:
    seen = Watching()
    for now_s in (0.0, 1e6):
        assert seen.check(job("Pending", 0, "QuotaExceeded"), now_s) == "Pending", "quota comes when others end"
    seen, new = Watching(), {"metadata": job("")["metadata"], "spec": {}}
    for now_s in (0.0, 10.0, 20.0, 30.0):
        assert seen.check(new, now_s) == ""
    assert ["no operator has handled it" in words for words in seen.notes] == [True]
