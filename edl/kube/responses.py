"""Parses responses from the API server: returns an object, or an error that says what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from edl.errors import (
    AccessDeniedError,
    ConflictError,
    EDLError,
    InvalidObjectError,
    KubernetesError,
    QuotaExceededError,
)
from edl.kube.objects import Object
from edl.quoting import listed, shown

_MOST_CAUSES: Final = 8  # an invalid template has one or two


class MissingError(InvalidObjectError):
    """The object does not exist. Methods that can return None return None instead of raising this."""


class NotServedError(InvalidObjectError):
    """The server does not serve the kind of objects, or the namespace does not exist."""


class ExpiredError(KubernetesError):
    """The server no longer keeps the version to continue from (410): list the objects again."""


@dataclass(frozen=True)
class Call:
    """A call to the API server; its verb and resource are those of RBAC, such as `get` and `pods/log`."""

    verb: str
    resource: str
    group: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""

    def __str__(self) -> str:
        place = f" in namespace {shown(self.namespace)}" if self.namespace else ""
        return f"{self.verb} {self.resource}{f' {shown(self.name)}' if self.name else ''}{place}"


def parse_object(call: Call, url: str, body: bytes) -> Object:
    """Parse a successful response; KubernetesError if it is not a JSON object and thus not from an API server."""
    found = _parse_mapping(body)
    if found is None:
        words = shown(body[:200].decode(errors="replace"))
        raise KubernetesError(f"{url}: {call}: not a JSON object, so this is not an API server: {words}")
    return found


def _parse_mapping(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def explain_failure(call: Call, url: str, status: int, body: bytes, retry_after: str = "") -> EDLError:
    """Return the error for a response other than 2xx."""
    status_object = _parse_status(body)
    words = shown(status_object["message"]) if status_object["message"] else shown(body[:200].decode(errors="replace"))
    what = f"{url}: {call}"
    if status == 401:
        return AccessDeniedError(
            f"{what}: the API server rejects the caller (401 {words}): check whether the token or certificate of the"
            " kubeconfig or service account has expired"
        )
    if status == 403:
        return _explain_forbidden(call, what, status_object, words)
    if status == 404:
        if status_object["details"].get("name") and call.verb != "create":
            return MissingError(f"{what}: {words}")
        return NotServedError(
            f"{what}: not found ({words}): check that the namespace exists, and that the cluster serves the kind"
            " (its custom resource definition may not be installed)"
        )
    if status == 409:
        return ConflictError(f"{what}: {words}")
    if status == 410:
        return ExpiredError(f"{what}: the version to continue from is no longer kept (410 {words})")
    if status in (400, 405, 406, 413, 415, 422):
        causes = [f"{cause.get('field', '')}: {cause.get('message', '')}" for cause in _causes(status_object)]
        detail = f" ({listed(causes, _MOST_CAUSES, '; ')})" if len(causes) > 1 else ""
        return InvalidObjectError(f"{what}: refused ({status}): {words}{detail}")
    seconds = _parse_seconds(retry_after, status_object)
    return KubernetesError(
        f"{what}: the API server cannot do this now ({status} {words}): check its load and its health (kubectl get"
        " --raw /readyz)",
        seconds,
    )


def _explain_forbidden(call: Call, what: str, status_object: dict[str, Any], words: str) -> EDLError:
    message = str(status_object["message"])
    if "exceeded quota" in message:
        return QuotaExceededError(f"{what}: {words}")
    if any(cause.get("reason") == "NamespaceTerminating" for cause in _causes(status_object)):
        return InvalidObjectError(f"{what}: the namespace is being deleted, so nothing can be created in it")
    if " cannot " not in message and call.verb in ("create", "patch", "delete") and message:
        # Admission (PodSecurity, a webhook, a LimitRange) refuses with 403 as well.
        return InvalidObjectError(f"{what}: the cluster's admission refuses this: {words}")
    role = f"a Role in namespace {shown(call.namespace)}" if call.namespace else "a ClusterRole"
    return AccessDeniedError(
        f"{what}: not allowed (403). This needs {role} with apiGroups: [{json.dumps(call.group)}], resources:"
        f" [{json.dumps(call.resource)}], verbs: [{json.dumps(call.verb)}], bound to the caller. The"
        f" server says: {words}"
    )


def _parse_status(body: bytes) -> dict[str, Any]:
    """Parse a response's `Status`; if the body is not a `Status`, return a status without a message."""
    found = _parse_mapping(body)
    if found is None or found.get("kind") != "Status":
        return {"message": "", "details": {}}
    details = found.get("details")
    return {"message": str(found.get("message") or ""), "details": details if isinstance(details, dict) else {}}


def _causes(status_object: dict[str, Any]) -> list[dict[str, Any]]:
    causes = status_object["details"].get("causes")
    return [cause for cause in causes if isinstance(cause, dict)] if isinstance(causes, list) else []


def _parse_seconds(retry_after: str, status_object: dict[str, Any]) -> float:
    hint = retry_after or status_object["details"].get("retryAfterSeconds") or 0
    try:
        seconds = float(hint)
    except (TypeError, ValueError):
        return 0.0
    return seconds if 0 < seconds < 3600 else 0.0
