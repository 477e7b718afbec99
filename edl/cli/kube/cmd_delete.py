"""`edl delete`: delete jobs and pools on Kubernetes, with all that is theirs; asks nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Final

from edl.backoff import Backoff
from edl.cli._changes import printable
from edl.cli.kube.connection import add_cluster_options, command_parser, open_cluster
from edl.cli.kube.member_logs.follower import list_pods
from edl.cli.kube.submission.script import SCRIPT_LABEL
from edl.cli.kube.submission.sending import SUBMISSION_MARK
from edl.cli.kube.targets import Target, find_target
from edl.errors import AccessDeniedError, ConflictError, EDLError, KubernetesError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import CONFIG_MAPS

__all__ = ["main"]

_TIMEOUT_S: Final = 120.0
"""Of `--wait`: a member has 30 s to end unless its job says otherwise, and a node that is away some more."""

_DESCRIPTION = """\
Deletes jobs and pools, without a question. Kubernetes ends their pods within their grace period and removes what
belongs to them; what they registered ends with its lease. Checkpoints stay where they are."""

_EXAMPLES = """\
examples:
  edl delete first-job
  edl delete job/first-job pool/digits --wait     until their last pod is gone"""


def main(argv: Sequence[str]) -> int:
    """Run `edl delete`."""
    parser = command_parser("delete", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help="NAME, job/NAME or pool/NAME")
    add("--wait", action="store_true", help="return when all of it is gone")
    add("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help="of --wait (default: 120)")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    if not options.timeout > 0:
        raise SettingsError(f"--timeout {options.timeout}: must be above 0")
    with open_cluster(options) as client:
        targets = [find_target(client, name) for name in options.names]  # all, before any is gone
        for target in targets:
            _delete(client, target)
            print(printable(f"{target}: deleted"), flush=True)
        if options.wait:
            _wait(client, targets, options.timeout)
    return 0


def _delete(client: KubeClient, target: Target) -> None:
    """Delete the very resource that was found; another of its name that came meanwhile stays."""
    uid = str(target.resource.get("metadata", {}).get("uid") or "")
    scripts = _list_scripts(client, target) if target.kind == "job" else []
    try:
        client.delete(target.type, target.name, uid=uid)
    except ConflictError as exc:
        raise ConflictError(f"{target} was made anew meanwhile, and is left alone: {exc}") from exc
    for metadata in scripts:
        client.delete(CONFIG_MAPS, metadata["name"], uid=metadata["uid"])


def _list_scripts(client: KubeClient, job: Target) -> list[Object]:
    """Return the metadata of a job's scripts.

    The job owns its script, unless `kubectl apply` made both from `--dry-run`, again with each change of the script.
    One without an owner that a submission has marked is that of a namesake which is just being made.
    """
    try:
        listed = client.list(CONFIG_MAPS, label_selector=f"{SCRIPT_LABEL}={job.name}", metadata_only=True).items
    except AccessDeniedError:  # what the job owns, the garbage collector deletes
        return []
    return [item["metadata"] for item in listed if _is_script_of(item["metadata"], job)]


def _is_script_of(metadata: Object, job: Target) -> bool:
    owners = [owner.get("uid") for owner in metadata.get("ownerReferences") or ()]
    if owners:
        return job.resource.get("metadata", {}).get("uid") in owners
    if SUBMISSION_MARK not in (metadata.get("annotations") or {}):
        return True
    return json.dumps(metadata["name"]) in json.dumps(job.resource.get("spec"))  # its submission was cut off


def _wait(client: KubeClient, targets: Sequence[Target], timeout_s: float) -> None:
    """Wait until the resources and their pods are gone."""
    deadline = time.monotonic() + timeout_s
    backoff = Backoff(0.2, 2.0)
    left: list[str] = []
    trouble = ""
    while True:
        try:
            left = [item for target in targets for item in _left(client, target)]
            trouble = ""
        except KubernetesError as exc:  # it may be away for a moment; the deadline bounds it
            trouble = f"; {exc}"
        if not left and not trouble:
            return
        if time.monotonic() >= deadline:
            raise EDLError(f"still there after {timeout_s:g} s: {', '.join(left[:10]) or 'not known'}{trouble}")
        time.sleep(min(backoff.next_wait_s(), max(0.0, deadline - time.monotonic())))


def _left(client: KubeClient, target: Target) -> list[str]:
    uid = target.resource.get("metadata", {}).get("uid")
    found = client.get(target.type, target.name)
    left = [str(target)] if found is not None and found.get("metadata", {}).get("uid") == uid else []
    return left + [f"pod/{pod.get('metadata', {}).get('name')}" for pod in list_pods(client, target)]
