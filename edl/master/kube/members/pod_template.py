"""Builds a member pod from its owner's pod template, with the operator's additions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final

from edl.kube.objects import Object, format_bytes, parse_quantity
from edl.master.kube.members.pods import (
    build_member_labels,
    build_member_name,
    build_owner_reference,
    find_main_container,
    get_list,
    get_mapping,
    get_text,
)
from edl.master.kube.members.records import MemberRecord
from edl.master.kube.resources import MemberOwner

POD_ADDRESS: Final = "$(EDL_POD_IP)"
"""In a member's `args`: the pod's own address, which the kubelet fills in."""
DEFAULT_COMMAND: Final = ("edl",)
TERMINATION_LOG: Final = "/dev/termination-log"
UNREACHABLE_S: Final = 30
"""A pod is removed from an unresponsive node after this time, instead of Kubernetes' 300 s, because a job waits for the
pod. If this time were much shorter, the node would lose its pods whenever its kubelet restarts."""
_LOST_NODE_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def build_member_pod(
    owner: MemberOwner,
    role: str,
    index: int,
    record: MemberRecord,
    args: Sequence[str],
    *,
    labels: Mapping[str, str],
    annotations: Mapping[str, str] = MappingProxyType({}),
    resources: Mapping[str, Any] | None = None,
) -> Object:
    """Return the pod of a member's next attempt: equal inputs give equal objects.

    `args` are the arguments of `edl`, from the subcommand on. `labels` and `annotations` are added to those of the
    template. `resources` replaces the resources of the template's main container; the template's sidecars are then left
    out.
    """
    template = copy.deepcopy(dict(owner.template))
    metadata, spec = dict(get_mapping(template, "metadata")), dict(get_mapping(template, "spec"))
    containers = [dict(item) for item in spec.get("containers") or [] if isinstance(item, Mapping)] or [{}]
    name = find_main_container(spec).get("name")
    main = next((container for container in containers if container.get("name") == name), containers[0])
    if resources is not None:
        main["resources"] = copy.deepcopy(dict(resources))
        containers = [main]
    spec["containers"] = containers
    spec["restartPolicy"] = "Never"
    spec["terminationGracePeriodSeconds"] = owner.grace_period_s
    if owner.priority_class_name:
        spec["priorityClassName"] = owner.priority_class_name
        spec.pop("priority", None)
    _set_main_container(main, args, owner.store)
    _add_volumes(spec, main)
    _add_security_defaults(spec, main)
    _withhold_api_access(spec)
    _add_tolerations(spec)
    _multiply_memory(main, record.memory_factor)
    _exclude_nodes(spec, [item.node for item in record.excluded_nodes])
    own_labels = build_member_labels(owner, role, index, record.try_number)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": build_member_name(owner.name, role, index, record.try_number),
            "namespace": owner.namespace,
            "labels": {**get_mapping(metadata, "labels"), **labels, **own_labels},
            "annotations": {**get_mapping(metadata, "annotations"), **annotations},
            "ownerReferences": [build_owner_reference(owner)],
        },
        "spec": spec,
    }


def has_memory_quantity(owner: MemberOwner) -> bool:
    """Whether an owner's template requests or limits memory, so that a relaunch can raise the amount."""
    resources = get_mapping(find_main_container(get_mapping(owner.template, "spec")), "resources")
    return any("memory" in get_mapping(resources, kind) for kind in ("requests", "limits"))


def _set_main_container(main: dict[str, Any], args: Sequence[str], store: str) -> None:
    main.setdefault("command", list(DEFAULT_COMMAND))
    main["args"] = list(args)
    log = main.setdefault("terminationMessagePath", TERMINATION_LOG)
    main.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")  # before EDL starts, there is only a log
    own: list[dict[str, Any]] = [
        {"name": "EDL_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "EDL_TERMINATION_LOG", "value": log},
    ]
    fixed = {item["name"] for item in own}  # `args` and the evidence of an end rely on these
    found = _read_list(main, "env")
    if found is None:
        return
    given = [item for item in found if get_text(item, "name") not in fixed]
    if store and all(get_text(item, "name") != "EDL_DISCOVERY" for item in given):
        own.append({"name": "EDL_DISCOVERY", "value": store})
    main["env"] = [*own, *given]


def _read_list(parent: Mapping[str, Any], key: str) -> list[Any] | None:
    """Return a list in a template; None if the value is not a list, which the API server will refuse."""
    value = parent.get(key)
    return list(value) if isinstance(value, list) else [] if value is None else None


def _add_volumes(spec: dict[str, Any], main: dict[str, Any]) -> None:
    """Add a /dev/shm as large as the container's memory, and a /tmp if the root filesystem is read-only.

    A container's default /dev/shm has 64 MiB, too little for checkpoints in memory and PyTorch's loaders.
    """
    mounts, volumes = _read_list(main, "volumeMounts"), _read_list(spec, "volumes")
    if mounts is None or volumes is None:
        return
    wanted: list[tuple[str, str, dict[str, Any]]] = [("edl-shm", "/dev/shm", {"medium": "Memory"})]
    if get_mapping(main, "securityContext").get("readOnlyRootFilesystem") is True:
        wanted.append(("edl-tmp", "/tmp", {}))
    for name, path, source in wanted:
        taken = any(get_text(mount, "mountPath").rstrip("/") == path for mount in mounts)
        if not taken and all(get_text(volume, "name") != name for volume in volumes):
            mounts.append({"name": name, "mountPath": path})
            volumes.append({"name": name, "emptyDir": source})
    main["volumeMounts"] = mounts
    spec["volumes"] = volumes


def _add_security_defaults(spec: dict[str, Any], main: dict[str, Any]) -> None:
    """Add security settings that do not affect any program, if the template does not set them.

    `runAsNonRoot` and dropped capabilities would break images built for root.
    """
    if not spec.get("securityContext"):
        spec["securityContext"] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if not main.get("securityContext"):
        main["securityContext"] = {"allowPrivilegeEscalation": False}


def _withhold_api_access(spec: dict[str, Any]) -> None:
    if "serviceAccountName" not in spec:
        spec.setdefault("automountServiceAccountToken", False)


def _add_tolerations(spec: dict[str, Any]) -> None:
    tolerations = _read_list(spec, "tolerations")
    if tolerations is None:
        return
    for key in _LOST_NODE_TAINTS:
        if not any(_tolerates(item, key) for item in tolerations):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": UNREACHABLE_S}
            )
    spec["tolerations"] = tolerations


def _tolerates(toleration: object, key: str) -> bool:
    if not isinstance(toleration, Mapping):
        return False
    return toleration.get("effect") in (None, "", "NoExecute") and toleration.get("key") in (None, "", key)


def _multiply_memory(main: dict[str, Any], factor: float) -> None:
    if factor == 1.0:
        return
    resources = {kind: dict(get_mapping(main.get("resources"), kind)) for kind in ("requests", "limits")}
    for amounts in resources.values():
        if "memory" in amounts:
            try:
                amount = parse_quantity(amounts["memory"]) * Decimal(str(factor))
            except ValueError:
                continue  # the API server reports the error in its own words
            amounts["memory"] = format_bytes(Decimal(int(amount)))
    others = {kind: value for kind, value in get_mapping(main, "resources").items() if kind not in resources}
    main["resources"] = {**others, **{kind: amounts for kind, amounts in resources.items() if amounts}}


def _exclude_nodes(spec: dict[str, Any], nodes: Sequence[str]) -> None:
    if not nodes:
        return
    without = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]  # one name each
    affinity = dict(get_mapping(spec, "affinity"))
    of_nodes = dict(get_mapping(affinity, "nodeAffinity"))
    required = dict(get_mapping(of_nodes, "requiredDuringSchedulingIgnoredDuringExecution"))
    terms = [dict(term) for term in get_list(required, "nodeSelectorTerms") or [{}]]
    for term in terms:
        term["matchFields"] = [*(term.get("matchFields") or []), *without]
    required["nodeSelectorTerms"] = terms
    of_nodes["requiredDuringSchedulingIgnoredDuringExecution"] = required
    affinity["nodeAffinity"] = of_nodes
    spec["affinity"] = affinity
