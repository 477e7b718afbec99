"""Slips in manifests of which the API server says nothing: misspelled fields, and numbers where texts were meant.

It drops fields that a CRD does not have, and a pod's template has no schema there. What does not belong here: what the
operator refuses (`edl.master.kube.resources`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from edl.quoting import quote

__all__ = ["RESOURCE_FIELDS", "find_slips"]

_OWNER: Final = (
    "minReplicas",
    "maxReplicas",
    "replicas",
    "scaling",
    "suspend",
    "store",
    "priorityClassName",
    "queue",
    "gracePeriodSeconds",
    "template",
)
RESOURCE_FIELDS: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "ElasticJob": {
        "spec": frozenset({*_OWNER, "run", "checkpoint", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "master"}),
        "spec.master": frozenset({"enabled", "args"}),
    },
    "TeacherPool": {
        "spec": frozenset({*_OWNER, "service", "serve", "probeSeconds", "scaleTargetRef"}),
        "spec.scaleTargetRef": frozenset({"apiVersion", "kind", "name"}),
    },
}
"""Kind -> path of an object -> its fields, as the CRDs have them."""
_TOP: Final = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})
_TEMPLATE: Final = frozenset({"metadata", "spec"})
_POD_SPEC: Final = frozenset(
    [
        "activeDeadlineSeconds",
        "affinity",
        "automountServiceAccountToken",
        "containers",
        "dnsConfig",
        "dnsPolicy",
        "enableServiceLinks",
        "ephemeralContainers",
        "hostAliases",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "hostUsers",
        "hostname",
        "hostnameOverride",
        "imagePullSecrets",
        "initContainers",
        "nodeName",
        "nodeSelector",
        "os",
        "overhead",
        "preemptionPolicy",
        "priority",
        "priorityClassName",
        "readinessGates",
        "resourceClaims",
        "resources",
        "restartPolicy",
        "runtimeClassName",
        "schedulerName",
        "schedulingGates",
        "securityContext",
        "serviceAccount",
        "serviceAccountName",
        "setHostnameAsFQDN",
        "shareProcessNamespace",
        "subdomain",
        "terminationGracePeriodSeconds",
        "tolerations",
        "topologySpreadConstraints",
        "volumes",
    ]
)
_CONTAINER: Final = frozenset(
    [
        "args",
        "command",
        "env",
        "envFrom",
        "image",
        "imagePullPolicy",
        "lifecycle",
        "livenessProbe",
        "name",
        "ports",
        "readinessProbe",
        "resizePolicy",
        "resources",
        "restartPolicy",
        "restartPolicyRules",
        "securityContext",
        "startupProbe",
        "stdin",
        "stdinOnce",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "tty",
        "volumeDevices",
        "volumeMounts",
        "workingDir",
    ]
)
_RESOURCES: Final = frozenset({"limits", "requests", "claims"})
_ELSEWHERE: Final = {
    "limits": "resources.limits",
    "requests": "resources.requests",
    "gpu": "resources.limits",
    "gpus": "resources.limits",
    "environment": "env",
    "enviroment": "env",
}
"""Lower-case names that a container does not have, and where what is meant stands."""
_NEAR: Final = 0.8
"""Of a pod only what is that like a field is a slip: an API server that is newer than these lists has more fields."""
_QUOTES: Final = "must be a text: put it into quotes"


def find_slips(manifest: Mapping[str, Any]) -> list[str]:
    """Return what is misspelled in a job or pool, or was meant as a text: words for a person, empty for nothing.

    Args:
        manifest: of any kind; others than jobs and pools have nothing that is looked at.
    """
    fields = RESOURCE_FIELDS.get(manifest["kind"])
    if fields is None:
        return []
    slips = list(_find_unknown(manifest, "", _TOP))
    for path, known in fields.items():
        found: Any = manifest
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        slips += _find_unknown(found, path, known)
    spec = manifest.get("spec")
    template = spec.get("template") if isinstance(spec, Mapping) else None
    slips += [*_find_unknown(template, "spec.template", _TEMPLATE), *_find_misspelled(template, "spec.template")]
    return [*slips, *_find_unquoted(template, "spec.template")]


def _find_unknown(found: object, path: str, known: frozenset[str]) -> Iterator[str]:
    if not isinstance(found, Mapping):
        return
    for name in found:
        if name in known:
            continue
        near = difflib.get_close_matches(str(name), sorted(known), n=1)
        lowered = [other for other in known if other.lower() == str(name).lower().replace("_", "").replace("-", "")]
        hint = f"did you mean {(lowered or near)[0]!r}?" if lowered or near else f"there are {', '.join(sorted(known))}"
        where = f"{path}.{name}" if path else str(name)
        yield f"{quote(where)} is no field, and would be dropped: {hint}"


def _find_misspelled(template: object, path: str) -> Iterator[str]:
    """Find fields of a pod that are nearly one: the API server drops them, and a pod without GPUs trains on."""
    spec = _get(template, "spec")
    parts: list[tuple[object, str, frozenset[str]]] = [(spec, f"{path}.spec", _POD_SPEC)]
    for group in ("initContainers", "containers"):
        for number, container in enumerate(_list(_get(spec, group))):
            where = f"{path}.spec.{group}[{number}]"
            parts += [
                (container, where, _CONTAINER),
                (_get(container, "resources"), f"{where}.resources", _RESOURCES),
            ]
    for found, where, known in parts:
        for name in found if isinstance(found, Mapping) else ():
            if name in known:
                continue
            lowered = {other.lower(): other for other in known}
            plain = str(name).lower().replace("_", "").replace("-", "")
            near = difflib.get_close_matches(plain, sorted(lowered), n=1, cutoff=_NEAR)
            meant = lowered[near[0]] if near else _ELSEWHERE.get(plain) if known is _CONTAINER else None
            if meant:
                yield f"{quote(f'{where}.{name}')} is no field, and would be dropped: did you mean {meant!r}?"


def _find_unquoted(template: object, path: str) -> Iterator[str]:
    """Find numbers and booleans of YAML where a pod has texts; the rest of it is the API server's to check."""
    for part, names in (("metadata", ("labels", "annotations")), ("spec", ("nodeSelector",))):
        for name in names:
            texts = _get(_get(template, part), name)
            if isinstance(texts, Mapping):
                for key, value in texts.items():
                    if not isinstance(value, str):
                        yield f"{path}.{part}.{name}.{key} is {quote(value)}: {_QUOTES}"
    for group in ("initContainers", "containers"):
        for number, container in enumerate(_list(_get(_get(template, "spec"), group))):
            where = f"{path}.spec.{group}[{number}]"
            for name in ("command", "args"):
                for index, value in enumerate(_list(_get(container, name))):
                    if not isinstance(value, str):
                        yield f"{where}.{name}[{index}] is {quote(value)}: {_QUOTES}"
            for variable in _list(_get(container, "env")):
                value = _get(variable, "value")
                if value is not None and not isinstance(value, str):
                    yield f"{where}.env: the value of {quote(_get(variable, 'name'))} is {quote(value)}: {_QUOTES}"


def _get(found: object, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else None


def _list(found: object) -> list[Any]:
    return found if isinstance(found, list) else []
