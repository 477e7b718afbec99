"""`edl logs`: show the logs of a job's or pool's members on Kubernetes, of all members or of one.

`LogFollower` lists the job's pods every second and reads each pod with a `PodLog` in a thread, so a member's log
continues in a replacement pod. The API server closes connections, and nodes disappear: `LineCutter` joins all
connections to a pod into one log, without gaps or repetitions. `PhaseObserver` follows the job's phase.
"""

from __future__ import annotations

import argparse
import queue
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from edl.background import start_call
from edl.backoff import Backoff
from edl.cli.kube.workloads import Target, add_cluster_options, find_target, list_pods, open_cluster
from edl.cli.output import printable
from edl.command_line import CommandParser, at_least
from edl.dashboard.state.cluster import decode_workload
from edl.dashboard.state.schema import KubernetesWorkload
from edl.errors import ClosedError, EDLError, InvalidObjectError, KubernetesError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import PODS
from edl.master.kube.members.naming import INDEX_LABEL, ROLE_LABEL, TRY_LABEL

FINAL_PHASES: Final = ("Succeeded", "Failed", "Rejected", "Deleted")
"""Phases after which there is no further output; a rejected resource remains rejected until its spec changes."""
_TAKEN_UP_S: Final = 15.0
"""After this long, probably no operator is running: it handles a new resource within a second."""
_REFUSALS: Final = ("ObjectRefused", "AccessDenied")
"""Reasons in the condition Accepted for refusals by the API server. QuotaExceeded is not one, since other jobs will
end. A job that is Pending with an unusable spec continues with its previous spec."""
_REFUSED_S: Final = 120.0
"""How long a refusal may last before it counts: admission or a Role may still be being set up."""
_CONTAINER: Final = "edl"
_STAMP: Final = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?(Z|[+-]\d\d:\d\d) ?")
_OVERLAP: Final = timedelta(seconds=1)
"""Overlap of two connections: lines of a container's two streams may be stored out of time order."""
_MAX_LINE: Final = 1024 * 1024
"""Maximum length of a line in bytes. A longer one, which may never end, is shown in parts."""
_HIDDEN: Final = re.compile(r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONNECTION_S: Final = 30.0
"""Length of a connection: if a node disappears, its log stays open without output, so the pod must be checked again."""
_SHORT_S: Final = 1.0
"""A connection shorter than this without a new line is to a container that waits for a restart: the kubelet sends its
last log at once."""
_LOOK_S: Final = 1.0
"""Poll interval for new pods."""
_MAX_WAITING: Final = 10_000
"""Maximum number of lines waiting to be written: a slow terminal blocks the readers, so memory does not grow."""
_DRAIN_S: Final = 5.0
"""Time for the last lines after the job has ended: its pods have written everything, only connections are slow."""
_COLOURS: Final = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95)
"""ANSI colours for members, in turn, without black and white, which are used for text."""

Note: TypeAlias = Callable[[str], None]
"""Takes a line about an event."""


# --- The job's phase ---


class PhaseObserver:
    """Returns a resource's phase, and passes changes of interest to the user to `note`."""

    def __init__(
        self, target: Target, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
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
        """Note that a pool is refused, or that its teachers do not start: the resource may wait for them in vain."""
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
        if item.phase != "Pending" or accepted.reason not in _REFUSALS:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = self._clock()
        elif self._clock() - self._refused_since > _REFUSED_S:
            return "Rejected"
        return item.phase


# --- Lines ---


class LineCutter:
    """Splits a log into lines, each prefixed by its time (the API's `timestamps` option).

    After `restart` the log may start again at `since`, and lines already yielded are skipped. Times do not identify
    lines, since a container's output and errors are stamped independently, so the last lines are remembered.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._last: datetime | None = None
        self._recent: deque[tuple[datetime, bytes]] = deque()
        self._known: Counter[bytes] = Counter()

    @property
    def since(self) -> str:
        """Time shortly before the last line, from which to continue; empty before the first line."""
        return "" if self._last is None else (self._last - _OVERLAP).isoformat().replace("+00:00", "Z")

    def restart(self) -> None:
        """Expect the log from `since` on, in a new connection."""
        self._rest = b""
        self._known = Counter(line for _, line in self._recent)

    def cut(self, piece: bytes) -> Iterator[bytes]:
        """Yield complete lines without their time and line end."""
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
        found = _STAMP.match(line)
        second = _parse_second(found) if found is not None else None
        if found is None or second is None:  # the rest of a line that was too long, or a message of the API server
            yield line
            return
        self._last = second if self._last is None else max(self._last, second)
        self._recent.append((second, line))
        while self._recent[0][0] < self._last - _OVERLAP:
            self._recent.popleft()
        yield line[found.end() :]


def _parse_second(stamp: re.Match[bytes]) -> datetime | None:
    try:
        return datetime.fromisoformat((stamp[1] + stamp[2].replace(b"Z", b"+00:00")).decode())
    except ValueError:  # the 31st of February
        return None


def terminal_safe(text: str) -> str:
    """Remove codes that move a terminal's cursor or change its state; keep colours and tabs."""
    if text.isprintable():
        return text
    last = text.rstrip("\r").rpartition("\r")[2]  # a progress bar overwrites itself: keep its last state
    return _HIDDEN.sub(lambda match: match[1] or "�", last)


# --- Pods ---


@dataclass(frozen=True)
class MemberPodLog:
    """A pod of a member, such as "worker-0".

    `started`: the container is running or has run; `ended`: it has ended for good; `detail`: why it has not started.
    """

    member: str
    pod: str
    uid: str
    container: str
    attempt: int
    role: str
    index: int
    started: bool
    ended: bool
    detail: str = ""


def read_pod(pod: Mapping[str, Any]) -> MemberPodLog | None:
    """Read a pod; None if it belongs to no member."""
    metadata, spec, status = (_record(pod.get(name)) for name in ("metadata", "spec", "status"))
    labels = _record(metadata.get("labels"))
    role, index = labels.get(ROLE_LABEL), str(labels.get(INDEX_LABEL))
    names = [str(_record(item).get("name")) for item in spec.get("containers") or ()]
    if not role or not index.isdigit() or not names:
        return None
    container = _CONTAINER if _CONTAINER in names else names[0]
    attempt = str(labels.get(TRY_LABEL) or 0)
    phase = status.get("phase")
    statuses = map(_record, status.get("containerStatuses") or ())
    found: Mapping[str, Any] = next((item for item in statuses if item.get("name") == container), {})
    state = _record(found.get("state"))
    waiting = _record(state.get("waiting"))
    return MemberPodLog(
        member=f"{role}-{index}",
        pod=str(metadata.get("name")),
        uid=str(metadata.get("uid")),
        container=container,
        attempt=int(attempt) if attempt.isdigit() else 0,
        role=str(role),
        index=int(index),
        started="running" in state or "terminated" in state or "terminated" in _record(found.get("lastState")),
        ended=phase in ("Succeeded", "Failed"),
        detail=str(waiting.get("reason") or status.get("reason") or phase or ""),
    )


def sort_pods(pods: Iterable[Mapping[str, Any]], role: str | None, index: int | None) -> list[MemberPodLog]:
    """Return members' pods, by role, index and attempt."""
    found = [item for item in map(read_pod, pods) if item is not None]
    kept = [item for item in found if role in (None, item.role) and index in (None, item.index)]
    return sorted(kept, key=lambda item: (item.role, item.index, item.attempt))


def select_present(pods: Iterable[MemberPodLog]) -> list[MemberPodLog]:
    """Return the newest pod of every member."""
    return list({item.member: item for item in pods}.values())


def select_previous(pods: Iterable[MemberPodLog]) -> list[MemberPodLog]:
    """Return the second newest pod of every member that has one."""
    newest: dict[str, MemberPodLog] = {}
    before: dict[str, MemberPodLog] = {}
    for item in pods:
        if item.member in newest:
            before[item.member] = newest[item.member]
        newest[item.member] = item
    return list(before.values())


def _record(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


Write: TypeAlias = Callable[[MemberPodLog, bytes], None]
"""Takes a pod and a line without its line end."""


class PodLog:
    """Follows the log of a pod to its end, and reconnects if needed without repeating lines.

    `run` needs its own thread, in which it calls `write` and `note`.
    """

    def __init__(
        self,
        client: KubeClient,
        pod: MemberPodLog,
        tail_lines: int | None,
        write: Write,
        note: Note,
    ) -> None:
        self._client = client
        self.pod = pod
        self._tail_lines = tail_lines
        self._write = write
        self._note = note
        self._lines = LineCutter()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stop reading, no later than the end of the connection."""
        self._stopping.set()

    def run(self) -> None:
        """Follow until the container has ended, the pod is gone, or `stop` is called."""
        backoff = Backoff(0.2, 5.0, jitter=0.3)
        trouble = ""
        while not self._stopping.is_set():
            try:
                began = time.monotonic()
                lines = self._read()
                if self._is_over():
                    # Lines between the connection's end and the container's.
                    self._read()
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
                    self._note(f"{self.pod.member}: {trouble}; trying again")
                self._stopping.wait(backoff.next_wait_s())
            except ClosedError:
                return

    def _read(self) -> int:
        """Read until the connection ends; return how many lines were new."""
        count = 0
        self._lines.restart()
        since = self._lines.since
        pieces = self._client.read_log(
            self.pod.pod,
            container=self.pod.container,
            follow=True,
            tail_lines=None if since else self._tail_lines,
            since_time=since,
            timestamps=True,
            deadline_s=_CONNECTION_S,
        )
        for piece in pieces:
            for line in self._lines.cut(piece):
                self._write(self.pod, line)
                count += 1
            if self._stopping.is_set():
                break
        # An unfinished line at a connection's end may be half a line: the next connection repeats it.
        return count

    def _is_over(self) -> bool:
        """Return whether the container has ended for good."""
        try:
            found = self._client.get(PODS, self.pod.pod)
        except KubernetesError:
            return False
        now = read_pod(found) if found is not None else None
        return now is None or now.uid != self.pod.uid or now.ended


# --- All members at once ---


class LogFollower:
    """Follows the logs of a job or pool: all members, or only those of a `role` and `index`.

    `write` and `note` are called in the caller's thread. Without `write`, it reads no log and only waits for the end.
    `pools` are those that the job needs: `note` is told if their teachers do not start.
    """

    def __init__(
        self,
        client: KubeClient,
        target: Target,
        write: Write | None,
        note: Note,
        *,
        role: str | None = None,
        index: int | None = None,
        tail_lines: int | None = None,
        pools: Sequence[Target] = (),
    ) -> None:
        self._client = client
        self._target = target
        self._pools = pools
        self._write = write
        self._note = note
        self._role, self._index, self._tail_lines = role, index, tail_lines
        self._waiting: queue.Queue[tuple[MemberPodLog | None, bytes]] = queue.Queue(_MAX_WAITING)
        self._readers: dict[str, tuple[PodLog, Future[None]]] = {}
        self._phases = PhaseObserver(target, note)
        self._trouble = ""
        self._late: set[str] = set()

    @property
    def taken_up(self) -> bool:
        """Whether an operator has handled the job or pool, as far as `run` has seen."""
        return self._phases.taken_up

    def run(self, *, deadline: float | None = None) -> str:
        """Follow until the job has ended and its output is written, or the resource is gone.

        Returns:
            The last phase; empty at `deadline` (monotonic time).

        Raises:
            AccessDeniedError: A log may not be read.
        """
        try:
            while deadline is None or time.monotonic() < deadline:
                phase = self._look()
                if phase in FINAL_PHASES:
                    self._drain()
                    self._raise_readers_errors()
                    return phase
                left_s = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
                self._write_for(left_s)
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
            listed = list_pods(self._client, target) if self._write is not None else []
            for pool in self._pools:
                namespace = pool.resource["metadata"]["namespace"]
                self._phases.check_pool(pool, self._client.get(pool.type, pool.name, namespace))
        except KubernetesError as exc:
            if not self._trouble:
                self._note(f"{exc}; trying again")
            self._trouble = str(exc)
            return ""
        if self._trouble:
            self._note("the API server responds again")
            self._trouble = ""
        pods = sort_pods(listed, self._role, self._index)
        present = {item.uid for item in pods}
        for uid, (reader, _) in self._readers.items():
            if uid not in present:
                reader.stop()
        for item in pods:
            if item.started and item.uid not in self._readers:
                if any(reader.pod.member == item.member for reader, _ in self._readers.values()):
                    self._note(f"{item.member}: continues in pod {item.pod}")
                reader = PodLog(self._client, item, self._tail_lines, self._put, self._put_note)
                self._readers[item.uid] = reader, start_call(f"edl-log-{item.member}", reader.run)
        for item in select_present(pods):
            if not item.started and item.uid not in self._late:
                self._late.add(item.uid)
                self._note(f"{item.member}: pod {item.pod} has not started yet ({item.detail})")
        return self._phases.check(found)

    def _raise_readers_errors(self) -> None:
        """Raise an error that ended a reader: it retries temporary errors, so this one is permanent."""
        for _, future in self._readers.values():
            if future.done():
                future.result()

    def _put(self, pod: MemberPodLog | None, line: bytes) -> None:
        self._waiting.put((pod, line))

    def _put_note(self, words: str) -> None:
        self._waiting.put((None, words.encode()))

    def _write_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            try:
                self._write_line(*self._waiting.get(timeout=left_s))
            except queue.Empty:
                return

    def _write_line(self, pod: MemberPodLog | None, line: bytes) -> None:
        if pod is None:
            self._note(line.decode(errors="replace"))
        elif self._write is not None:
            self._write(pod, line)

    def _drain(self) -> None:
        """Write the readers' remaining lines, and print a note if that takes too long."""
        end = time.monotonic() + _DRAIN_S
        while True:
            open_members = sorted(reader.pod.member for reader, future in self._readers.values() if not future.done())
            left_s = end - time.monotonic()
            if open_members and left_s <= 0:
                words = "not waiting for the rest of their logs; `edl logs` shows it"
                self._note(f"{', '.join(open_members)} may still write: {words}")
                return
            try:
                # When all readers are done, the queue contains all remaining lines.
                self._write_line(*self._waiting.get(timeout=min(0.1, left_s) if open_members else 0.0))
            except queue.Empty:
                if not open_members:
                    return


# --- The command ---

_DESCRIPTION = """\
Shows the logs of a job's or pool's members, each prefixed by its member's name. With -f it follows them until the job
has ended, and replacement pods too."""

_EXAMPLES = """\
examples:
  edl logs first-job                the logs of the current pods
  edl logs first-job -f --tail 10   continue until the job ends or Ctrl-C
  edl logs first-job --worker 0     a single worker, without prefix
  edl logs first-job --previous     the previous pods: why did they end?
  edl logs pool/digits -f"""


class LogScreen:
    """Writes lines to standard output, after their member's name if `prefix`, and notes to standard error."""

    def __init__(self, *, prefix: bool) -> None:
        self._prefix = prefix
        self._terminal = sys.stdout.isatty()
        self._numbers: dict[str, int] = {}

    def write(self, pod: MemberPodLog, line: bytes) -> None:
        """Write a line, given without its line end."""
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
            text += "\x1b[0m"  # reset a colour at the end of its line
        print(text, flush=self._terminal)

    def note(self, words: str) -> None:
        """Write a line about an event."""
        sys.stdout.flush()
        print(f"edl logs: {printable(words)}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run `edl logs`."""
    parser = CommandParser("edl logs", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("name", metavar="NAME", help="NAME, job/NAME or pool/NAME")
    add("-f", "--follow", action="store_true", help="continue until the job has ended, or Ctrl-C")
    add("--worker", type=at_least(0), metavar="N", help="only worker N (of a pool: teacher N), without prefix")
    add("--master", action="store_true", help="only the job's master, without prefix")
    add("--previous", action="store_true", help="the previous pods")
    add("--tail", type=at_least(0), metavar="N", help="only the last N lines of each pod")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    if options.follow and options.previous:
        raise SettingsError("--previous: pods that have ended cannot be followed; omit -f")
    if options.master and options.worker is not None:
        raise SettingsError("--master and --worker cannot be combined")
    role = "master" if options.master else None
    with open_cluster(options) as client:
        target = find_target(client, options.name)
        if options.worker is not None:
            role = "worker" if target.kind == "job" else "teacher"
        screen = LogScreen(prefix=options.worker is None and not options.master)
        if options.follow:
            index, tail = options.worker, options.tail
            follower = LogFollower(client, target, screen.write, screen.note, role=role, index=index, tail_lines=tail)
            phase = follower.run()
            screen.note(f"{target}: {phase}")
            return 0
        return 0 if _show(client, target, role, options, screen) else 1


def _show(client: KubeClient, target: Target, role: str | None, options: argparse.Namespace, screen: LogScreen) -> bool:
    """Show current logs; return whether all could be read."""
    whole = True
    pods = sort_pods(list_pods(client, target), role, options.worker)
    selected = select_previous(pods) if options.previous else select_present(pods)
    for pod in selected:
        lines = LineCutter()
        try:
            for piece in client.read_log(pod.pod, container=pod.container, tail_lines=options.tail, timestamps=True):
                for line in lines.cut(piece):
                    screen.write(pod, line)
            for line in lines.end():
                screen.write(pod, line)
        except KubernetesError as exc:  # perhaps the pod's node is down; show the other logs
            screen.note(f"{pod.member}: {exc}")
            whole = False
        except InvalidObjectError as exc:
            screen.note(f"{pod.member}: {exc}" if pod.started else f"{pod.member}: has not started ({pod.detail})")
    if options.previous:
        _show_recorded(target, role, options.worker, {pod.member for pod in selected}, screen)
    elif not selected:
        raise EDLError(f"{target} has no such pods now; its phase and its last ends are in `edl status {target.name}`")
    return whole


def _show_recorded(target: Target, role: str | None, index: int | None, shown: set[str], screen: LogScreen) -> None:
    """Show the last messages that the operator recorded for deleted pods."""
    members = target.resource.get("status", {}).get("members") or {}
    for member, record in members.items():
        its_role, _, its_index = member.rpartition("-")
        wanted = role in (None, its_role) and (index is None or its_index == str(index))
        end = record.get("lastEnd") if isinstance(record, dict) else None
        if member in shown or not wanted or not isinstance(end, dict):
            continue
        screen.note(f"{member}: its last pod is gone; it ended by {end.get('cause') or 'an unknown cause'}, saying:")
        pod = MemberPodLog(member, str(end.get("pod") or ""), "", "", 0, its_role, 0, True, True)
        for line in str(end.get("message") or "(nothing)").splitlines():
            screen.write(pod, line.encode(errors="replace"))
        shown.add(member)
    if not shown:
        screen.note(f"{target}: no member has had a previous pod")
