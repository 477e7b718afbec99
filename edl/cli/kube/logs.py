"""`edl logs`: show the logs of a job's or pool's members on Kubernetes, of all members or of one.

`LogFollower` lists the job's pods every second and reads each pod with a `PodLog` in a thread, so a member's log
continues in a replacement pod. The API server closes connections, and nodes disappear, so `LineCutter` joins the output
of all connections to a pod into one log, without gaps or repetitions. `PhaseObserver` follows the job's phase.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, TypeAlias

from edl.background import start_call
from edl.backoff import Backoff
from edl.cli.kube.workloads import ENDED_PHASES, Target, add_cluster_options, find_target, list_pods, open_cluster
from edl.cli.output import print_note, printable
from edl.command_line import CommandParser, at_least
from edl.dashboard.state.cluster import decode_workload
from edl.dashboard.state.schema import KubernetesWorkload
from edl.errors import ClosedError, EDLError, InvalidObjectError, KubernetesError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.objects import Object, format_time, read_time
from edl.kube.resource_types import PODS
from edl.master.kube.members.pods import MemberPod, read_member_pods

FINAL_PHASES: Final = (*ENDED_PHASES, "Rejected", "Deleted")
"""Phases after which there is no further output; a rejected resource remains rejected until someone corrects it."""
_TAKEN_UP_S: Final = 15.0
"""If a resource is not handled for this long, probably no operator is running: an operator handles a new resource
within a second."""
_REFUSALS: Final = ("ObjectRefused", "AccessDenied")
"""Reasons in the condition Accepted that mean a refusal by the API server. QuotaExceeded is not among them, since quota
becomes free when other jobs end. A job that is Pending with an unusable spec continues with its previous spec."""
_REFUSED_S: Final = 120.0
"""How long a refusal may last before it counts: admission control or a Role may not be set up yet."""
_OVERLAP_S: Final = 1
"""Seconds by which two connections overlap: lines from a container's two streams may be stored out of time order."""
_MAX_LINE: Final = 1024 * 1024
"""Maximum length of a line in bytes. A longer line, which may never end, is shown in parts."""
_HIDDEN: Final = re.compile(r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONNECTION_S: Final = 30.0
"""Duration of a connection: the log from a node that disappeared stays open and silent, so the pod is checked again."""
_SHORT_S: Final = 1.0
"""If a connection ends sooner and brings no new line, its container is waiting for a restart: the API server sends the
old log at once."""
_LOOK_S: Final = 1.0
"""Poll interval for new pods."""
_MAX_WAITING: Final = 10_000
"""Maximum number of lines waiting to be written. At this number, a slow terminal blocks the readers, to limit
memory."""
_DRAIN_S: Final = 5.0
"""Time allowed for the last lines after the job has ended. Its pods have written everything by then; only connections
may be slow."""
_COLOURS: Final = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95)
"""ANSI colours for members, in turn, without black and white, which are used for text."""

Note: TypeAlias = Callable[[str], None]
"""Takes a line about an event."""


# --- The job's phase ---


class PhaseObserver:
    """Returns a resource's phase, and passes changes that interest the user to `note`."""

    def __init__(self, target: Target, note: Note, clock: Callable[[], float] = time.monotonic) -> None:
        self._target = target
        self._note = note
        self._clock = clock
        self._began = clock()
        self._last = ""
        self._warned = False
        self._refusal = ""
        self._refused_since: float | None = None
        self._troubles: dict[str, str] = {}

    @property
    def taken_up(self) -> bool:
        """Whether an operator has handled the resource."""
        return bool(self._last)

    def check(self, found: Object | None) -> str:
        """Return the phase, "Deleted" if the resource is gone, or "" if no operator has handled it."""
        if found is None or found.get("metadata", {}).get("uid") != self._target.uid:
            return "Deleted"
        item = decode_workload(self._target.kind, found)
        if not item.phase and not self._warned and self._clock() - self._began > _TAKEN_UP_S:
            self._warned = True
            self._note(f"{self._target}: no operator has handled it yet: is `edl operator` running for its namespace?")
        phase = self._judge(item)
        if phase != self._last and phase:
            condition = item.condition("Accepted" if phase == "Rejected" else phase)
            why = (condition.message if condition is not None else "") or item.message
            self._note(f"{self._target}: {phase}{f': {why.strip()}' if why and phase != 'Running' else ''}")
            self._last = phase
        return phase

    def check_pool(self, pool: Target, found: Object | None) -> None:
        """Report a refused pool, or teachers that do not start: the resource may wait for these teachers forever."""
        item = decode_workload(pool.kind, found) if found is not None else None
        accepted, ready = (item.condition(kind) if item is not None else None for kind in ("Accepted", "Ready"))
        trouble = accepted if accepted is not None and accepted.status == "False" else ready
        if trouble is None or (trouble is ready and trouble.reason != "TeacherFailing"):
            self._troubles.pop(pool.name, None)
        elif self._troubles.get(pool.name) != trouble.reason:
            self._troubles[pool.name] = trouble.reason
            self._note(f"{pool}: {trouble.reason}: {trouble.message.strip()}")

    def _judge(self, item: KubernetesWorkload) -> str:
        """Return the phase, or "Rejected" if the API server has refused the resource's members for long enough."""
        accepted = item.condition("Accepted")
        if accepted is None or accepted.status != "False" or item.phase in FINAL_PHASES:
            self._refusal = ""
            self._refused_since = None
            return item.phase
        if accepted.message != self._refusal:
            self._refusal = accepted.message
            self._note(f"{self._target}: {accepted.reason}: {accepted.message.strip()}")
        if item.ready or item.phase != "Pending" or accepted.reason not in _REFUSALS:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = self._clock()
        elif self._clock() - self._refused_since > _REFUSED_S:
            return "Rejected"
        return item.phase


# --- Lines ---


class LineCutter:
    """Splits a log into lines. In the log, a time precedes each line (the API's `timestamps` option).

    After `restart`, the log may start again at `since`; lines that were already yielded are skipped. A time does not
    identify a line, because a container's output and errors are timestamped independently. The last lines are therefore
    remembered.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._last_s: int | None = None
        self._recent: deque[tuple[int, bytes]] = deque()
        self._known: Counter[bytes] = Counter()

    @property
    def since(self) -> str:
        """Time shortly before the last line, from which to continue; empty before the first line."""
        return "" if self._last_s is None else format_time(self._last_s - _OVERLAP_S)

    def restart(self) -> None:
        """Expect the log from `since` on, in a new connection."""
        self._rest = b""
        self._known = Counter(line for _, line in self._recent)

    def cut(self, piece: bytes) -> Iterator[bytes]:
        """Yield complete lines without their timestamps and line endings."""
        self._rest += piece
        *whole, self._rest = self._rest.split(b"\n")
        for line in whole:
            yield from self._new(line)
        if len(self._rest) > _MAX_LINE:
            line, self._rest = self._rest, b""
            yield from self._new(line)

    def end(self) -> Iterator[bytes]:
        """Yield the last line if it has no line end."""
        line, self._rest = self._rest, b""
        if line:
            yield from self._new(line)

    def _new(self, line: bytes) -> Iterator[bytes]:
        if self._known[line] > 0:
            self._known[line] -= 1
            return
        stamp, _, text = line.partition(b" ")
        time_s = read_time(stamp.decode(errors="replace"))
        if time_s is None:  # the rest of a line that was too long, or a message of the API server
            yield line
            return
        second = int(time_s)
        self._last_s = second if self._last_s is None else max(self._last_s, second)
        self._recent.append((second, line))
        while self._recent[0][0] < self._last_s - _OVERLAP_S:
            self._recent.popleft()
        yield text


def terminal_safe(text: str) -> str:
    """Remove codes that move a terminal's cursor or change its state; keep colours and tabs."""
    if text.isprintable():
        return text
    last = text.rstrip("\r").rpartition("\r")[2]  # a progress bar overwrites itself: keep its last state
    return _HIDDEN.sub(lambda match: match[1] or "�", last)


# --- Pods ---


def select_newest(pods: Iterable[MemberPod]) -> list[MemberPod]:
    """Return the newest pod of each member; `pods` are in the order of attempts."""
    return list({pod.key: pod for pod in pods}.values())


def _has_started(pod: MemberPod) -> bool:
    return pod.started_s is not None or bool(pod.container_end)


def _list_pods(client: KubeClient, target: Target, member: str | None) -> list[MemberPod]:
    pods, _ = read_member_pods(list_pods(client, target), target.uid)
    return [pod for pod in pods if member in (None, pod.key)]


Write: TypeAlias = Callable[[str, bytes], None]
"""Takes a member, such as "worker-0", and a line without its line end."""


class PodLog:
    """Reads the log of a pod; calls `write` and `note` in the reading thread."""

    def __init__(self, client: KubeClient, pod: MemberPod, tail_lines: int | None, write: Write, note: Note) -> None:
        self._client = client
        self.pod = pod
        self._tail_lines = tail_lines
        self._write = write
        self._note = note
        self._lines = LineCutter()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stop reading, at the latest when the connection ends."""
        self._stopping.set()

    def follow(self) -> None:
        """Follow until the container ends, the pod is gone, or `stop` is called. Reconnect without repeating lines."""
        backoff = Backoff(0.2, 5.0, jitter=0.3)
        trouble = ""
        while not self._stopping.is_set():
            try:
                began = time.monotonic()
                lines = self.read(follow=True)
                if self._is_over():
                    # Lines between the connection's end and the container's.
                    self.read(follow=True)
                    return
                trouble = ""
                if lines or time.monotonic() - began >= _SHORT_S:
                    backoff.reset()
                else:
                    self._stopping.wait(backoff.next_wait_s())
            except (KubernetesError, InvalidObjectError) as exc:
                if isinstance(exc, InvalidObjectError) and self._is_over():
                    return
                if str(exc) != trouble:
                    trouble = str(exc)
                    self._note(f"{self.pod.key}: {trouble}; trying again")
                self._stopping.wait(backoff.next_wait_s())
            except ClosedError:
                return

    def read(self, *, follow: bool) -> int:
        """Read the log up to now, or until the connection ends; return how many lines were new."""
        count = 0
        self._lines.restart()
        since = self._lines.since
        pieces = self._client.read_log(
            self.pod.name,
            container=self.pod.container,
            follow=follow,
            tail_lines=None if since else self._tail_lines,
            since_time=since,
            timestamps=True,
            deadline_s=_CONNECTION_S if follow else None,
        )
        for piece in pieces:
            for line in self._lines.cut(piece):
                self._write(self.pod.key, line)
                count += 1
            if self._stopping.is_set():
                break
        if not follow:  # an unfinished line at a connection's end may be half a line: the next connection repeats it
            for line in self._lines.end():
                self._write(self.pod.key, line)
        return count

    def _is_over(self) -> bool:
        try:
            found = self._client.get(PODS, self.pod.name)
        except KubernetesError:
            return False
        return (
            found is None
            or found["metadata"].get("uid") != self.pod.uid
            or (found.get("status") or {}).get("phase") in ENDED_PHASES
        )


# --- All members at once ---


class LogFollower:
    """Follows the logs of a job or pool: of all members, or only of `member`.

    `write` and `note` are called in the caller's thread. Without `write`, the follower reads no log, and only waits for
    the end. `pools` are the pools that the job needs; `note` is called if their teachers do not start.
    """

    def __init__(
        self,
        client: KubeClient,
        target: Target,
        write: Write | None,
        note: Note,
        *,
        member: str | None = None,
        tail_lines: int | None = None,
        pools: Sequence[Target] = (),
    ) -> None:
        self._client = client
        self._target = target
        self._pools = pools
        self._write = write
        self._note = note
        self._member = member
        self._tail_lines = tail_lines
        self._waiting: queue.Queue[Callable[[], None]] = queue.Queue(_MAX_WAITING)
        self._readers: dict[str, tuple[PodLog, Future[None]]] = {}
        self.phases = PhaseObserver(target, note)
        self._trouble = ""
        self._late: set[str] = set()

    def run(self, *, deadline: float | None = None) -> str:
        """Follow until the job has ended and its output is written, or the resource is gone; return the last phase.

        Returns "" at `deadline` (monotonic time). Raises AccessDeniedError if a log may not be read.
        """
        try:
            while deadline is None or time.monotonic() < deadline:
                phase = self._look()
                if phase in FINAL_PHASES:
                    self._drain()
                    self._raise_readers_errors()
                    return phase
                self._write_for(_LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic()))
            return ""
        finally:
            for reader, _ in self._readers.values():
                reader.stop()

    def _look(self) -> str:
        """Start to follow pods that have started, and return the phase."""
        self._raise_readers_errors()
        target = self._target
        try:
            found = self._client.get(target.type, target.name)
            pods = _list_pods(self._client, target, self._member) if self._write is not None else []
            for pool in self._pools:
                namespace = pool.resource["metadata"]["namespace"]
                self.phases.check_pool(pool, self._client.get(pool.type, pool.name, namespace))
        except KubernetesError as exc:
            if not self._trouble:
                self._note(f"{exc}; trying again")
            self._trouble = str(exc)
            return ""
        if self._trouble:
            self._note("the API server responds again")
            self._trouble = ""
        present = {pod.uid for pod in pods}
        for uid, (reader, _) in self._readers.items():
            if uid not in present:
                reader.stop()
        for pod in pods:
            if _has_started(pod) and pod.uid not in self._readers:
                self._follow(pod)
        for pod in select_newest(pods):
            if not _has_started(pod) and pod.uid not in self._late:
                self._late.add(pod.uid)
                self._note(f"{pod.key}: pod {pod.name} has not started yet ({_describe_wait(pod)})")
        return self.phases.check(found)

    def _follow(self, pod: MemberPod) -> None:
        if any(reader.pod.key == pod.key for reader, _ in self._readers.values()):
            self._note(f"{pod.key}: continues in pod {pod.name}")

        def write(member: str, line: bytes) -> None:
            if self._write is not None:
                self._waiting.put(functools.partial(self._write, member, line))

        def note(words: str) -> None:
            self._waiting.put(functools.partial(self._note, words))

        reader = PodLog(self._client, pod, self._tail_lines, write, note)
        self._readers[pod.uid] = reader, start_call(f"edl-log-{pod.key}", reader.follow)

    def _raise_readers_errors(self) -> None:
        """Raise the error that ended a reader, if any: readers retry temporary errors, so this error is permanent."""
        for _, future in self._readers.values():
            if future.done():
                future.result()

    def _write_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while (left_s := end - time.monotonic()) > 0:
                self._waiting.get(timeout=left_s)()

    def _drain(self) -> None:
        """Write the readers' remaining lines, and print a note if that takes too long."""
        end = time.monotonic() + _DRAIN_S
        while names := sorted(reader.pod.key for reader, future in self._readers.values() if not future.done()):
            if time.monotonic() >= end:
                words = "not waiting for the rest of their logs; `edl logs` shows it"
                self._note(f"{', '.join(names)} may still write: {words}")
                return
            self._write_for(0.1)
        while not self._waiting.empty():  # all readers are done, so the queue contains all remaining lines
            self._waiting.get()()


def _describe_wait(pod: MemberPod) -> str:
    return pod.no_node or pod.waiting or pod.termination.pod_reason or pod.phase


# --- The command ---

_DESCRIPTION = """\
Shows the logs of a job's or pool's members, each line prefixed by the member's name. With -f, the command follows these
logs, and those of replacement pods, until the job has ended."""

_EXAMPLES = """\
examples:
  edl logs first-job                the logs of the current pods
  edl logs first-job -f --tail 10   continue until the job ends or Ctrl-C
  edl logs first-job --worker 0     a single worker, without prefix
  edl logs pool/digits -f"""


class LogScreen:
    """Writes lines to standard output, after the member's name if `prefix` is set, and notes to standard error."""

    def __init__(self, *, prefix: bool) -> None:
        self._prefix = prefix
        self._terminal = sys.stdout.isatty()
        self._numbers: dict[str, int] = {}

    def write(self, member: str, line: bytes) -> None:
        """Write a line of a member, given without its line end."""
        text = line.decode(errors="replace")
        if self._terminal:
            text = terminal_safe(text)
        if self._prefix:
            number = self._numbers.setdefault(member, len(self._numbers))
            name = f"{printable(member):<9}"
            if self._terminal:
                name = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{name}\x1b[0m"
            text = f"{name} | {text}"
        if self._terminal and "\x1b[" in text:
            text += "\x1b[0m"  # reset a colour at the end of its line
        print(text, flush=self._terminal)

    def note(self, words: str) -> None:
        """Write a line about an event."""
        print_note("edl logs", words)


def main(argv: Sequence[str]) -> int:
    """Run `edl logs`."""
    parser = CommandParser("edl logs", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("name", metavar="NAME", help="NAME, job/NAME or pool/NAME")
    add("-f", "--follow", action="store_true", help="continue until the job has ended, or Ctrl-C")
    add("--worker", type=at_least(0), metavar="N", help="only worker N (of a pool: teacher N), without prefix")
    add("--master", action="store_true", help="only the job's master, without prefix")
    add("--tail", type=at_least(0), metavar="N", help="only the last N lines of each pod")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    if options.master and options.worker is not None:
        raise SettingsError("--master and --worker cannot be combined")
    member = "master-0" if options.master else None
    with open_cluster(options) as client:
        target = find_target(client, options.name)
        if options.worker is not None:
            member = f"{'worker' if target.kind == 'job' else 'teacher'}-{options.worker}"
        screen = LogScreen(prefix=member is None)
        if not options.follow:
            return 0 if _show(client, target, member, options.tail, screen) else 1
        follower = LogFollower(client, target, screen.write, screen.note, member=member, tail_lines=options.tail)
        screen.note(f"{target}: {follower.run()}")
        return 0


def _show(client: KubeClient, target: Target, member: str | None, tail_lines: int | None, screen: LogScreen) -> bool:
    """Show current logs; return whether all could be read."""
    whole = True
    selected = select_newest(_list_pods(client, target, member))
    if not selected:
        raise EDLError(f"{target} has no matching pods now; `edl status {target.name}` says how pods ended")
    for pod in selected:
        try:
            PodLog(client, pod, tail_lines, screen.write, screen.note).read(follow=False)
        except KubernetesError as exc:  # perhaps the pod's node is down; show the other logs
            screen.note(f"{pod.key}: {exc}")
            whole = False
        except InvalidObjectError as exc:
            screen.note(f"{pod.key}: {exc if _has_started(pod) else f'has not started ({_describe_wait(pod)})'}")
    return whole
