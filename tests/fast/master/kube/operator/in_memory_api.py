"""`InMemoryApi`: a double of the API server, as far as the operator calls it. The real one is in tests/kubernetes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

from edl.errors import ConflictError
from edl.kube.objects import Object, ObjectList, format_time
from edl.kube.resource_types import ResourceType


class OperatorKilled(BaseException):
    """Stands for SIGKILL: nothing in the operator catches it."""


class InMemoryApi:
    """Objects in a dict, with resource versions, uids and preconditions; the operator may be killed after any call."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.made: list[str] = []
        self.kill_after: int | None = None
        self._versions = itertools.count(1)
        self._lives: dict[tuple[str, str, str], int] = {}
        self.now_s = 1_000_000.0

    def get(
        self, kind: ResourceType, name: str, namespace: str | None = None, *, subresource: str = ""
    ) -> Object | None:
        found = copy.deepcopy(self.objects.get((kind.plural, namespace or "", name)))
        self._count("get", kind, name)
        if found is None or not subresource:
            return found
        replicas = {"replicas": found["spec"]["replicas"]}
        return {"spec": replicas, "status": replicas}

    def list(
        self, kind: ResourceType, namespace: str | None = None, *, label_selector: str = "", field_selector: str = ""
    ) -> ObjectList:
        label, _, value = label_selector.partition("=")
        named = field_selector.partition("metadata.name=")[2]
        uid = field_selector.partition("involvedObject.uid=")[2]
        items = [
            copy.deepcopy(obj)
            for (plural, where, _), obj in sorted(self.objects.items())
            if plural == kind.plural
            and where == namespace
            and (not named or obj["metadata"]["name"] == named)
            and (not label or obj["metadata"].get("labels", {}).get(label) == value)
            and (not uid or obj.get("involvedObject", {}).get("uid") == uid)
        ]
        self._count("list", kind, "")
        return ObjectList(items, "1")

    def create(self, kind: ResourceType, obj: Mapping[str, Any], namespace: str | None = None) -> Object:
        key = (kind.plural, namespace or "", obj["metadata"]["name"])
        if key in self.objects:
            self._count("create", kind, key[2])
            raise ConflictError(f"{key} exists")
        made = self._store(key, obj)
        self.made.append(key[2])
        self._count("create", kind, key[2])
        return made

    def apply(self, kind: ResourceType, obj: Mapping[str, Any], namespace: str | None = None) -> Object:
        key = (kind.plural, namespace or "", obj["metadata"]["name"])
        made = self._store(key, obj)
        self._count("apply", kind, key[2])
        return made

    def patch(
        self,
        kind: ResourceType,
        name: str,
        patch: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> Object | None:
        key = (kind.plural, namespace or "", name)
        found = self.objects.get(key)
        if found is None:
            self._count("patch", kind, name)
            return None
        patch = copy.deepcopy(dict(patch))
        version = patch.get("metadata", {}).pop("resourceVersion", None)
        if version is not None and version != found["metadata"]["resourceVersion"]:
            self._count("patch", kind, name)
            raise ConflictError(f"{key} has changed")
        if subresource == "status":
            patch = {subresource: patch.get(subresource, {})}
        changed = merge(found, patch)
        changed["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[key] = changed
        self._count("patch", kind, name)
        return copy.deepcopy(changed)

    def delete(
        self,
        kind: ResourceType,
        name: str,
        namespace: str | None = None,
        *,
        uid: str = "",
        grace_period_s: int | None = None,
    ) -> bool:
        key = (kind.plural, namespace or "", name)
        found = self.objects.get(key)
        if found is not None and uid and found["metadata"]["uid"] != uid:
            self._count("delete", kind, name)
            raise ConflictError(f"{key} is another")
        there = self.objects.pop(key, None) is not None
        self._count("delete", kind, name)
        return there

    def put(self, kind: ResourceType, obj: Object) -> None:
        """Set an object, as users and kubelets do; counts as no call."""
        self._store((kind.plural, obj["metadata"]["namespace"], obj["metadata"]["name"]), obj)

    def names(self, kind: ResourceType) -> list[str]:
        return sorted(name for plural, _, name in self.objects if plural == kind.plural)

    def _store(self, key: tuple[str, str, str], obj: Mapping[str, Any]) -> Object:
        made = copy.deepcopy(dict(obj))
        metadata = made["metadata"]
        metadata["namespace"] = key[1]
        before = self.objects.get(key, {}).get("metadata", {})
        if not before:
            self._lives[key] = self._lives.get(key, 0) + 1
        metadata.setdefault("uid", before.get("uid") or f"uid-{key[2]}-{self._lives[key]}")
        metadata.setdefault("creationTimestamp", format_time(self.now_s))
        metadata["resourceVersion"] = str(next(self._versions))
        self.objects[key] = made
        return copy.deepcopy(made)

    def _count(self, verb: str, kind: ResourceType, name: str) -> None:
        self.calls.append((verb, kind.plural, name))
        if self.kill_after is not None and len(self.calls) >= self.kill_after:
            raise OperatorKilled


def merge(target: Mapping[str, Any], patch: Mapping[str, Any]) -> Object:
    merged = dict(target)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            before = merged.get(name)
            merged[name] = merge(before if isinstance(before, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged
