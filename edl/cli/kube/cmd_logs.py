"""`edl logs`: what the members of a job or pool on Kubernetes write, together or of a single member."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from edl.cli._changes import printable
from edl.cli.kube.connection import add_cluster_options, command_parser, open_cluster
from edl.cli.kube.member_logs.follower import FollowOptions, LogFollower, list_pods
from edl.cli.kube.member_logs.lines import LineCutter, terminal_safe
from edl.cli.kube.member_logs.selection import MemberPodLog, select_present, select_previous, sort_pods
from edl.cli.kube.targets import Target, find_target
from edl.errors import EDLError, InvalidObjectError, KubernetesError, SettingsError
from edl.kube.client import KubeClient

__all__ = ["LogScreen", "main"]

_COLOURS: Final = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95)
"""Of ANSI terminals, for members one after the other; black and white are the text's."""

_DESCRIPTION = """\
Shows what the members of a job or pool wrote, each line behind its member's name; with -f what they write from now on
as well, across the pods that replace one another, until the job has ended."""

_EXAMPLES = """\
examples:
  edl logs first-job                what the present pods wrote
  edl logs first-job -f --tail 10   go on until the job ends or Ctrl-C
  edl logs first-job --worker 0     a single worker, without prefix
  edl logs first-job --previous     the pods before the present ones: why did they end?
  edl logs pool/digits -f"""


class LogScreen:
    """Writes lines to standard output, each behind the name of its member; notes to standard error.

    Args:
        prefix: write the names.
    """

    def __init__(self, *, prefix: bool) -> None:
        self._prefix = prefix
        self._terminal = sys.stdout.isatty()
        self._numbers: dict[str, int] = {}
        self.lines = 0

    def write(self, pod: MemberPodLog, line: bytes) -> None:
        """Write a line.

        Args:
            pod: that wrote it.
            line: without its end.
        """
        self.lines += 1
        text = line.decode(errors="replace")
        if self._terminal:
            text = terminal_safe(text)
        if self._prefix:
            number = self._numbers.setdefault(pod.member, len(self._numbers))
            name = f"{printable(pod.member):<9}"
            if self._terminal:
                name = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{name}\x1b[0m"
            text = f"{name} | {text}"
        if self._terminal and "\x1b[" in text:
            text += "\x1b[0m"  # a colour that a line begins ends with it
        print(text, flush=self._terminal)

    def note(self, words: str) -> None:
        """Say what happens.

        Args:
            words: a line.
        """
        sys.stdout.flush()
        print(f"edl logs: {printable(words)}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run `edl logs`."""
    options = _parse(argv)
    role = "master" if options.master else None
    with open_cluster(options) as client:
        target = find_target(client, options.name)
        if options.worker is not None:
            role = "worker" if target.kind == "job" else "teacher"
        chosen = FollowOptions(role, options.worker, options.tail)
        screen = LogScreen(prefix=options.worker is None and not options.master)
        if options.follow:
            phase = LogFollower(client, target, chosen, screen.write, screen.note).run()
            screen.note(f"{target}: {phase}")
            return 0
        return 0 if _show(client, target, chosen, screen, previous=options.previous) else 1


def _show(client: KubeClient, target: Target, chosen: FollowOptions, screen: LogScreen, *, previous: bool) -> bool:
    """Show logs as they are now; return whether each could be read."""
    whole = True
    pods = sort_pods(list_pods(client, target), chosen.role, chosen.index)
    selected = select_previous(pods) if previous else select_present(pods)
    for pod in selected:
        try:
            _read(client, pod, chosen.tail_lines, screen)
        except KubernetesError as exc:  # the pod's node is away, say; the others' logs are wanted then
            screen.note(f"{pod.member}: {exc}")
            whole = False
        except InvalidObjectError as exc:
            screen.note(f"{pod.member}: {exc}" if pod.started else f"{pod.member}: has not started ({pod.detail})")
    if previous:
        _tell_recorded(target, chosen, {pod.member for pod in selected}, screen)
    elif not selected:
        raise EDLError(f"{target} has no such pods now; its phase and its last ends are in `edl status {target.name}`")
    return whole


def _read(client: KubeClient, pod: MemberPodLog, tail_lines: int | None, screen: LogScreen) -> None:
    lines = LineCutter()
    for piece in client.read_log(pod.pod, container=pod.container, tail_lines=tail_lines, timestamps=True):
        for line in lines.cut(piece):
            screen.write(pod, line)
    for line in lines.end():
        screen.write(pod, line)


def _tell_recorded(target: Target, chosen: FollowOptions, shown: set[str], screen: LogScreen) -> None:
    """Show what the operator kept of pods that are gone."""
    members = target.resource.get("status", {}).get("members") or {}
    for member, record in members.items():
        role, _, index = member.rpartition("-")
        wanted = chosen.role in (None, role) and (chosen.index is None or index == str(chosen.index))
        end = record.get("lastEnd") if isinstance(record, dict) else None
        if member in shown or not wanted or not isinstance(end, dict):
            continue
        screen.note(f"{member}: its pod before is gone; it ended by {end.get('cause') or 'a cause unknown'}, and left:")
        pod = MemberPodLog(member, str(end.get("pod") or ""), "", "", 0, role, 0, True, True)
        for line in str(end.get("message") or "(nothing)").splitlines():
            screen.write(pod, line.encode(errors="replace"))
        shown.add(member)
    if not shown:
        screen.note(f"{target}: no member has had a pod before its present one")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("logs", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("name", help="NAME, job/NAME or pool/NAME")
    add("-f", "--follow", action="store_true", help="go on until the job has ended, or Ctrl-C")
    add("--worker", type=int, metavar="N", help="only of worker N (of a pool: teacher N), without prefix")
    add("--master", action="store_true", help="only of the job's master")
    add("--previous", action="store_true", help="of the pods before the present ones")
    add("--tail", type=int, metavar="N", help="only the last N lines of each pod")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    for name in ("worker", "tail"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise SettingsError(f"--{name} {value}: must be 0 or more")
    if options.follow and options.previous:
        raise SettingsError("--previous: what has ended cannot be followed; leave -f out")
    if options.master and options.worker is not None:
        raise SettingsError("--master and --worker: either")
    return options
