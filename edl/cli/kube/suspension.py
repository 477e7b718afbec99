"""What `edl suspend` and `edl resume` share: a flag in the spec of jobs and pools."""

from __future__ import annotations

from collections.abc import Sequence

from edl.cli._changes import printable
from edl.cli.kube.connection import add_cluster_options, command_parser, open_cluster
from edl.cli.kube.targets import find_target

__all__ = ["set_suspended"]


def set_suspended(argv: Sequence[str], suspended: bool, description: str, examples: str) -> int:
    """Run either of the commands.

    Args:
        argv: the command's arguments.
        suspended: what the flag is to be.
        description: of the command.
        examples: of the command.

    Returns:
        The exit code.
    """
    parser = command_parser("suspend" if suspended else "resume", description, examples)
    parser.add_argument("names", nargs="+", metavar="NAME", help="NAME, job/NAME or pool/NAME")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    with open_cluster(options) as client:
        targets = [find_target(client, name) for name in options.names]  # all, before any is changed
        for target in targets:
            if (target.resource.get("spec", {}).get("suspend") is True) == suspended:
                print(printable(f"{target}: is {'suspended' if suspended else 'not suspended'} already"))
                continue
            client.patch(target.type, target.name, {"spec": {"suspend": suspended}})
            print(printable(f"{target}: {'suspended' if suspended else 'resumed'}"))
    return 0
