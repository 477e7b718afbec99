"""Start or join an elastic training job: torchrun's options, faster recovery."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run `edl run` with the arguments `argv`. Returns the exit code."""
    from edl.collective.agent.command_line.cli import main as run  # torch takes a second to import

    return run(argv)
