"""The verbs of the Kubernetes API: get, list, create, apply, patch, delete, scale, logs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from edl.errors import InvalidObjectError, KubernetesError
from edl.kube.connection import Connection, Stream
from edl.kube.objects import Object, ObjectList
from edl.kube.resource_types import PODS, ResourceType
from edl.kube.responses import Call, MissingError, NotServedError, parse_object
from edl.kube.settings import KubeSettings

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_PAGE: Final = 500  # as in kubectl: a few megabytes of pods
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")
"""Pattern of valid names, which are checked before they become part of a path: a DELETE without a name deletes all
objects, and a group that contains a slash leads to objects that the author of a resource may not access."""
_WATCH_GRACE_S: Final = 20.0  # silence past its planned end after which a watch's connection counts as dead


class KubeClient(Connection):
    """A client of an API server. Thread-safe; a context manager. Do not use it in a fork of the process that opened it.

    Besides its own errors, every method raises KubernetesError if the server cannot be reached or does not answer in
    time; AccessDeniedError if the caller lacks permission; InvalidObjectError if the server refuses the object or does
    not serve its kind; and ClosedError after `close`. A namespace of None means the client's default namespace.

    Args:
        settings: cluster and user; None for the cluster and user of the kubeconfig or of the pod.
        on_answer: called after each request, for metrics, with the call and the status code (0 if there was no
            response).

    Raises:
        SettingsError: no cluster is configured, or the file that describes the cluster cannot be used.
    """

    def __init__(
        self, settings: KubeSettings | None = None, on_answer: Callable[[Call, int], object] = lambda call, code: None
    ) -> None:
        super().__init__(settings or KubeSettings(), on_answer)
        self._versions: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def get(
        self, kind: ResourceType, name: str, namespace: str | None = None, *, subresource: str = ""
    ) -> Object | None:
        """Read an object, or its subresource, such as `scale`; None if it does not exist."""
        return self._request_named(self._call("get", kind, namespace, name, subresource), "GET")

    def list(
        self,
        kind: ResourceType,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
    ) -> ObjectList:
        """Read all objects of a kind, and the version to watch from. An empty `namespace` means the whole cluster."""
        query = _filled(labelSelector=label_selector, fieldSelector=field_selector, limit=str(_PAGE))
        call = self._call("list", kind, namespace)
        items: list[Object] = []
        while True:
            answer = self._request(call, "GET", query)
            items.extend(answer.get("items") or ())
            metadata = answer.get("metadata") or {}
            if not metadata.get("continue"):
                return ObjectList(items, str(metadata.get("resourceVersion") or ""))
            query["continue"] = metadata["continue"]

    def create(self, kind: ResourceType, obj: Mapping[str, Any], namespace: str | None = None) -> Object:
        """Create an object; return it as stored. ConflictError if it exists, QuotaExceededError for a full quota."""
        call = self._call("create", kind, namespace, obj["metadata"]["name"])
        return self._request(call, "POST", {}, self._encode(kind, obj))

    def apply(self, kind: ResourceType, obj: Mapping[str, Any], namespace: str | None = None) -> Object:
        """Create an object, or update its fields by server-side apply; return it. QuotaExceededError for a full quota.

        Fields that EDL applied earlier and now omits are removed. If another manager set a field that EDL applies, EDL
        becomes the field's manager.
        """
        call = self._call("patch", kind, namespace, obj["metadata"]["name"])
        query = {"fieldManager": "edl-operator", "force": "true"}
        return self._request(call, "PATCH", query, self._encode(kind, obj), "application/apply-patch+yaml")

    def patch(
        self,
        kind: ResourceType,
        name: str,
        patch: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> Object | None:
        """Change fields by a merge patch (RFC 7386); None removes a field. Return None if the object does not exist.

        Raises ConflictError if the patch contains a `metadata.resourceVersion` that is no longer the object's version.
        """
        call = self._call("patch", kind, namespace, name, subresource)
        return self._request_named(call, "PATCH", json.dumps(patch).encode(), "application/merge-patch+json")

    def delete(
        self,
        kind: ResourceType,
        name: str,
        namespace: str | None = None,
        *,
        uid: str = "",
        grace_period_s: int | None = None,
    ) -> bool:
        """Delete an object and, later, its dependents; return whether it existed. ConflictError if `uid` differs.

        `grace_period_s` is for pods: the seconds between SIGTERM and SIGKILL; None for the pod's own setting.
        """
        call = self._call("delete", kind, namespace, name)
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_period_s is not None:
            options["gracePeriodSeconds"] = grace_period_s
        return self._request_named(call, "DELETE", json.dumps(options).encode()) is not None

    def read_log(
        self,
        pod: str,
        *,
        container: str = "",
        follow: bool = False,
        tail_lines: int | None = None,
        since_time: str = "",
        timestamps: bool = False,
        deadline_s: float | None = None,
    ) -> Iterator[bytes]:
        """Yield a container's log in chunks, which may split lines. InvalidObjectError before the container starts.

        With `follow`, the log continues until the container ends; `since_time` has the format of `format_time`; with
        `timestamps`, each line starts with its time. The log ends after `deadline_s` seconds. If the node vanishes, the
        log ends with an error after a minute.
        """
        call = self._call("get", PODS, None, pod, "log")
        flags = {"follow": follow, "timestamps": timestamps}
        query = _filled(container=container, sinceTime=since_time, **{name: "true" for name in flags if flags[name]})
        if tail_lines is not None:
            query["tailLines"] = str(tail_lines)
        end = None if deadline_s is None else time.monotonic() + deadline_s
        silence_s = deadline_s if follow else self.settings.timeout_s
        stream = self.stream(call, query, silence_s)
        try:
            yield from _read_until(stream, end) if end is not None else stream
        finally:
            stream.close()

    def watch(
        self,
        kind: ResourceType,
        namespace: str | None,
        resource_version: str,
        selectors: Mapping[str, str],
        length_s: int,
    ) -> Stream:
        """Start streaming changes, for `KubeWatch`, as lines of JSON; the server ends the stream after `length_s`."""
        query = {
            **selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(length_s),
        }
        call = self._call("watch", kind, namespace)
        return self.stream(call, query, length_s + _WATCH_GRACE_S, begins_at_once=True)

    def has_resource(self, kind: ResourceType) -> bool:
        """Return whether the server serves a kind of objects, for kinds outside the core group."""
        api_version = f"{_checked(kind.group)}/{_checked(kind.version)}"
        call = Call("get", f"the resources of {api_version}", kind.group, path=f"/apis/{api_version}")
        try:
            answer = self._request(call, "GET")
        except (MissingError, NotServedError):
            return False
        return any(entry.get("name") == kind.plural for entry in answer.get("resources") or ())

    def server_version(self) -> str:
        """Return the server's version, such as `v1.20.15`."""
        return str(self._request(Call("get", "the version", path="/version"), "GET").get("gitVersion") or "")

    def _request(
        self,
        call: Call,
        method: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> Object:
        return parse_object(call, self.url, self.send(call, method, query, body, content_type))

    def _request_named(
        self, call: Call, method: str, body: bytes | None = None, content_type: str = "application/json"
    ) -> Object | None:
        try:
            return self._request(call, method, None, body, content_type)
        except MissingError:
            return None

    def _call(
        self, verb: str, kind: ResourceType, namespace: str | None, name: str | None = None, subresource: str = ""
    ) -> Call:
        version = _checked(self._version(kind))
        path = f"/apis/{_checked(kind.group)}/{version}" if kind.group else f"/api/{version}"
        where = "" if not kind.namespaced else self.namespace if namespace is None else namespace
        if where:
            path += f"/namespaces/{_checked(where)}"
        path += f"/{_checked(kind.plural)}"
        if name is not None and kind.namespaced and not where:
            raise InvalidObjectError(f"{kind.plural} {name!r}: pass the object's namespace")
        if name is not None and verb != "create":
            path += f"/{_checked(name)}"
        if subresource:
            path += f"/{_checked(subresource)}"
        resource = f"{kind.plural}/{subresource}" if subresource else kind.plural
        return Call(verb, resource, kind.group, where, name or "", path)

    def _version(self, kind: ResourceType) -> str:
        if kind.version:
            return kind.version
        if kind.group not in self._versions:
            call = Call("get", f"the versions of {kind.group}", path=f"/apis/{_checked(kind.group)}")
            preferred = self._request(call, "GET").get("preferredVersion") or {}
            self._versions[kind.group] = str(preferred.get("version") or "v1")
        return self._versions[kind.group]

    def _encode(self, kind: ResourceType, obj: Mapping[str, Any]) -> bytes:
        whole = {**obj, "apiVersion": kind._replace(version=self._version(kind)).api_version, "kind": kind.kind}
        return json.dumps(whole).encode()


def _filled(**values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidObjectError(
            f"{name!r} is not an object or kind name: use letters, digits, '-' and '.', starting with a letter or digit"
        )
    return quote(name, safe="")


def _read_until(stream: Stream, end: float) -> Iterator[bytes]:
    stream.set_silence_limit(end - time.monotonic())
    try:
        for piece in stream:
            yield piece
            left_s = end - time.monotonic()
            if left_s <= 0:
                return
            stream.set_silence_limit(left_s)
    except KubernetesError:
        if time.monotonic() < end - 0.05:  # a socket's read timeout may fire a little early
            raise
