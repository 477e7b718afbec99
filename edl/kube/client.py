"""The verbs of the API: get, list, create, apply, patch, delete, scale, logs."""

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
from edl.kube.responses import Call, ExpiredError, MissingError, NotServedError, parse_object
from edl.kube.settings import KubeSettings

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_PAGE: Final = 500
"""Objects in an answer, as kubectl has it: some megabytes of pods."""
_MOST_RELISTS: Final = 2
"""Lists of pages begun again because the first pages are no longer kept; the last one asks for all at once."""
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")
"""Name of an object, group, version, kind or namespace. Checked before it becomes a part of a path: a DELETE without a
name deletes all objects, and a group with a slash, which a resource may name, leads to objects its author may not
touch.
"""
_METADATA: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_WATCH_GRACE_S: Final = 20.0
"""How much longer than its own end a watch may be silent before its connection counts as dead."""


class KubeClient:
    """Calls to an API server. Thread-safe; a context manager; not to be used in a fork of the process that opened it.

    Every method raises, beside what it says: KubernetesError where the server cannot be reached, or does not answer in
    time; AccessDeniedError where it does not let the caller; InvalidObjectError where it refuses the object, or does
    not have the kind; ClosedError after `close`. A namespace that is None is the client's own.

    Args:
        settings: which cluster, and as whom; None for the kubeconfig's or the pod's own.
        on_answer: called after each request with the call and the answer's code, 0 where none came; for metrics.

    Raises:
        SettingsError: no cluster is named anywhere, or the file that names it cannot be used.
    """

    def __init__(
        self, settings: KubeSettings | None = None, on_answer: Callable[[Call, int], object] = lambda call, code: None
    ) -> None:
        self._settings = settings or KubeSettings()
        self._connection = Connection(self._settings, on_answer)
        self._versions: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def settings(self) -> KubeSettings:
        """Which cluster, and as whom."""
        return self._settings

    @property
    def namespace(self) -> str:
        """Of calls that name none."""
        return self._connection.namespace

    @property
    def url(self) -> str:
        """Where the API server is."""
        return self._connection.url

    def read_server_time(self) -> float:
        """Return the time by the clock that timestamps of objects are from, in seconds since 1970; asks nothing."""
        return self._connection.server_clock.read()

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._connection.close()

    def get(self, kind: ResourceType, name: str, namespace: str | None = None) -> Object | None:
        """Read an object; None if it does not exist."""
        call = self._call("get", kind, namespace, name)
        return self._request_named(call, "GET", self._path(kind, namespace, name))

    def list(
        self,
        kind: ResourceType,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        metadata_only: bool = False,
    ) -> ObjectList:
        """Read all objects of a kind, as they are now, and the moment from which a watch can follow.

        An empty `namespace` is all of the cluster. `metadata_only` leaves out everything else of the objects.
        """
        selectors = _filled(labelSelector=label_selector, fieldSelector=field_selector)
        call = self._call("list", kind, namespace)
        path = self._path(kind, namespace)
        accept = _METADATA if metadata_only else "application/json"
        for limit in (*[str(_PAGE)] * _MOST_RELISTS, ""):
            items: list[Object] = []
            token = ""
            try:
                while True:
                    query = {**selectors, **_filled(limit=limit, **{"continue": token})}
                    answer = self._request(call, "GET", path, query, accept=accept)
                    items.extend(answer.get("items") or ())
                    metadata = answer.get("metadata") or {}
                    token = metadata.get("continue") or ""
                    if not token:
                        return ObjectList(items, str(metadata.get("resourceVersion") or ""))
            except ExpiredError:
                if not token:
                    raise
        raise KubernetesError(f"{self.url}: {call}: the list changes faster than it can be read")

    def create(self, kind: ResourceType, obj: Mapping[str, Any], namespace: str | None = None) -> Object:
        """Make an object, and return it as it is now.

        Raises:
            ConflictError: there is an object of this name.
            QuotaExceededError: the namespace's quota has no room for it.
        """
        call = self._call("create", kind, namespace, str(_metadata(obj).get("name") or ""))
        body = self._encode(kind, obj)
        return self._request(call, "POST", self._path(kind, namespace), {}, body)

    def apply(self, kind: ResourceType, obj: Mapping[str, Any], namespace: str | None = None) -> Object:
        """Make an object, or change its fields to these: server-side apply. Return it as it is now.

        Fields that EDL wanted before and leaves out go; fields that another manager set become EDL's.

        Raises:
            QuotaExceededError: the namespace's quota has no room for it.
        """
        name = str(_metadata(obj).get("name") or "")
        call = self._call("patch", kind, namespace, name)
        query = {"fieldManager": "edl-operator", "force": "true"}
        path = self._path(kind, namespace, name)
        return self._request(call, "PATCH", path, query, self._encode(kind, obj), "application/apply-patch+yaml")

    def patch(
        self,
        kind: ResourceType,
        name: str,
        patch: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> Object | None:
        """Change fields by a merge patch (RFC 7386), where None removes a field.

        Returns:
            The object as it is now; None if it does not exist.

        Raises:
            ConflictError: it is no longer of the `metadata.resourceVersion` in the patch.
        """
        call = self._call("patch", kind, namespace, name, subresource)
        path = self._path(kind, namespace, name, subresource)
        return self._request_named(call, "PATCH", path, json.dumps(patch).encode(), "application/merge-patch+json")

    def delete(
        self,
        kind: ResourceType,
        name: str,
        namespace: str | None = None,
        *,
        uid: str = "",
        grace_period_s: int | None = None,
    ) -> bool:
        """Delete an object and, later, what it owns; return whether it was there.

        `grace_period_s` is of a pod: seconds between SIGTERM and SIGKILL, None for its own.

        Raises:
            ConflictError: it is not of the `uid` given.
        """
        call = self._call("delete", kind, namespace, name)
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_period_s is not None:
            options["gracePeriodSeconds"] = grace_period_s
        body = json.dumps(options).encode()
        return self._request_named(call, "DELETE", self._path(kind, namespace, name), body) is not None

    def read_scale(self, kind: ResourceType, name: str, namespace: str | None = None) -> Object | None:
        """Read a `Scale`, the wanted and the present replicas; None if the object does not exist."""
        call = self._call("get", kind, namespace, name, "scale")
        return self._request_named(call, "GET", self._path(kind, namespace, name, "scale"))

    def write_scale(self, kind: ResourceType, name: str, replicas: int, namespace: str | None = None) -> Object | None:
        """Change the wanted replicas; None if the object does not exist."""
        return self.patch(kind, name, {"spec": {"replicas": replicas}}, namespace, subresource="scale")

    def read_log(
        self,
        pod: str,
        namespace: str | None = None,
        *,
        container: str = "",
        follow: bool = False,
        tail_lines: int | None = None,
        previous: bool = False,
        since_time: str = "",
        timestamps: bool = False,
        deadline_s: float | None = None,
    ) -> Iterator[bytes]:
        """Yield a container's log in pieces, which may end within a line.

        `follow` goes on until the container ends; `previous` reads the container before its last restart; `since_time`
        is as `format_time` writes it; `timestamps` begins each line with its time. After `deadline_s` it ends, if
        given. A node that vanished ends it with an error after a minute.

        Raises:
            InvalidObjectError: there is no such pod or container, or it has not started.
        """
        call = self._call("get", PODS, namespace, pod, "log")
        flags = {"follow": follow, "previous": previous, "timestamps": timestamps}
        query = _filled(container=container, sinceTime=since_time, **{name: "true" for name in flags if flags[name]})
        if tail_lines is not None:
            query["tailLines"] = str(tail_lines)
        end = None if deadline_s is None else time.monotonic() + deadline_s
        silence_s = deadline_s if follow else self._settings.timeout_s
        stream = self._connection.stream(call, self._path(PODS, namespace, pod, "log"), query, silence_s)
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
        """Begin to follow changes, for `KubeWatch`: lines of JSON, until the server ends the watch after `length_s`."""
        query = {
            **selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(length_s),
        }
        call = self._call("watch", kind, namespace)
        path = self._path(kind, namespace)
        return self._connection.stream(call, path, query, length_s + _WATCH_GRACE_S, begins_at_once=True)

    def has_resource(self, group: str, version: str, plural: str) -> bool:
        """Ask whether the server has a kind of objects."""
        call = Call("get", f"the resources of {group or 'core'}/{version}", group)
        path = (
            f"/apis/{quote(group, safe='')}/{quote(version, safe='')}" if group else f"/api/{quote(version, safe='')}"
        )
        try:
            answer = self._request(call, "GET", path)
        except (MissingError, NotServedError):
            return False
        return any(entry.get("name") == plural for entry in answer.get("resources") or ())

    def server_version(self) -> str:
        """Return the server's version, such as `v1.20.15`."""
        return str(self._request(Call("get", "the version"), "GET", "/version").get("gitVersion") or "")

    def _request(
        self,
        call: Call,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Object:
        answer = self._connection.send(call, method, path, query, body, content_type, accept)
        return parse_object(call, self.url, answer)

    def _request_named(
        self, call: Call, method: str, path: str, body: bytes | None = None, content_type: str = "application/json"
    ) -> Object | None:
        try:
            return self._request(call, method, path, None, body, content_type)
        except MissingError:
            return None

    def _call(
        self, verb: str, kind: ResourceType, namespace: str | None, name: str = "", subresource: str = ""
    ) -> Call:
        where = "" if not kind.namespaced else self.namespace if namespace is None else namespace
        return Call(verb, f"{kind.plural}/{subresource}" if subresource else kind.plural, kind.group, where, name)

    def _path(self, kind: ResourceType, namespace: str | None, name: str | None = None, subresource: str = "") -> str:
        version = _checked(self._version(kind))
        path = f"/apis/{_checked(kind.group)}/{version}" if kind.group else f"/api/{version}"
        where = self.namespace if namespace is None else namespace
        if kind.namespaced and where:
            path += f"/namespaces/{_checked(where)}"
        path += f"/{_checked(kind.plural)}"
        if name is not None:
            if kind.namespaced and not where:
                raise InvalidObjectError(f"{kind.plural} {name!r}: an object needs the namespace that it is in")
            path += f"/{_checked(name)}"
        return f"{path}/{_checked(subresource)}" if subresource else path

    def _version(self, kind: ResourceType) -> str:
        if kind.version:
            return kind.version
        if kind.group not in self._versions:
            path = f"/apis/{_checked(kind.group)}"
            answer = self._request(Call("get", f"the versions of {kind.group}"), "GET", path)
            self._versions[kind.group] = str((answer.get("preferredVersion") or {}).get("version") or "v1")
        return self._versions[kind.group]

    def _encode(self, kind: ResourceType, obj: Mapping[str, Any]) -> bytes:
        whole = {**obj, "apiVersion": kind._replace(version=self._version(kind)).api_version, "kind": kind.kind}
        return json.dumps(whole).encode()


def _metadata(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = obj.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _filled(**values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidObjectError(
            f"{name!r} is not a name of an object or kind: use letters, digits, '-' and '.', beginning with either"
        )
    return quote(name, safe="")


def _read_until(stream: Stream, end: float) -> Iterator[bytes]:
    """Yield pieces until the monotonic time `end`."""
    stream.set_silence_limit(end - time.monotonic())
    try:
        for piece in stream:
            yield piece
            left_s = end - time.monotonic()
            if left_s <= 0:
                return
            stream.set_silence_limit(left_s)
    except KubernetesError:
        if time.monotonic() < end - 0.05:  # the silence limit of a socket may end a little early
            raise
