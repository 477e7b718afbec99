"""Which job or pool a user means: `NAME`, `job/NAME` or `pool/NAME`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from edl.errors import SettingsError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import ELASTIC_JOBS, TEACHER_POOLS, ResourceType

__all__ = ["Target", "find_target", "parse_target", "resource_type"]

_KINDS: Final = {
    **dict.fromkeys(("job", "jobs", "ej", "elasticjob", "elasticjobs", "elasticjobs.edl.io"), "job"),
    **dict.fromkeys(("pool", "pools", "tp", "teacherpool", "teacherpools", "teacherpools.edl.io"), "pool"),
}
_TYPES: Final = {"job": ELASTIC_JOBS, "pool": TEACHER_POOLS}


@dataclass(frozen=True)
class Target:
    """A resource that is there.

    Attributes:
        kind: "job" or "pool".
        name: of the resource.
        resource: as the API has it.
    """

    kind: str
    name: str
    resource: Object

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def type(self) -> ResourceType:
        """Its kind, as the API has it."""
        return _TYPES[self.kind]


def resource_type(kind: str) -> ResourceType:
    """Return a kind as the API has it.

    Args:
        kind: "job" or "pool".
    """
    return _TYPES[kind]


def parse_target(spelled: str) -> tuple[str | None, str]:
    """Read a name with or without a kind.

    Args:
        spelled: by the user.

    Returns:
        "job", "pool" or None where the user did not say; and the name.

    Raises:
        SettingsError: the kind is none, or the name is empty.
    """
    kind, slash, name = spelled.rpartition("/")
    if not name:
        raise SettingsError(f"{spelled!r}: expected the name of a job or pool, job/NAME or pool/NAME")
    if not slash:
        return None, name
    if kind.lower() not in _KINDS:
        raise SettingsError(f"{spelled!r}: expected job/NAME or pool/NAME, and no {kind!r}")
    return _KINDS[kind.lower()], name


def find_target(client: KubeClient, spelled: str) -> Target:
    """Find a job or pool in the client's namespace.

    Args:
        client: of the cluster.
        spelled: by the user.

    Raises:
        SettingsError: there is none, or a job and a pool of this name.
        EDLError: the API server does not answer, or refuses.
    """
    kind, name = parse_target(spelled)
    found = []
    for candidate in (kind,) if kind is not None else _TYPES:
        resource = client.get(_TYPES[candidate], name)
        if resource is not None:
            found.append(Target(candidate, name, resource))
    if len(found) == 1:
        return found[0]
    if found:
        raise SettingsError(f"{name!r} is both a job and a pool: say job/{name} or pool/{name}")
    raise SettingsError(_explain_missing(client, kind, name))


def _explain_missing(client: KubeClient, kind: str | None, name: str) -> str:
    there = [
        str(item.get("metadata", {}).get("name"))
        for candidate in ((kind,) if kind is not None else _TYPES)
        for item in client.list(_TYPES[candidate]).items
    ]
    what = f"no {kind}" if kind is not None else "no job and no pool"
    near = difflib.get_close_matches(name, there, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`edl jobs -A` lists all, of all namespaces"
    return f"there is {what} {name!r} in namespace {client.namespace!r}: {hint}"
