"""A client's calls: what is asked, what is made of the answers, and of their absence."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.errors import (
    AccessDeniedError,
    ClosedError,
    ConflictError,
    EDLError,
    InvalidObjectError,
    KubernetesError,
    QuotaExceededError,
    SettingsError,
)
from edl.kube.client import KubeClient
from edl.kube.resource_types import CONFIG_MAPS, DEPLOYMENTS, ELASTIC_JOBS, POD_DISRUPTION_BUDGETS, PODS
from edl.kube.settings import KubeSettings
from tests.fast.kube.conftest import write_kubeconfig
from tests.fast.kube.server import ApiServer, Reply, Request, status

CALLS: dict[str, Callable[[KubeClient], Any]] = {
    "get": lambda client: client.get(PODS, "a"),
    "list": lambda client: client.list(PODS),
    "create": lambda client: client.create(PODS, {"metadata": {"name": "a"}}),
    "apply": lambda client: client.apply(PODS, {"metadata": {"name": "a"}}),
    "patch": lambda client: client.patch(PODS, "a", {}),
    "delete": lambda client: client.delete(PODS, "a"),
    "read_log": lambda client: list(client.read_log("a")),
    "has_resource": lambda client: client.has_resource(DEPLOYMENTS),
    "server_version": lambda client: client.server_version(),
}


def failing(client: KubeClient, name: str = "list") -> EDLError:
    with pytest.raises(EDLError) as caught:
        CALLS[name](client)
    return caught.value


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(500, b"oops"), KubernetesError),
        (Reply(503, b""), KubernetesError),
        (status(429, "TooManyRequests", "slow down"), KubernetesError),
        (Reply(302, b"", {"Location": "http://127.0.0.1:1/"}), KubernetesError),
        (status(401, "Unauthorized", "Unauthorized"), AccessDeniedError),
        (status(403, "Forbidden", 'User "me" cannot do that'), AccessDeniedError),
        (status(422, "Invalid", "no", causes=[{"field": "spec.f", "message": "wrong"}] * 2), InvalidObjectError),
        (Reply(200, b"<html>", length=100), KubernetesError),
    ],
    ids=["500", "503", "429", "302", "401", "403", "422", "cut"],
)
def test_failures_are_errors(server: ApiServer, client: KubeClient, name: str, reply: Reply, kind: type) -> None:
    server.answer = lambda request: reply
    error = failing(client, name)
    assert type(error) is kind
    assert server.url in str(error), "an error says where"
    assert ("spec.f: wrong" in str(error)) == (kind is InvalidObjectError), "and what is wrong"


def test_retry_after_is_handed_on(server: ApiServer, client: KubeClient) -> None:
    server.answer = lambda request: Reply(429, b"", {"Retry-After": "7"})
    error = failing(client)
    assert isinstance(error, KubernetesError)
    assert error.retry_after_s == 7.0
    server.answer = lambda request: Reply(503, b"", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"})
    assert getattr(failing(client), "retry_after_s", None) == 0.0
    assert len(server.requests) == 2, "retries are the caller's business"


@pytest.mark.parametrize(
    ("message", "details", "kind"),
    [
        ('pods "a" is forbidden: exceeded quota: gpus, requested: pods=1', {}, QuotaExceededError),
        ('pods "a" is forbidden: violates PodSecurity "restricted:latest"', {}, InvalidObjectError),
        ("being terminated", {"causes": [{"reason": "NamespaceTerminating"}]}, InvalidObjectError),
    ],
)
def test_admission_is_no_lack_of_rights(
    server: ApiServer, client: KubeClient, message: str, details: dict[str, Any], kind: type
) -> None:
    server.answer = lambda request: status(403, "Forbidden", message, **details)
    assert type(failing(client, "create")) is kind


def test_missing_object_is_none(server: ApiServer, client: KubeClient) -> None:
    server.answer = lambda request: status(404, "NotFound", 'pods "a" not found', name="a", kind="pods")
    assert client.get(PODS, "a") is None
    assert client.patch(PODS, "a", {}) is None
    assert client.delete(PODS, "a") is False
    with pytest.raises(InvalidObjectError, match='pods "a" not found'):
        list(client.read_log("a"))


@pytest.mark.parametrize("reply", [Reply(404, b"404 page not found\n"), status(404, "NotFound", "no such resource")])
def test_missing_kind_is_no_none(server: ApiServer, client: KubeClient, reply: Reply) -> None:
    """A kind that the server does not have, or a wrong URL, is not the same as an object that is not there."""
    server.answer = lambda request: reply
    for name in ("get", "list", "patch", "delete", "create"):
        assert isinstance(failing(client, name), InvalidObjectError)
    assert client.has_resource(ELASTIC_JOBS) is False
    server.answer = lambda request: status(404, "NotFound", 'namespaces "x" not found', name="x", kind="namespaces")
    assert isinstance(failing(client, "create"), InvalidObjectError), "nothing can be made in a missing namespace"


@pytest.mark.parametrize("reason", ["AlreadyExists", "Conflict"])
def test_conflicts(server: ApiServer, client: KubeClient, reason: str) -> None:
    server.answer = lambda request: status(409, reason, "no", name="a")
    for name in ("create", "apply", "patch", "delete"):
        assert type(failing(client, name)) is ConflictError


def test_pages_are_put_together(server: ApiServer, client: KubeClient) -> None:
    def answer(request: Request) -> Reply:
        second = "continue=next" in request.path
        items = [{"metadata": {"name": "b" if second else "a"}}]
        metadata = {"resourceVersion": "9"} if second else {"continue": "next", "resourceVersion": "7"}
        return Reply(200, {"items": items, "metadata": metadata})

    server.answer = answer
    found = client.list(PODS, label_selector="x in (a,b)")
    assert [item["metadata"]["name"] for item in found.items] == ["a", "b"]
    assert found.resource_version == "9"
    assert all("labelSelector=x+in+%28a%2Cb%29" in request.path for request in server.requests)


@pytest.mark.parametrize("body", [b"<html>welcome</html>", b"[]", b"", b"\xff\xfe", b"[" * 100_000], ids=range(5))
def test_no_json_is_no_api_server(server: ApiServer, client: KubeClient, body: bytes) -> None:
    server.answer = lambda request: Reply(200, body)
    for name in ("get", "list", "server_version"):
        assert isinstance(failing(client, name), KubernetesError)
    server.answer = lambda request: Reply(200, {"items": None, "metadata": None})  # which an API server may say
    assert client.list(PODS).items == []


@pytest.mark.parametrize("timeout_s", [0.5])
@pytest.mark.parametrize(
    "reply", [Reply(200, {}, delay_s=600), Reply(200, pieces=((0.1, b" "),) * 6000)], ids=["silent", "drips"]
)
def test_answer_that_does_not_come(server: ApiServer, client: KubeClient, reply: Reply) -> None:
    """Also where each byte is in time, and the answer never ends."""
    server.answer = lambda request: reply
    text = str(failing(client))
    assert "in time" in text or "too slow" in text


def test_bodies_and_paths(server: ApiServer, client: KubeClient) -> None:
    client.create(CONFIG_MAPS, {"metadata": {"name": "a"}})
    client.apply(DEPLOYMENTS, {"metadata": {"name": "b"}}, "there")
    client.patch(PODS, "c", {"metadata": {"resourceVersion": "3"}}, subresource="status")
    client.delete(PODS, "d", uid="u", grace_period_s=0)
    client.list(PODS, "")
    created, applied, patched, deleted, listed = server.requests
    assert (created.method, created.path) == ("POST", "/api/v1/namespaces/here/configmaps")
    assert created.body == {"metadata": {"name": "a"}, "apiVersion": "v1", "kind": "ConfigMap"}
    assert applied.path == "/apis/apps/v1/namespaces/there/deployments/b?fieldManager=edl-operator&force=true"
    assert applied.headers["content-type"] == "application/apply-patch+yaml"
    assert applied.body["apiVersion"] == "apps/v1"
    assert patched.path == "/api/v1/namespaces/here/pods/c/status"
    assert patched.headers["content-type"] == "application/merge-patch+json"
    assert deleted.body["preconditions"] == {"uid": "u"}
    assert deleted.body["gracePeriodSeconds"] == 0
    assert listed.path.startswith("/api/v1/pods?")
    assert all(request.headers["authorization"] == "Bearer secret-1" for request in server.requests)


def test_version_is_discovered_once(server: ApiServer, client: KubeClient) -> None:
    server.answer = lambda request: Reply(
        200, {"preferredVersion": {"version": "v1beta1"}} if request.path == "/apis/policy" else {}
    )
    client.apply(POD_DISRUPTION_BUDGETS, {"metadata": {"name": "a"}})
    client.list(POD_DISRUPTION_BUDGETS)
    asked, applied, listed = server.requests
    assert asked.path == "/apis/policy"
    assert applied.path.startswith("/apis/policy/v1beta1/namespaces/here/poddisruptionbudgets/a?")
    assert applied.body["apiVersion"] == "policy/v1beta1"
    assert listed.path.startswith("/apis/policy/v1beta1/")


@pytest.mark.parametrize("name", ["", "..", "a?b", "a%2fb", "../../nodes"])
def test_names_stay_names(server: ApiServer, client: KubeClient, name: str) -> None:
    """A DELETE without a name deletes all objects."""
    for call in (client.delete, client.get):
        with pytest.raises(InvalidObjectError):
            call(PODS, name)
    with pytest.raises(InvalidObjectError):
        client.list(PODS, name or "/")
    with pytest.raises(InvalidObjectError):
        client.delete(PODS, "a", "")
    assert server.requests == []


@pytest.mark.parametrize("field", ["group", "version", "plural"])
@pytest.mark.parametrize("value", ["apps/v1/namespaces/b/deployments/victim/scale?x=", "..", "a%2Fb"])
def test_kinds_stay_kinds(server: ApiServer, client: KubeClient, field: str, value: str) -> None:
    """A kind comes from the spec of a resource, whose author has other rights than who asks."""
    kind = DEPLOYMENTS._replace(**{field: value})  # type: ignore[arg-type]
    for call in (
        lambda: client.get(kind, "a", subresource="scale"),
        lambda: client.patch(kind, "a", {}, subresource="scale"),
        lambda: client.list(kind),
        lambda: client.patch(DEPLOYMENTS, "a", {}, subresource=value),
    ):
        with pytest.raises(InvalidObjectError):
            call()
    if field == "group":
        with pytest.raises(InvalidObjectError):
            client.get(kind._replace(version=""), "a")
    assert server.requests == []


def test_log_is_followed_until_a_deadline(server: ApiServer, client: KubeClient) -> None:
    server.answer = lambda request: Reply(200, pieces=((0.0, b"first\n"), (600.0, b"never")))
    text = b"".join(client.read_log("a", follow=True, deadline_s=1.0, tail_lines=5, container="c"))
    assert b"first\n".startswith(text)
    path = server.requests[0].path
    for part in ("follow=true", "tailLines=5", "container=c"):
        assert part in path


def test_log_that_breaks_is_an_error(server: ApiServer, client: KubeClient) -> None:
    server.answer = lambda request: Reply(200, pieces=((0.0, b"first\n"),), cut=True)
    pieces = []
    with pytest.raises(KubernetesError):
        pieces.extend(client.read_log("a", follow=True, deadline_s=20))


def test_new_token_is_read_after_a_401(server: ApiServer, kubeconfig: str, tmp_path: Path) -> None:
    server.answer = lambda request: (
        Reply(200, {}) if request.headers["authorization"] == "Bearer secret-2" else status(401, "Unauthorized", "who?")
    )
    with KubeClient(KubeSettings(kubeconfig=kubeconfig)) as client:
        write_kubeconfig(Path(kubeconfig), server.url, {"token": "secret-2"})
        assert client.get(PODS, "a") == {}
        assert len(server.requests) == 2
        write_kubeconfig(Path(kubeconfig), server.url, {"token": "secret-3"})
        server.answer = lambda request: status(401, "Unauthorized", "who?")
        text = str(failing(client))
        assert "expired" in text
        assert "secret" not in text
        assert len(server.requests) == 4, "a single attempt with what was read again"
        Path(kubeconfig).unlink()
        with pytest.raises(AccessDeniedError, match="no other credentials"):
            client.get(PODS, "a")


def test_forked_or_closed_client(client: KubeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ClosedError):
            client.get(PODS, "a")
    assert client.get(PODS, "a") == {}
    client.close()
    client.close()
    with pytest.raises(ClosedError):
        client.get(PODS, "a")


def test_settings_are_checked(tmp_path: Path, kubeconfig: str) -> None:
    for settings, words in (
        (KubeSettings(kubeconfig=str(tmp_path / "none")), "there is no such file"),
        (KubeSettings(kubeconfig, context="other"), "with context 'other'"),
    ):
        with pytest.raises(SettingsError, match=words):
            KubeClient(settings)


@pytest.mark.parametrize("text", ["", "[]", "{}", "contexts: 5\ncurrent-context: here"])
def test_file_that_is_no_kubeconfig(tmp_path: Path, text: str) -> None:
    """The words are of the file, and not of Python: a list has no string indices."""
    (tmp_path / "config").write_text(text)
    with pytest.raises(SettingsError, match="cannot be used as a kubeconfig") as found:
        KubeClient(KubeSettings(kubeconfig=str(tmp_path / "config")))
    assert re.search(r"empty|current-context", str(found.value))
    assert "indices" not in str(found.value)
    assert "object is not" not in str(found.value)


def test_environment_names_the_cluster(kubeconfig: str, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "203.0.113.1")
    with KubeClient() as client:
        assert client.url == server.url
        assert client.namespace == "here"
    with KubeClient(KubeSettings(namespace="there")) as client:
        assert client.namespace == "there"


def test_proxy_is_left_out(kubeconfig: str, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with KubeClient(KubeSettings(kubeconfig=kubeconfig)) as client:
        assert client.get(PODS, "a") == {}


@pytest.mark.parametrize(
    ("reply", "counts"),
    [
        (Reply(200, {"items": []}), True),
        (status(503, "ServiceUnavailable", "later"), False),
        (Reply(200, b"<html>log in</html>", {"Content-Type": "text/html"}), False),
    ],
)
def test_answers_that_set_the_clock(
    reply: Reply, counts: bool, server: ApiServer, client: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared with times of objects is by the clock that set them; an error page has its proxy's."""
    noted: list[str] = []
    monkeypatch.setattr(client.server_clock, "note", lambda date, took_s: noted.append(date))
    monkeypatch.setattr(client.server_clock, "read", lambda: 7.0)
    server.answer = lambda request: reply
    with contextlib.suppress(KubernetesError):
        client.list(PODS)
    assert [date.endswith(" GMT") for date in noted] == ([True] if counts else [])
    assert client.server_clock.read() == 7.0


PLUGINS = "client.authentication.k8s.io/v1"


def with_cluster(path: str, **fields: Any) -> str:
    """Write fields of the cluster into a kubeconfig."""
    config = json.loads(Path(path).read_text())
    config["clusters"][0]["cluster"].update(fields)
    Path(path).write_text(json.dumps(config))
    return path


def test_proxy_of_the_cluster(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes before that of the environment, and NO_PROXY is not asked, as for kubectl."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "*")
    path = write_kubeconfig(tmp_path / "config", "http://behind.example:6443")
    with_cluster(path, **{"proxy-url": server.url})
    server.answer = lambda request: Reply(200, {"items": []})
    with KubeClient(KubeSettings(kubeconfig=path, timeout_s=20.0)) as client:
        assert client.list(PODS, "n").items == []
    assert server.requests[0].path.startswith("http://behind.example:6443/api/v1/namespaces/n/pods")


def test_unknown_proxy_is_refused(tmp_path: Path) -> None:
    path = with_cluster(
        write_kubeconfig(tmp_path / "config", "http://a:1"), **{"proxy-url": "socks5://me:secret@bastion:1080"}
    )
    with pytest.raises(SettingsError, match="proxy-url socks5://") as caught:
        KubeClient(KubeSettings(kubeconfig=path))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("field", ["as", "as-groups"])
def test_acting_as_another_is_refused(server: ApiServer, tmp_path: Path, field: str) -> None:
    """Without it, EDL would act with the rights of who may impersonate."""
    user = {"token": "t", field: "alice" if field == "as" else ["viewers"]}
    path = write_kubeconfig(tmp_path / "config", server.url, user)
    with pytest.raises(SettingsError, match=rf"user 'u' sets {field}\b"):
        KubeClient(KubeSettings(kubeconfig=path))


def with_plugin(path: Path, url: str, script: str) -> str:
    """Write a kubeconfig whose user is what a command says."""
    plugin = {"apiVersion": PLUGINS, "command": "/bin/sh", "args": ["-c", script]}
    return write_kubeconfig(path, url, {"exec": plugin})


def says(token: str) -> str:
    found = {"token": token, "expirationTimestamp": "2020-01-01T00:00:00Z"}
    return f"echo '{json.dumps({'apiVersion': PLUGINS, 'kind': 'ExecCredential', 'status': found})}'"


@pytest.mark.parametrize("script", ["echo expired >&2; exit 1", "echo '{}'"])
def test_failed_plugin_is_no_anonymous_user(server: ApiServer, tmp_path: Path, script: str) -> None:
    path = with_plugin(tmp_path / "config", server.url, script)
    with pytest.raises(SettingsError, match="the command '/bin/sh' of user 'u' returned no credentials"):
        KubeClient(KubeSettings(kubeconfig=path))
    assert server.requests == []


def test_plugin_that_hangs_is_an_error(server: ApiServer, tmp_path: Path) -> None:
    path = with_plugin(tmp_path / "config", server.url, "exec sleep 600")
    with pytest.raises(SettingsError, match=r"no credentials within 0\.6 s"):
        KubeClient(KubeSettings(kubeconfig=path, timeout_s=0.2))


def test_plugin_is_asked_again_after_a_401(server: ApiServer, tmp_path: Path) -> None:
    """And not before: what the official client does with a token that has expired has no deadline."""
    token_file = tmp_path / "token_file"
    token_file.write_text("old")
    path = with_plugin(tmp_path / "config", server.url, says("TOKEN").replace("TOKEN", f"'$(cat {token_file})'"))

    server.answer = lambda request: (
        Reply(200, {"items": []}) if request.headers["authorization"] == "Bearer new" else status(401, "", "who?")
    )
    with KubeClient(KubeSettings(kubeconfig=path, timeout_s=20.0)) as client:
        token_file.write_text("new")
        assert client.list(PODS, "n").items == []
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer old", "Bearer new"]
