"""`edl resume`: let jobs and pools on Kubernetes go on that were suspended."""

from __future__ import annotations

from collections.abc import Sequence

from edl.cli.kube.suspension import set_suspended

__all__ = ["main"]

_DESCRIPTION = """\
Lets a job or pool that was suspended have its pods again: a job goes on from its last checkpoint, or begins again where
it has none."""

_EXAMPLES = """\
examples:
  edl resume first-job
  edl resume job/first-job pool/digits"""


def main(argv: Sequence[str]) -> int:
    """Run `edl resume`."""
    return set_suspended(argv, False, _DESCRIPTION, _EXAMPLES)
