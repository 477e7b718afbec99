"""Names and labels of member pods. A name has the attempt, so a pod on a dead node does not block its successor."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

from edl.master.kube.resources import ElasticJob, MemberOwner

JOB_LABEL: Final = "edl.io/job"
POOL_LABEL: Final = "edl.io/pool"
OWNER_UID_LABEL: Final = "edl.io/owner-uid"
ROLE_LABEL: Final = "edl.io/role"
INDEX_LABEL: Final = "edl.io/index"
TRY_LABEL: Final = "edl.io/try"
MANAGED_BY: Final = ("app.kubernetes.io/managed-by", "edl")
PREVIOUS_SPEC_APPLIES: Final = "until you correct this, the previous spec applies"
"""End of the message of Accepted=False if the operator continues with the spec before an invalid edit."""

MAX_LABEL_CHARS: Final = 63
"""The limit of a DNS-1123 label and of a label's value; the host name of a longer pod name is cut."""
_HASH_CHARS: Final = 8  # 32 bits: with a thousand cut names in a namespace, two collide in 1 of 8,000 clusters
_NOT_IN_A_LABEL: Final = re.compile(r"[^a-z0-9-]")


def shorten_name(name: str, limit: int) -> str:
    """Return a name as a DNS-1123 label of at most `limit` characters; a hash keeps a changed name unique."""
    label = _NOT_IN_A_LABEL.sub("-", name.lower()).strip("-")
    if label == name and len(label) <= limit:
        return label
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_CHARS]
    return f"{label[: limit - _HASH_CHARS - 1].strip('-') or 'x'}-{digest}"


def build_member_name(owner_name: str, role: str, index: int, try_number: int) -> str:
    """Return a member pod's name, `NAME-ROLE-INDEX-TRY`: a DNS-1123 label, the same in every operator."""
    suffix = f"-{role}-{index}-{try_number}"
    name = shorten_name(owner_name, MAX_LABEL_CHARS - len(suffix)) + suffix
    return name if name[0].isalpha() or name[0].isdigit() else f"x{name[1:]}"


def build_member_labels(owner: MemberOwner, role: str, index: int, try_number: int) -> dict[str, str]:
    return {
        JOB_LABEL if isinstance(owner, ElasticJob) else POOL_LABEL: owner.name,
        OWNER_UID_LABEL: owner.uid,
        ROLE_LABEL: role,
        INDEX_LABEL: str(index),
        TRY_LABEL: str(try_number),
        MANAGED_BY[0]: MANAGED_BY[1],
    }


def build_selector(owner: MemberOwner, role: str = "") -> dict[str, str]:
    """Return the labels by which an owner's member pods are selected."""
    return {OWNER_UID_LABEL: owner.uid, **({ROLE_LABEL: role} if role else {})}


def build_owner_reference(owner: MemberOwner) -> dict[str, Any]:
    """Return the owner reference of an owner's objects: they are deleted with it, and never block its deletion."""
    return {
        "apiVersion": owner.resource_type.api_version,
        "kind": owner.resource_type.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
