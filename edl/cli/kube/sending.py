"""Checks a job's resources and creates them in the cluster. If one is refused, those created before it are deleted.

If the API server does not respond, it may have created the object, so nothing is deleted: the error lists what exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from edl.cli.kube.manifests import RequestedPool, find_slips, manifest_type
from edl.cli.kube.workloads import SCRIPT_LABEL
from edl.errors import ConflictError, EDLError, InvalidObjectError, KubernetesError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import CONFIG_MAPS, ELASTIC_JOBS, TEACHER_POOLS
from edl.master.kube.resources import parse_elastic_job, parse_teacher_pool

_ANY_STORE: Final = "edl://store"
"""Store for checking a job that names none: the operator's is unknown here."""


def check_manifests(manifests: Sequence[Object]) -> None:
    """Refuse specs that the operator would refuse, and fields that the API server would drop without an error."""
    for manifest in manifests:
        kind = manifest_type(manifest)
        if kind == CONFIG_MAPS:
            continue
        parse = parse_elastic_job if kind == ELASTIC_JOBS else parse_teacher_pool
        found = parse(manifest, _ANY_STORE, strict=True)
        problems = [problem.message for problem in found] if isinstance(found, tuple) else []
        if words := [*find_slips(manifest), *problems]:
            raise SettingsError(f"{kind.kind} {manifest['metadata']['name']!r}: {'; '.join(words)}")


def create_all(
    client: KubeClient, manifests: Sequence[Object], namespace: str, tell: Callable[[str], None]
) -> list[Object]:
    """Create resources in order, and return the API's responses. If one is refused, delete the others.

    A job's script is created before it; the job then becomes its owner. Raises ConflictError if a name exists.
    """
    made: list[Object] = []
    try:
        for manifest in manifests:
            where = manifest["metadata"].get("namespace") or namespace
            made.append(_create(client, manifest, where))
            tell(f"{_words(manifest)} created in namespace {where}")
        _own_scripts(client, made)
    except KubernetesError as exc:
        doubtful = [_words(manifest) for manifest in manifests[len(made) : len(made) + 1]]
        there = [f"{words} may have been created" for words in doubtful] + [f"{_words(item)} exists" for item in made]
        raise KubernetesError(f"{exc}; {', '.join(there)}: `edl delete` removes jobs and pools") from exc
    except EDLError:
        for item in reversed(made):  # a job needs its script and pools until it is deleted
            metadata = item["metadata"]
            try:
                client.delete(manifest_type(item), metadata["name"], metadata["namespace"], uid=metadata["uid"])
            except EDLError as exc:  # the refusal is the error to raise
                tell(f"{_words(item)} could not be deleted again, nor anything created before it: {exc}")
                break
            tell(f"{_words(item)} deleted again")
        raise
    return made


def find_pools(client: KubeClient, demands: Sequence[RequestedPool]) -> dict[str, Object]:
    """Return the existing pools that a job uses, by name."""
    pools: dict[str, Object] = {}
    for demand in demands:
        if demand.serve is not None:
            continue
        found = client.get(TEACHER_POOLS, demand.service)
        if found is None:
            raise SettingsError(
                f"--teachers {demand.service}: no pool in namespace {client.namespace!r} has this name; to "
                f"create one, add --serve '{demand.service}=--torch-factory …' (arguments of `edl serve`)"
            )
        pools[demand.service] = found
    return pools


def _create(client: KubeClient, manifest: Object, namespace: str) -> Object:
    kind = manifest_type(manifest)
    name = manifest["metadata"]["name"]
    try:
        try:
            return client.create(kind, manifest, namespace)
        except ConflictError:
            if kind != CONFIG_MAPS or not _delete_orphan(client, manifest, namespace):
                raise
            return client.create(kind, manifest, namespace)
    except ConflictError as exc:
        remedy = {
            ELASTIC_JOBS: f"choose another --name, or `edl delete job/{name} --wait` first",
            TEACHER_POOLS: f"omit --serve to use it as it is, or `edl delete pool/{name} --wait` first",
        }.get(kind, "the job of this name owns it, or another program created it: choose another --name")
        raise ConflictError(f"{_words(manifest)} already exists in namespace {namespace}: {remedy}") from exc
    except InvalidObjectError as exc:
        raise InvalidObjectError(f"{_words(manifest)}: {exc}") from exc


def _delete_orphan(client: KubeClient, manifest: Object, namespace: str) -> bool:
    """Delete a script whose job is gone: a killed submission left it, or its garbage collection is pending."""
    name, job = manifest["metadata"]["name"], (manifest["metadata"].get("labels") or {}).get(SCRIPT_LABEL)
    found = client.get(CONFIG_MAPS, name, namespace)
    metadata = found["metadata"] if found is not None else {}
    if not job or (metadata.get("labels") or {}).get(SCRIPT_LABEL) != job:
        return False
    owners = metadata.get("ownerReferences") or []
    if any((owner["kind"], owner["name"]) != (ELASTIC_JOBS.kind, job) for owner in owners):
        return False
    if client.get(ELASTIC_JOBS, job, namespace) is not None:
        return False
    return client.delete(CONFIG_MAPS, name, namespace, uid=metadata["uid"])


def _own_scripts(client: KubeClient, made: Sequence[Object]) -> None:
    """Make the job the owner of its script, so that deleting the job deletes it."""
    jobs = {item["metadata"]["name"]: item for item in made if manifest_type(item) == ELASTIC_JOBS}
    for item in made:
        metadata: dict[str, Any] = item["metadata"]
        job = jobs.get((metadata.get("labels") or {}).get(SCRIPT_LABEL))
        if manifest_type(item) == CONFIG_MAPS and job is not None:
            owner = {
                "apiVersion": ELASTIC_JOBS.api_version,
                "kind": ELASTIC_JOBS.kind,
                "name": job["metadata"]["name"],
                "uid": job["metadata"]["uid"],
            }
            patch = {"metadata": {"ownerReferences": [owner]}}
            client.patch(CONFIG_MAPS, metadata["name"], patch, metadata["namespace"])


def _words(manifest: Object) -> str:
    names = {ELASTIC_JOBS: "job", TEACHER_POOLS: "pool", CONFIG_MAPS: "configmap"}
    return f"{names[manifest_type(manifest)]}/{manifest['metadata']['name']}"
