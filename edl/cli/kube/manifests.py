"""The resources that `edl submit` sends: built from its options or read from a file, and checked for slips.

Values of options are checked while argparse parses them, so that the error names the option.
`edl.master.kube.resources` checks the rest as the operator will. The last section here finds misspelled fields: the API
server silently drops fields that the CRD lacks, and does not check a pod's template.
"""

from __future__ import annotations

import base64
import copy
import difflib
import hashlib
import json
import re
import shlex
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from edl.cli.kube.workloads import SCRIPT_LABEL
from edl.errors import SettingsError
from edl.kube.objects import Object, parse_quantity
from edl.kube.resource_types import CONFIG_MAPS, ELASTIC_JOBS, TEACHER_POOLS, ResourceType
from edl.master.kube.members.pods import MANAGED_BY
from edl.quoting import did_you_mean, quote

V = TypeVar("V")

SCRIPT_FOLDER: Final = "/edl/script"
"""Folder of the script in pods."""
MAX_SCRIPT_BYTES: Final = 700_000
"""A ConfigMap has at most 1 MiB, including names and JSON escapes; a binary file takes 4/3 of its size."""
MAX_NAME: Final = 52
"""Maximum length of a job's name: the same as for a CronJob's name, so that a CronJob can create jobs."""
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIGEST_CHARS: Final = 10
"""Characters of the digest in a ConfigMap's name: 40 bits distinguish the scripts of one job."""
_IN_IMAGE: Final = "put it into the image, and give its path there with --script-in-image"
_CONTAINER: Final = "edl"
_GPU: Final = "nvidia.com/gpu"
_VOLUME: Final = "edl-script"
_TYPES: Final = {(item.api_version, item.kind): item for item in (ELASTIC_JOBS, TEACHER_POOLS, CONFIG_MAPS)}
_INT: Final = r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)"  # as go-yaml, which kubectl uses
_FLOAT: Final = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_PREFIXES: Final = {"0b": 2, "0o": 8, "0x": 16}
_PLAIN: Final = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)\Z)[a-z/][a-z0-9/._-]*", re.IGNORECASE)
"""Strings that every YAML parser reads as strings even without quotes; kubectl reads 1e-3 as a number and y as a
boolean."""


# --- Values of options ---


@dataclass(frozen=True)
class ReplicaRange:
    """The minimum and maximum number of members."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def replica_range(lowest: int) -> Callable[[str], ReplicaRange]:
    """Return an option type: "MIN:MAX", or a number for both, with a minimum of at least `lowest`."""
    return lambda text: _read_range(text, text, lowest)


def _read_range(spelled: str, option_value: str, lowest: int) -> ReplicaRange:
    """Read a range from `spelled`. Errors quote `option_value`, which may also contain a pool's name."""
    found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", spelled)
    if found is None:
        raise ArgumentTypeError(f"{option_value!r}: expected a number, or MIN:MAX as in 1:8")
    least, most = int(found[1]), int(found[2] or found[1])
    if least < lowest or most < max(least, 1):
        words = f"the minimum must be at least {lowest}, and the maximum at least 1 and not below the minimum"
        raise ArgumentTypeError(f"{option_value!r}: {words}")
    return ReplicaRange(least, most)


def resource_name(text: str) -> str:
    """Return the name of a job or pool; ArgumentTypeError if no resource can have it."""
    if len(text) > MAX_NAME or not _LABEL.fullmatch(text):
        raise ArgumentTypeError(
            f"{text!r}: expected at most {MAX_NAME} characters of a-z, 0-9 and '-', beginning and ending with a letter "
            "or digit, since Kubernetes names pods after it"
        )
    return text


def split_words(text: str) -> tuple[str, ...]:
    """Split an option's value as a shell does."""
    try:
        return tuple(shlex.split(text))
    except ValueError as exc:
        raise ArgumentTypeError(f"{text!r}: {exc}: quote the value as in a shell") from exc


def quantity(text: str) -> str:
    """Return an amount of CPUs or memory as Kubernetes writes it."""
    try:
        amount = parse_quantity(text)
    except ValueError as exc:
        raise ArgumentTypeError(f"{text!r}: expected an amount such as 500m, 2 or 16Gi") from exc
    if amount <= 0:
        raise ArgumentTypeError(f"{text!r}: must be above 0")
    return text


def variable(text: str) -> tuple[str, str]:
    """Read "NAME=VALUE"."""
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise ArgumentTypeError(f"{text!r}: expected NAME=VALUE; a name has letters, digits and '_'")
    return name, value


def pool_range(text: str) -> tuple[str, ReplicaRange | None]:
    """Read "SERVICE=MIN:MAX" for a new pool, or "SERVICE" for an existing one."""
    service, equals, spelled = text.partition("=")
    return resource_name(service), _read_range(spelled, text, 0) if equals else None


def pool_command(text: str) -> tuple[str, tuple[str, ...]]:
    """Read "SERVICE=ARGUMENTS"."""
    service, equals, arguments = text.partition("=")
    if not equals or not arguments.strip():
        raise ArgumentTypeError(f"{text!r}: expected SERVICE=ARGUMENTS, with arguments of `edl serve`")
    return service, split_words(arguments)


def by_name(option: str, given: Iterable[tuple[str, V]]) -> dict[str, V]:
    """Return the values of a repeatable option by name; SettingsError if a name is given twice."""
    found: dict[str, V] = {}
    for name, value in given:
        if name in found:
            raise SettingsError(f"{option} {name}=… is given twice")
        found[name] = value
    return found


@dataclass(frozen=True)
class RequestedPool:
    """Teachers that a job uses; the pool has the service's name.

    `serve` has arguments of `edl serve` for a new pool of `replicas`; both are None for an existing pool.
    """

    service: str
    replicas: ReplicaRange | None
    serve: tuple[str, ...] | None


def requested_pools(
    ranges: Mapping[str, ReplicaRange | None], commands: Mapping[str, tuple[str, ...]]
) -> tuple[RequestedPool, ...]:
    """Join the values of `--teachers` and `--serve`, by service."""
    for service in [*ranges, *commands]:
        replicas, serve = ranges.get(service), commands.get(service)
        if serve is not None and replicas is None:
            raise SettingsError(f"--serve {service}=…: also say how many teachers, as in --teachers {service}=0:4")
        if serve is None and replicas is not None:
            change = f"`edl scale pool/{service} auto --min {replicas.least} --max {replicas.most}`"
            raise SettingsError(
                f"--teachers {service}={replicas}: bounds are for a new pool: add --serve '{service}=…'. To set "
                f"those of an existing pool: {change}"
            )
    return tuple(RequestedPool(service, replicas, commands.get(service)) for service, replicas in ranges.items())


# --- The script ---


@dataclass(frozen=True)
class LocalScript:
    """A script on this machine; `path` is as the user typed it."""

    path: str
    name: str
    content: bytes

    def config_map_name(self, job: str) -> str:
        """Return the name of the script's ConfigMap, which depends on the content.

        A kubelet caches an immutable ConfigMap by name while any pod on its node uses it. If the name did not depend on
        the content, a job recreated under the same name while the old job's pods are ending would run the old script.
        """
        digest = hashlib.sha256(self.name.encode() + b"\0" + self.content).hexdigest()
        return f"{job}-script-{digest[:_DIGEST_CHARS]}"

    def config_map(self, job: str) -> dict[str, object]:
        """Return the ConfigMap, without a namespace. It is immutable, so no pod or worker can change a job's script."""
        try:
            data = {"data": {self.name: self.content.decode()}}
        except UnicodeDecodeError:
            data = {"binaryData": {self.name: base64.b64encode(self.content).decode()}}
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": self.config_map_name(job),
                "labels": {SCRIPT_LABEL: job, **dict([MANAGED_BY])},
            },
            **data,
            "immutable": True,
        }

    @property
    def path_in_pod(self) -> str:
        """Path of the script in the job's pods."""
        return f"{SCRIPT_FOLDER}/{self.name}"


def read_script(path: str) -> LocalScript:
    """Read a script on this machine."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: there is no such file here; for a script in the image use --script-in-image"
        ) from None
    except OSError as exc:
        raise SettingsError(f"{path} cannot be read: {exc.strerror}") from exc
    if len(content) > MAX_SCRIPT_BYTES:
        raise SettingsError(
            f"{path} has more than {MAX_SCRIPT_BYTES:,} bytes, but a ConfigMap holds less than 1 MiB: {_IN_IMAGE}"
        )
    name = Path(path).name
    if not all(char.isascii() and (char.isalnum() or char in "-_.") for char in name) or len(name) > 200:
        raise SettingsError(f"{name!r}: names in a ConfigMap have only letters, digits, '-_.': rename the file")
    return LocalScript(path, name, content)


# --- Resources from options ---


def make_submission(options: Namespace, script: LocalScript | None) -> list[Object]:
    """Return the resources of a job in creation order: its script, new pools, and the job.

    `options` are those of `edl submit`. If an option is not given, the template, the operator or the image decides.
    """
    job = _resource(ELASTIC_JOBS, options.name, _job_spec(options, script))
    pools = [_pool(options, demand) for demand in options.teachers if demand.serve is not None]
    return [*([script.config_map(options.name)] if script is not None else []), *pools, job]


def _resource(kind: ResourceType, name: str, spec: Object) -> Object:
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name}, "spec": spec}


def _job_spec(options: Namespace, script: LocalScript | None) -> Object:
    processes = options.nproc_per_node or max(options.gpus, 1)
    program = ["-m", options.script] if options.module else [script.path_in_pod if script else options.script]
    spec: Object = {
        "run": _literal(["--nproc-per-node", str(processes), *options.run, *program, *options.arguments]),
        "minReplicas": options.workers.least,
        "maxReplicas": options.workers.most,
    }
    for name, value in (
        ("store", options.store),
        ("checkpoint", options.checkpoint),
        ("queue", options.queue),
        ("priorityClassName", options.priority_class),
    ):
        if value:
            spec[name] = value
    environment = dict(options.env)
    if len(options.teachers) == 1:
        environment.setdefault("EDL_SERVICE", options.teachers[0].service)
    template = _template(options, options.image, options.gpus, environment)
    if script is not None:
        _mount(template, script.config_map_name(options.name))
    return {**spec, "template": template}


def _pool(options: Namespace, demand: RequestedPool) -> Object:
    assert demand.replicas is not None, "requested_pools asks for it"
    spec: Object = {
        "service": demand.service,
        "serve": _literal(demand.serve or ()),
        "minReplicas": demand.replicas.least,
        "maxReplicas": demand.replicas.most,
    }
    if options.store:
        spec["store"] = options.store
    image = options.teacher_image or options.image
    spec["template"] = _template(options, image, options.teacher_gpus, {}, resources=False)
    return _resource(TEACHER_POOLS, demand.service, spec)


def _template(
    options: Namespace, image: str, gpus: int, environment: Mapping[str, str], *, resources: bool = True
) -> Object:
    """Return a PodTemplateSpec: the user's template with the options applied."""
    template: Object = copy.deepcopy(options.template)
    pod = _child(template, "spec", {})
    containers: list[Object] = _child(pod, "containers", [])
    if not isinstance(containers, list) or not all(isinstance(item, dict) for item in containers):
        raise SettingsError("--template: spec.containers is not a list of containers")
    if not containers:
        containers.append({"name": _CONTAINER})
    container = _main_container(containers)
    if image:
        container["image"] = image
    if not container.get("image"):
        raise SettingsError("--image is missing: which image has Python, edl and what the script imports?")
    if environment:
        _set_environment(container, environment)
    amounts: Object = {_GPU: str(gpus)} if gpus else {}
    requests = {"cpu": options.cpu, "memory": options.memory} if resources else {}
    found: Object = _child(container, "resources", {}) if amounts or any(requests.values()) else {}
    _child(found, "limits", {}).update(amounts | ({"memory": options.memory} if requests.get("memory") else {}))
    _child(found, "requests", {}).update({name: value for name, value in requests.items() if value})
    for name in ("limits", "requests"):
        if not found[name]:
            del found[name]
    return template


def _main_container(containers: Sequence[Object]) -> Object:
    return next((item for item in containers if item.get("name") == _CONTAINER), containers[0])


def _set_environment(container: Object, environment: Mapping[str, str]) -> None:
    """Set a container's variables; they replace the template's variables of the same name."""
    before: Sequence[Object] = _child(container, "env", [])
    kept = [item for item in before if item.get("name") not in environment]
    values = zip(environment, _literal(environment.values()), strict=True)
    container["env"] = [*kept, *({"name": name, "value": value} for name, value in values)]


def _literal(texts: Iterable[str]) -> list[str]:
    """Escape strings: in containers, Kubernetes expands $(NAME) and replaces $$ with $."""
    return [text.replace("$", "$$") for text in texts]


def _mount(template: Object, config_map: str) -> None:
    pod = template["spec"]
    container = _main_container(pod["containers"])
    _child(pod, "volumes", []).append({"name": _VOLUME, "configMap": {"name": config_map}})
    _child(container, "volumeMounts", []).append({"name": _VOLUME, "mountPath": SCRIPT_FOLDER, "readOnly": True})


def _child(parent: Object, name: str, default: Any) -> Any:
    if not isinstance(parent.get(name), type(default)):
        if parent.get(name) is not None:
            expected = type(default).__name__
            raise SettingsError(f"--template: {name} is of type {type(parent[name]).__name__}; expected {expected}")
        parent[name] = default
    return parent[name]


# --- Resources in files ---


def manifest_type(manifest: Mapping[str, Any]) -> ResourceType:
    """Return the kind of a manifest that `read_manifests` has checked."""
    return _TYPES[manifest["apiVersion"], manifest["kind"]]


def read_manifests(path: str) -> list[Object]:
    """Read the jobs, pools and ConfigMaps from a file, or from standard input ("-")."""
    found: list[Any] = []
    for item in _load_all(path):
        is_list = isinstance(item, dict) and item.get("kind") == "List" and isinstance(item.get("items"), list)
        found += item["items"] if is_list else [] if item is None else [item]
    if not found:
        raise SettingsError(f"{path}: contains no manifest")
    for number, item in enumerate(found, 1):
        _check_kind(path, number, item)
    return found


def load_template(path: str) -> dict[str, object]:
    """Read a PodTemplateSpec, or a Pod, from a file."""
    documents = _load_all(path)
    found = documents[0] if len(documents) == 1 else None
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise SettingsError(f"{path}: expected a single pod template: spec, and optionally metadata")
    return {name: found[name] for name in ("metadata", "spec") if name in found}


def dump_manifests(manifests: Iterable[Mapping[str, Any]]) -> str:
    """Return manifests as YAML for `kubectl apply -f -`."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        """Writes multi-line strings as readable blocks, and quotes strings that a parser may misread."""

    def represent(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else "'"
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    dumped = yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, default_flow_style=False, explicit_start=True)
    return str(dumped)


def _load_all(path: str) -> list[Any]:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """Reads numbers as kubectl does. PyYAML reads 12:30 as 750, a day as a date, and 1e-3 as a string."""

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in ("int", "float", "timestamp")]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in (("int", _INT), ("float", _FLOAT)):
        whole = re.compile(rf"(?:{pattern})\Z")
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", whole, list("-+.0123456789"))
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: _parse_int(loader.construct_scalar(node)))
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"{path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{path} is not UTF-8 text") from exc
    try:
        documents = list(yaml.load_all(text, Loader=Loader))
        json.dumps(documents, allow_nan=False)  # raises for values that JSON lacks
    except (yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError) as exc:
        raise SettingsError(f"{path} is not a YAML manifest: {exc}") from exc
    return documents


def _parse_int(spelled: str) -> int:
    digits = spelled.replace("_", "").lstrip("+-")
    base = _PREFIXES.get(digits[:2], 8 if digits.startswith("0") and digits != "0" else 10)
    number = int(digits[2:] if digits[:2] in _PREFIXES else digits, base)
    return -number if spelled.startswith("-") else number


def _check_kind(path: str, number: int, item: Any) -> None:
    if not isinstance(item, dict):
        raise SettingsError(f"{path}: manifest {number} is {type(item).__name__}; expected an object")
    kind = item.get("apiVersion"), item.get("kind")
    if not all(isinstance(word, str) for word in kind) or kind not in _TYPES:
        known = ", ".join(f"{api} {name}" for api, name in _TYPES)
        raise SettingsError(
            f"{path}: manifest {number} is {kind[0]} {kind[1]}, but `edl submit` accepts only {known}: "
            "`kubectl apply -f` accepts all kinds"
        )
    metadata = item.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise SettingsError(f"{path}: manifest {number} ({kind[1]}) has no metadata.name")


# --- Slips that neither the operator nor the API server refuses ---

_TOP: Final = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})
_AMOUNTS: Final = ("limits", "requests", "overhead", "sizeLimit", "divisor")
"""Fields of a pod that are quantities, which may be numbers or strings."""
_ELSEWHERE: Final = {
    **dict.fromkeys(("limits", "gpu", "gpus"), "resources.limits"),
    "requests": "resources.requests",
    **dict.fromkeys(("environment", "enviroment"), "env"),
}
"""For lower-case names that are not fields of a container, the field that the user probably meant."""
_NEAR: Final = 0.8
"""A pod's unknown field counts as misspelled only if it is this similar to a known field, because newer servers have
more fields."""


def find_slips(manifest: Mapping[str, Any]) -> list[str]:
    """Describe misspelled fields of a job or pool, and values that should be strings but are not."""
    spec = manifest.get("spec")
    template = spec.get("template") if isinstance(spec, Mapping) else None
    slips = []
    for path, found, known in (("", manifest, _TOP), ("spec.template.", template, ("metadata", "spec"))):
        for name in (name for name in (found if isinstance(found, Mapping) else ()) if name not in known):
            near = did_you_mean(str(name), known)
            slips.append(f"{quote(f'{path}{name}')} is an unknown field, and would be dropped{near}")
    return [*slips, *_find_pod_slips(template, "V1PodTemplateSpec", "spec.template")]


def _find_pod_slips(found: Any, kind: str, path: str) -> Iterator[str]:
    """Compare a part of a pod with its type in the Kubernetes client's models, which are generated from the API."""
    from kubernetes.client import models

    if kind == "str" and isinstance(found, (bool, int, float)):
        yield f"{path} is {quote(found)}: expected a string: put it in quotes"
    elif kind.startswith("list[") and isinstance(found, list):
        for number, item in enumerate(found):
            yield from _find_pod_slips(item, kind[5:-1], f"{path}[{number}]")
    elif kind.startswith("dict(str, ") and isinstance(found, Mapping):
        for name, item in found.items():
            yield from _find_pod_slips(item, kind[10:-1], f"{path}.{name}")
    model = getattr(models, kind, None)
    if model is None or not isinstance(found, Mapping):
        return
    types = {name: model.openapi_types[key] for key, name in model.attribute_map.items()}
    by_lower = {name.lower(): name for name in types}
    for name, item in found.items():
        if name in types:
            if name not in _AMOUNTS:
                yield from _find_pod_slips(item, types[name], f"{path}.{name}")
            continue
        plain = str(name).lower().replace("_", "").replace("-", "")
        near = difflib.get_close_matches(plain, by_lower, n=1, cutoff=_NEAR)
        meant = by_lower[near[0]] if near else _ELSEWHERE.get(plain) if kind == "V1Container" else None
        if meant:
            yield f"{quote(f'{path}.{name}')} is an unknown field, and would be dropped; did you mean {meant!r}?"
