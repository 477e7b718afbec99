"""What `edl submit` makes of its options: the resources, as the API takes them. Pure.

What does not belong here: whether the operator accepts them (`edl.master.kube.resources`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edl.cli.kube.submission.options import RequestedPool, SubmitOptions
from edl.cli.kube.submission.script import SCRIPT_FOLDER, LocalScript
from edl.errors import SettingsError

__all__ = ["API_VERSION", "Submission", "make_submission"]

API_VERSION: Final = "edl.io/v1alpha1"
_CONTAINER: Final = "edl"
_GPU: Final = "nvidia.com/gpu"
_VOLUME: Final = "edl-script"

_Object = dict[str, Any]


@dataclass(frozen=True)
class Submission:
    """The resources of a job, in the order in which they are made.

    Attributes:
        config_map: with the script; None where the image has it.
        pools: that are new.
        job: the ElasticJob.
    """

    config_map: _Object | None
    pools: tuple[_Object, ...]
    job: _Object

    @property
    def objects(self) -> tuple[_Object, ...]:
        """All of them, in order."""
        return (*([self.config_map] if self.config_map is not None else []), *self.pools, self.job)


def make_submission(options: SubmitOptions, script: LocalScript | None) -> Submission:
    """Return the resources of a job.

    Args:
        options: of the user.
        script: to send along; None where the image has it.

    Raises:
        SettingsError: there is no image, or the template is none.
    """
    job = {
        "apiVersion": API_VERSION,
        "kind": "ElasticJob",
        "metadata": {"name": options.name},
        "spec": _job_spec(options, script),
    }
    pools = tuple(_pool(options, demand) for demand in options.teachers if demand.serve is not None)
    return Submission(script.config_map(options.name) if script is not None else None, pools, job)


def _job_spec(options: SubmitOptions, script: LocalScript | None) -> _Object:
    processes = options.processes if options.processes is not None else max(options.gpus, 1)
    program = ["-m", options.script] if options.module else [script.path_in_pod if script else options.script]
    spec: _Object = {
        "run": _literal(["--nproc-per-node", str(processes), *options.run, *program, *options.arguments]),
        "minReplicas": options.workers.least,
        "maxReplicas": options.workers.most,
    }
    for field, value in (
        ("store", options.store),
        ("checkpoint", options.checkpoint),
        ("queue", options.queue),
        ("priorityClassName", options.priority_class),
    ):
        if value:
            spec[field] = value
    environment = dict(options.environment)
    if len(options.teachers) == 1:
        environment.setdefault("EDL_SERVICE", options.teachers[0].service)
    template = _template(options, options.image, options.gpus, environment)
    if script is not None:
        _mount(template, script.config_map_name(options.name))
    return {**spec, "template": template}


def _pool(options: SubmitOptions, demand: RequestedPool) -> _Object:
    assert demand.replicas is not None, "parse_teachers asks for it"
    spec: _Object = {
        "service": demand.service,
        "serve": _literal(demand.serve or ()),
        "minReplicas": demand.replicas.least,
        "maxReplicas": demand.replicas.most,
    }
    if options.store:
        spec["store"] = options.store
    image = options.teacher_image or options.image
    spec["template"] = _template(options, image, options.teacher_gpus, {}, resources=False)
    return {"apiVersion": API_VERSION, "kind": "TeacherPool", "metadata": {"name": demand.service}, "spec": spec}


def _template(
    options: SubmitOptions, image: str, gpus: int, environment: Mapping[str, str], *, resources: bool = True
) -> _Object:
    """Return a PodTemplateSpec: the user's, with what the options say."""
    template: _Object = copy.deepcopy(dict(options.template))
    pod = _child(template, "spec", {})
    containers: list[_Object] = _child(pod, "containers", [])
    if not isinstance(containers, list) or not all(isinstance(item, dict) for item in containers):
        raise SettingsError("--template: spec.containers is no list of containers")
    container = next((item for item in containers if item.get("name") == _CONTAINER), None)
    if container is None:
        if not containers:
            containers.append({"name": _CONTAINER})
        container = containers[0]
    if image:
        container["image"] = image
    if not container.get("image"):
        raise SettingsError("--image is missing: which image has Python, edl and what the script imports?")
    if options.command:
        container["command"] = _literal(options.command)
    if environment:
        _set_environment(container, environment)
    amounts: _Object = {_GPU: str(gpus)} if gpus else {}
    requests = {"cpu": options.cpu, "memory": options.memory} if resources else {}
    found: _Object = _child(container, "resources", {}) if amounts or any(requests.values()) else {}
    _child(found, "limits", {}).update(amounts | ({"memory": options.memory} if requests.get("memory") else {}))
    _child(found, "requests", {}).update({name: value for name, value in requests.items() if value})
    for name in ("limits", "requests"):
        if not found[name]:
            del found[name]
    return template


def _set_environment(container: _Object, environment: Mapping[str, str]) -> None:
    """Set variables of a container; what the template sets under the same names gives way."""
    before: Sequence[_Object] = _child(container, "env", [])
    kept = [item for item in before if item.get("name") not in environment]
    values = zip(environment, _literal(environment.values()), strict=True)
    container["env"] = [*kept, *({"name": name, "value": value} for name, value in values)]


def _literal(texts: Iterable[str]) -> list[str]:
    """Return texts of which Kubernetes makes what was typed: it replaces $(NAME) in a container, and $$ by $."""
    return [text.replace("$", "$$") for text in texts]


def _mount(template: _Object, config_map: str) -> None:
    pod = template["spec"]
    containers = pod["containers"]
    container = next((item for item in containers if item.get("name") == _CONTAINER), containers[0])
    _child(pod, "volumes", []).append({"name": _VOLUME, "configMap": {"name": config_map}})
    _child(container, "volumeMounts", []).append({"name": _VOLUME, "mountPath": SCRIPT_FOLDER, "readOnly": True})


def _child(parent: _Object, name: str, default: Any) -> Any:
    """Return a field, which is made where it is missing."""
    if not isinstance(parent.get(name), type(default)):
        if parent.get(name) is not None:
            raise SettingsError(f"--template: {name} is of type {type(parent[name]).__name__}")
        parent[name] = default
    return parent[name]
