"""What EDL's objects look like: names, labels, annotations, and what is read from them.

==============  =========  ==========================================================================
What            Kind       Name
==============  =========  ==========================================================================
a key           ConfigMap  `edl-key-` and a hash of the key, which the annotation `edl.io/key` has
an instance     ConfigMap  `edl-instance-` and a random name of the registration
a lease         Lease      `edl-lease-` and a random name
who removes     Lease      `edl-lease-reaper`
==============  =========  ==========================================================================
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edl.discovery.records import from_json, to_json
from edl.discovery.registry import Instance, Rejected
from edl.discovery.store import Entry
from edl.kube.objects import Object, format_time
from edl.kube.resource_types import LEASES
from edl.settings import PodIdentity

__all__ = [
    "ANNOTATION_KEY",
    "ANNOTATION_SERVICE",
    "INSTANCES",
    "InstanceRecord",
    "KEYS",
    "LABEL_LAPSED",
    "LABEL_LEASE",
    "LEASED",
    "LEASE_OBJECTS",
    "LeaseRef",
    "build_instance",
    "build_key",
    "build_lease",
    "is_instance",
    "key_object_name",
    "lease_ref_of",
    "parse_entry",
    "parse_instance",
    "random_name",
    "renewal_patch",
    "select_prefix",
    "select_service",
    "service_of",
    "ttl_of",
    "version_of",
]

_KIND: Final = "edl.io/discovery"
KEYS: Final = f"{_KIND}=key"
INSTANCES: Final = f"{_KIND}=instance"
LEASE_OBJECTS: Final = f"{_KIND}=lease"
"""Label selectors of EDL's objects."""
LABEL_LEASE: Final = "edl.io/lease"
LEASED: Final = f"{_KIND} in (instance,key),{LABEL_LEASE}"
"""Label selector of what belongs to a Lease."""
LABEL_LAPSED: Final = "edl.io/lapsed"
LABEL_SERVICE: Final = "edl.io/service"
ANNOTATION_KEY: Final = "edl.io/key"
ANNOTATION_SERVICE: Final = "edl.io/service"
_LEASE_UID: Final = "edl.io/lease-uid"
_SINCE: Final = "edl.io/since"
_WRITE: Final = "edl.io/write"
_TTL: Final = "edl.io/ttl-s"
_RENEWAL: Final = "edl.io/renewal"
_HASH_CHARS: Final = 40
"""Of SHA-256 in hexadecimal: 160 bits, which no two keys share, and a label's 63 characters hold."""
_FOLDERS: Final = 3
"""Levels of folders with a label of their own: a watcher of `jobs/a/` hears nothing of `jobs/b/`."""
_MOST_LABEL: Final = 63
"""Characters of a label's value, by Kubernetes."""


@dataclass(frozen=True)
class LeaseRef:
    """A Lease that an object belongs to."""

    name: str
    uid: str


@dataclass(frozen=True)
class InstanceRecord:
    """What an instance's ConfigMap says.

    Attributes:
        since: of two registrations the larger is the later.
        lapsed: its lease has run out.
        instance: as it was registered, or why it cannot be used.
    """

    since: int
    lapsed: bool
    instance: Instance | Rejected


def random_name(kind: str) -> str:
    """Return a name that no other object has: `edl-KIND-` and 64 random bits."""
    return f"edl-{kind}-{secrets.token_hex(8)}"


def key_object_name(key: str) -> str:
    """Return the name of a key's ConfigMap."""
    return f"edl-key-{_hash(key)}"


def select_prefix(prefix: str) -> str:
    """Return a label selector that every key under a prefix meets."""
    folders = prefix.split("/")[:-1][:_FOLDERS]
    return f"{KEYS},{_folder_label(len(folders))}={_hash('/'.join(folders))}" if folders else KEYS


def select_service(service: str) -> str:
    """Return a label selector of a service's instances."""
    return f"{INSTANCES},{LABEL_SERVICE}={_service_label(service)}"


def build_key(key: str, value: bytes, lease: LeaseRef | None, resource_version: str = "") -> Object:
    """Return a key's ConfigMap: whole, or with a version, as a merge patch of what is there at that version.

    The API server takes a patch that changes nothing for none, and gives no new version: hence a random annotation.
    """
    owner = (
        {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "name": lease.name, "uid": lease.uid} if lease else {}
    )
    metadata: Object = {
        "labels": {LABEL_LEASE: lease.name if lease else None},
        "annotations": {_LEASE_UID: lease.uid if lease else None, _WRITE: secrets.token_hex(8)},
        "ownerReferences": [owner] if owner else None,
    }
    if resource_version:
        metadata["resourceVersion"] = resource_version
    else:
        folders = key.split("/")[:-1][:_FOLDERS]
        levels = range(1, len(folders) + 1)
        metadata["labels"].update({_folder_label(level): _hash("/".join(folders[:level])) for level in levels})
        metadata["labels"].update(_common_labels("key"))
        metadata["annotations"][ANNOTATION_KEY] = key
        metadata["name"] = key_object_name(key)
        metadata = _without_none(metadata)
    return {"metadata": metadata, "binaryData": {"value": base64.b64encode(value).decode()}}


def parse_entry(obj: Object) -> Entry | None:
    """Read a key's ConfigMap; None where another program spoiled it."""
    key = _annotations(obj).get(ANNOTATION_KEY)
    try:
        value = base64.b64decode((obj.get("binaryData") or {}).get("value") or "", validate=True)
    except (binascii.Error, ValueError, TypeError, AttributeError):
        return None
    return Entry(key, value, version_of(obj)) if isinstance(key, str) and key else None


def build_instance(
    name: str, instance: Instance, lease: LeaseRef, since: int, pod: PodIdentity | None, *, patch: bool
) -> Object:
    """Return an instance's ConfigMap.

    Args:
        name: of the registration.
        instance: what others are to see.
        lease: that it belongs to.
        since: the version of the Lease when it was made: of two registrations the larger is the later.
        pod: that owns it, if any.
        patch: as a merge patch of what is there.
    """
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid} if pod else {}
    metadata: Object = {
        "name": name,
        "labels": {
            **_common_labels("instance"),
            LABEL_SERVICE: _service_label(instance.service),
            LABEL_LEASE: lease.name,
            LABEL_LAPSED: None,
        },
        "annotations": {
            ANNOTATION_SERVICE: instance.service,
            _LEASE_UID: lease.uid,
            _SINCE: str(since),
            _WRITE: secrets.token_hex(8),
        },
        "ownerReferences": [owner] if owner else None,
    }
    data = {"id": instance.id, "instance": to_json(instance)}
    return {"metadata": metadata if patch else _without_none(metadata), "data": data}


def service_of(obj: Object) -> str:
    """Return the service that an instance's ConfigMap belongs to."""
    return str(_annotations(obj).get(ANNOTATION_SERVICE) or "")


def parse_instance(service: str, obj: Object) -> InstanceRecord:
    """Read an instance's ConfigMap."""
    metadata = obj.get("metadata") or {}
    data = obj.get("data") or {}
    since = _annotations(obj).get(_SINCE) or ""
    instance_id = str(data.get("id") or metadata.get("name") or "")
    read = from_json(service, instance_id, str(data.get("instance") or ""))
    lapsed = LABEL_LAPSED in (metadata.get("labels") or {})
    return InstanceRecord(int(since) if since.isascii() and since.isdigit() else 0, lapsed, read)


def is_instance(obj: Object) -> bool:
    """Whether an object is an instance's, not a key's."""
    return bool(((obj.get("metadata") or {}).get("labels") or {}).get(_KIND) == "instance")


def build_lease(name: str, kind: str, holder: str, ttl_s: float, pod: PodIdentity | None) -> Object:
    """Return a Lease, renewed just now. Its times are for people; `ttl_of` reads the length."""
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid} if pod else {}
    metadata: Object = {
        "name": name,
        "labels": _common_labels(kind),
        "annotations": {_TTL: repr(ttl_s), _RENEWAL: "0"},
        "ownerReferences": [owner] if owner else None,
    }
    spec = {
        "holderIdentity": holder,
        "leaseDurationSeconds": max(1, math.ceil(ttl_s)),
        "renewTime": format_time(time.time(), micro=True),
    }
    return {"metadata": _without_none(metadata), "spec": spec}


def renewal_patch(number: int, resource_version: str = "", holder: str = "") -> Object:
    """Return a merge patch that renews a Lease. The number makes it a change, whatever the clock says."""
    metadata: Object = {"annotations": {_RENEWAL: str(number)}}
    spec: Object = {"renewTime": format_time(time.time(), micro=True)}
    if resource_version:
        metadata["resourceVersion"] = resource_version
    if holder:
        spec["holderIdentity"] = holder
    return {"metadata": metadata, "spec": spec}


def ttl_of(lease: Object) -> float | None:
    """Return a Lease's length in seconds; None where it makes no sense."""
    spec = lease.get("spec") or {}
    for text in (_annotations(lease).get(_TTL), spec.get("leaseDurationSeconds")):
        try:
            ttl_s = float(text or 0)
        except (TypeError, ValueError):
            continue
        if 0 < ttl_s < math.inf:
            return ttl_s
    return None


def lease_ref_of(obj: Object) -> LeaseRef | None:
    """Return the Lease that an object belongs to."""
    name = ((obj.get("metadata") or {}).get("labels") or {}).get(LABEL_LEASE)
    return LeaseRef(str(name), str(_annotations(obj).get(_LEASE_UID) or "")) if name else None


def version_of(obj: Object) -> int:
    """Return an object's version as a number: the API server's versions are revisions of etcd, which only grow.

    Raises:
        ValueError: the API server counts otherwise.
    """
    return int((obj.get("metadata") or {}).get("resourceVersion") or 0)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARS]


def _folder_label(level: int) -> str:
    return f"edl.io/folder-{level}"


def _service_label(service: str) -> str:
    return service if len(service) <= _MOST_LABEL else f"sha256-{_hash(service)}"


def _common_labels(kind: str) -> dict[str, Any]:
    return {_KIND: kind, "app.kubernetes.io/managed-by": "edl"}


def _annotations(obj: Object) -> Mapping[str, Any]:
    return (obj.get("metadata") or {}).get("annotations") or {}


def _without_none(metadata: Object) -> Object:
    """Leave out what a merge patch would remove: a new object does not have it."""
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in metadata.items()
        if value is not None
    }
