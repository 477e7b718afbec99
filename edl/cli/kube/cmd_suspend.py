"""`edl suspend`: end the pods of jobs and pools on Kubernetes, and keep what they were, for `edl resume`."""

from __future__ import annotations

from collections.abc import Sequence

from edl.cli.kube.suspension import set_suspended

__all__ = ["main"]

_DESCRIPTION = """\
Ends all pods of a job or pool within its grace period, so that others have their GPUs. A job that checkpoints goes on
from there when it is resumed; teachers drain first."""

_EXAMPLES = """\
examples:
  edl suspend first-job
  edl suspend job/first-job pool/digits"""


def main(argv: Sequence[str]) -> int:
    """Run `edl suspend`."""
    return set_suspended(argv, True, _DESCRIPTION, _EXAMPLES)
