"""`edl scale`: how many workers a job on Kubernetes has, or teachers a pool; `auto` lets EDL decide again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from edl.cli._changes import printable
from edl.cli.kube.connection import add_cluster_options, command_parser, open_cluster
from edl.cli.kube.targets import Target, find_target
from edl.errors import SettingsError

__all__ = ["main"]

_OLD_MINIMUM = (
    "pods that run keep the least number that they began with; those that are made from now on have the new one"
)
"""It stands in the command line of a pod: `edl run --nnodes MIN:…`."""

_DESCRIPTION = """\
Sets how many workers a job has, or how many teachers a pool has: `scaling: external` and `replicas: N` in its spec, so
that EDL no longer decides it. `auto` gives the decision back to EDL. `kubectl scale` alone changes `replicas` only,
which counts where scaling is external already."""

_EXAMPLES = """\
examples:
  edl scale first-job 4             four workers
  edl scale pool/digits 0           no teachers
  edl scale first-job 12 --max 12   beyond what it was submitted with
  edl scale first-job auto          as many as are useful and fit, between its least and its most"""


def main(argv: Sequence[str]) -> int:
    """Run `edl scale`."""
    parser = command_parser("scale", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("name", help="NAME, job/NAME or pool/NAME")
    add("count", metavar="N|auto")
    add("--min", type=int, metavar="N", help="change the least number as well")
    add("--max", type=int, metavar="N", help="change the most, too")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    count = _parse_count(options.count)
    with open_cluster(options) as client:
        target = find_target(client, options.name)
        patch = scale_patch(target, count, options.min, options.max)
        client.patch(target.type, target.name, {"spec": patch})
    noun = "workers" if target.kind == "job" else "teachers"
    if target.kind == "job" and options.min is not None:
        print(f"edl scale: {printable(str(target))}: {_OLD_MINIMUM}", file=sys.stderr)
    if count is None:
        print(printable(f"{target}: EDL decides how many {noun} it has (scaling: auto)"))
    else:
        print(printable(f"{target}: {count} {noun} wanted (scaling: external; `edl scale {target} auto` undoes it)"))
    return 0


def scale_patch(target: Target, count: int | None, least: int | None, most: int | None) -> dict[str, Any]:
    """Return what changes in the spec.

    Args:
        target: as it is.
        count: None for auto.
        least: a new bound; None for the present one.
        most: likewise.

    Raises:
        SettingsError: the count is out of bounds; the message says how to move them.
    """
    spec = target.resource.get("spec", {})
    default = 1 if target.kind == "job" else 0
    low = spec.get("minReplicas", default) if least is None else least
    high = spec.get("maxReplicas", max(low, 1)) if most is None else most
    if low < default or high < max(low, 1):
        raise SettingsError(
            f"{target}: from {low} to {high} cannot be: the least must be {default} or more, the most at least 1 and "
            "not below it (--min, --max)"
        )
    if count is not None and not low <= count <= high:
        bound = f"--min {count}" if count < low else f"--max {count}"
        stop = f"; `edl suspend {target}` ends all of them" if count < low and target.kind == "job" else ""
        raise SettingsError(f"{target}: {count} is not between its bounds, {low} and {high}: {bound} moves them{stop}")
    patch: dict[str, Any] = {"scaling": "auto" if count is None else "external", "replicas": count}
    if least is not None:
        patch["minReplicas"] = least
    if most is not None:
        patch["maxReplicas"] = most
    return patch


def _parse_count(spelled: str) -> int | None:
    if spelled == "auto":
        return None
    if not spelled.isascii() or not spelled.isdigit() or len(spelled) > 6:
        raise SettingsError(f"{spelled!r}: expected a number of workers or teachers, or auto")
    return int(spelled)
