"""Why a worker's process or pod ended, and what to do about it: pure functions.

No single source says why a worker ended. Exit code 137 means a SIGKILL from any sender. Kubernetes reports `OOMKilled`
only if the container's first process was killed for lack of memory. A lost node reports nothing at all. So
`find_termination_cause` weighs the evidence, the most specific first: the agent's findings about its hardware, then
memory, then the fate of the pod and its node, and only then exit codes and signals.

`decide_relaunch` looks up the action in one table, by the cause and how often it occurred without progress. The table
is for pods that have ended; before a pod ends, `edl run` restarts its workers in the pod. In each row, the cheapest
action comes first, unless a remedy is known (more memory, another node), which is then used at once. After the last
action, the job stops. Causes that lie in the cluster (preemption, a lost node, missing nodes or teachers) have no last
action: they are not the job's fault, and may recur for days.

The agent's exit codes and messages are in `edl.collective.agent.ending`, which is not imported here; a test compares
them with the values here.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

_SIGNAL_BASE: Final = 128
"""For a process killed by a signal, shells and Kubernetes report this plus the signal's number as the exit code."""
_LAST_SIGNAL: Final = 64  # SIGRTMAX on Linux: larger exit codes are a program's own, such as 255
_MAX_EXIT_CODE: Final = 255  # of a process; agents write nothing larger
_MAX_KILLS: Final = 2**63  # kernel counters have 64 bits

# Exit codes of `edl run`.
_EXIT_FAULTY_NODE: Final = 69  # EX_UNAVAILABLE
_EXIT_NOT_STORED: Final = 74  # EX_IOERR
_EXIT_TRY_AGAIN: Final = 75  # EX_TEMPFAIL
_EXIT_NOT_KNOWN: Final = 255  # containerd's UnknownExitStatus: it lost the process, or never started it


class TerminationCause(Enum):
    """Why a worker's process or pod ended."""

    SUCCEEDED = "succeeded"
    USER_ERROR = "user_error"  # the script raised, or exited with its own code
    OUT_OF_MEMORY = "out_of_memory"  # the kernel killed it, or a child process, at its memory limit
    KILLED = "killed"  # by SIGKILL from an unknown sender
    CRASHED = "crashed"  # in native code, such as SIGSEGV, SIGBUS or SIGABRT
    PEER_LOST = "peer_lost"  # it lost contact with another worker; the cause is elsewhere
    PREEMPTED = "preempted"  # it made room for something more important, or was asked to end (SIGTERM)
    EVICTED = "evicted"  # the node lacked a resource, and the kubelet evicted this pod, or refused it
    NODE_LOST = "node_lost"  # the node is gone, or does not answer
    HARDWARE = "hardware"  # a GPU of the node is broken, or the node failed the check before joining
    UNCLEAR_FAULT = "unclear_fault"  # an illegal operation on a GPU: the kernel's own error, or the GPU's
    LAUNCH_FAILED = "launch_failed"  # the container never ran: its image, command, volume or configuration is missing
    NO_TEACHER = "no_teacher"  # no teacher was live while the script waited
    QUORUM_MISSED = "quorum_missed"  # too few nodes joined within the deadline
    NOT_STORED = "not_stored"  # the script succeeded, but its last state was not stored
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class TerminationReport:
    """Evidence about an ended worker, as plain values that an agent, an operator and a test can all fill in."""

    exit_code: int | None = None
    """Exit code of the process or container. For a signal, the code is negative as in Python, or above 128 as in
    Kubernetes."""
    signal: int = 0  # that killed it, if a source other than the exit code says so; 0 for none
    oom_kills: int | None = None
    """By how much the counter `oom_kill` of the worker's cgroup (`edl.cgroups`) has grown since the worker's present
    processes started. If the growth were counted from an earlier time, a kill that the job survived would look like the
    cause."""
    agent_cause: str = ""  # the agent's verdict on its workers: a value of `edl.collective`'s `ExitCause`
    pod_phase: str = ""  # `status.phase`
    pod_reason: str = ""  # `status.reason`, such as `Evicted`
    container_reason: str = ""  # of its terminated or waiting state, such as `OOMKilled` or `ErrImagePull`
    conditions: tuple[str, ...] = ()  # reasons of the pod's conditions that are true, such as `PreemptionByScheduler`
    events: tuple[str, ...] = ()  # reasons of the pod's and its node's events since it started, such as `Preempted`
    node_ready: bool | None = None  # whether its node answers
    message: str = ""  # the traceback, or other text for the user


@dataclass(frozen=True)
class TerminationVerdict:
    """Why a worker ended, and the evidence in one line."""

    cause: TerminationCause
    evidence: str


_BY_AGENT: Final[Mapping[str, TerminationCause]] = {
    "killed": TerminationCause.KILLED,
    "crashed": TerminationCause.CRASHED,
    "contact": TerminationCause.PEER_LOST,
    "error": TerminationCause.USER_ERROR,
    "hardware": TerminationCause.HARDWARE,
    "unclear": TerminationCause.UNCLEAR_FAULT,
    "missing": TerminationCause.UNCLEAR_FAULT,
    "no_teacher": TerminationCause.NO_TEACHER,
}
"""The keys are the values of `edl.collective.agent.health.failures.ExitCause`; a test compares the two."""

# Reasons from Kubernetes. For conditions and pods: https://kubernetes.io/docs/concepts/workloads/pods/disruptions/ and
# k8s.io/api/core/v1; for events: pkg/kubelet/events, the scheduler, and the node and taint controllers.
_EVICTED: Final = frozenset(
    {
        *("Evicted", "TerminationByKubelet"),
        # Refused by the kubelet on admission, as after a restart: pkg/kubelet/lifecycle and cm/admission.
        *("UnexpectedAdmissionError", "NodeAffinity", "NodePorts", "TopologyAffinityError", "AdmissionFailed"),
    }
)
_BY_REASON: Final[Mapping[TerminationCause, frozenset[str]]] = {
    TerminationCause.PREEMPTED: frozenset(
        {"PreemptionByScheduler", "Preempted", "Preempting", "EvictionByEvictionAPI"}
    ),
    TerminationCause.NODE_LOST: frozenset(
        {
            *("DeletionByTaintManager", "DeletionByPodGC", "TaintManagerEviction", "NodeLost", "NodeNotReady"),
            *("NodeShutdown", "Shutdown", "Terminated", "RemovingNode", "DeletingNode"),
        }
    ),
    TerminationCause.EVICTED: _EVICTED,
    TerminationCause.LAUNCH_FAILED: frozenset(
        {
            *("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"),
            *("CreateContainerConfigError", "CreateContainerError", "ContainerCannotRun"),
            *("StartError", "RunContainerError", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"),
            "InitContainerFailed",  # not from Kubernetes, whose pod only says that it has failed
        }
    ),
}
"""Reasons in a pod's status, the most trustworthy first."""
_NO_ROOM_PREFIX: Final = "OutOf"  # plus a resource: OutOfcpu, OutOfnvidia.com/gpu
_CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
_LEAVING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def find_termination_cause(report: TerminationReport) -> TerminationVerdict:
    """Return why a worker ended; any field of the report may be missing."""
    number, code = _read_exit(report)
    if code == 0 and not number:
        return TerminationVerdict(TerminationCause.SUCCEEDED, "exit code 0")
    if code == _EXIT_NOT_STORED:  # also the job's end, which a later loss of the pod does not change
        return TerminationVerdict(TerminationCause.NOT_STORED, f"exit code {code}")
    return (
        _find_by_hardware(report, code)
        or _find_by_memory(report, number)
        or _find_by_pod(report, code, number)
        or _find_by_exit(report, code, number)
    )


def _read_exit(report: TerminationReport) -> tuple[int, int | None]:
    """Return the signal that ended the worker (0 for none), and the worker's exit code (None if there is none)."""
    code = report.exit_code
    if report.signal:
        return report.signal, None
    if code is not None and code < 0:
        return -code, None
    if code is not None and _SIGNAL_BASE < code <= _SIGNAL_BASE + _LAST_SIGNAL:
        return code - _SIGNAL_BASE, None
    return 0, code


def _find_by_hardware(report: TerminationReport, code: int | None) -> TerminationVerdict | None:
    """Return the agent's finding about the node, which a later loss of the pod does not change."""
    if report.agent_cause == "hardware":
        return TerminationVerdict(TerminationCause.HARDWARE, "the agent found a broken GPU")
    if code == _EXIT_FAULTY_NODE:
        return TerminationVerdict(TerminationCause.HARDWARE, f"exit code {code}: the node is faulty")
    return None


def _find_by_memory(report: TerminationReport, number: int) -> TerminationVerdict | None:
    if report.container_reason == "OOMKilled":
        return TerminationVerdict(TerminationCause.OUT_OF_MEMORY, "the container's status says OOMKilled")
    # A node short of memory evicts by SIGTERM first; if it kills, the counter grows too, and the pod says so.
    if report.oom_kills and not ({report.pod_reason, *report.conditions} & _EVICTED):
        what = f"its oom_kill count grew by {report.oom_kills}" + (f" in addition to signal {number}" if number else "")
        return TerminationVerdict(TerminationCause.OUT_OF_MEMORY, what)
    return None


def _find_by_pod(report: TerminationReport, code: int | None, number: int) -> TerminationVerdict | None:
    """Return the pod's fate by the reasons in its status, or else by its events, if these fit how the pod ended.

    Events outlive their causes: a node may have been unreachable for a moment long before the script raised.
    """
    status = {report.pod_reason, report.container_reason, *report.conditions}
    for cause, reasons in _BY_REASON.items():
        if found := status & reasons:
            whose = "container" if cause is TerminationCause.LAUNCH_FAILED else "pod"
            return TerminationVerdict(cause, f"the {whose}'s status says {min(found)}")
        if cause is TerminationCause.EVICTED and report.pod_reason.startswith(_NO_ROOM_PREFIX):
            return TerminationVerdict(cause, f"the pod's status says {report.pod_reason}")
    found_out = not number and report.agent_cause not in ("", "killed", "contact")
    if code is not None or found_out or number in _CRASHES:
        return None
    if report.node_ready is False:
        return TerminationVerdict(TerminationCause.NODE_LOST, "its node no longer answers")
    for cause, reasons in _BY_REASON.items():
        if found := set(report.events) & reasons:
            return TerminationVerdict(cause, f"an event says {min(found)}")
    return None


def _find_by_exit(report: TerminationReport, code: int | None, number: int) -> TerminationVerdict:
    if code == _EXIT_TRY_AGAIN and report.agent_cause != "no_teacher":
        return TerminationVerdict(TerminationCause.QUORUM_MISSED, f"exit code {code}")
    # If a signal ended the process, the agent's message may be about an earlier end, which the job survived and which
    # must not stop it. A lost peer and an unclear fault also end a process by SIGABRT.
    believed = not number or (report.agent_cause == "killed" and number not in _CRASHES | _LEAVING)
    believed = believed or (report.agent_cause in ("contact", "unclear", "missing") and number not in _LEAVING)
    if report.agent_cause in _BY_AGENT and believed:
        return TerminationVerdict(_BY_AGENT[report.agent_cause], f"the agent says {report.agent_cause}")
    if number in _CRASHES:
        return TerminationVerdict(TerminationCause.CRASHED, f"signal {number}")
    if number in _LEAVING:
        return TerminationVerdict(TerminationCause.PREEMPTED, f"signal {number}: it was asked to leave")
    if number:
        return TerminationVerdict(TerminationCause.KILLED, f"signal {number}")
    if code == _EXIT_NOT_KNOWN:
        return TerminationVerdict(TerminationCause.UNKNOWN, f"exit code {code}, and no message from the agent")
    if code is not None:
        return TerminationVerdict(TerminationCause.USER_ERROR, f"exit code {code}")
    if report.pod_phase == "Succeeded":
        return TerminationVerdict(TerminationCause.SUCCEEDED, "the pod's phase is Succeeded")
    return TerminationVerdict(TerminationCause.UNKNOWN, "no information about its end")


def parse_termination_message(text: str) -> TerminationReport:
    """Parse a termination message, which is `message` of the container's terminated state.

    The user's program, or Kubernetes (`FallbackToLogsOnError`), may write other text there: such text is only a message
    for people. The pod's status has a more reliable exit code.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return TerminationReport(message=text.strip())
    if not isinstance(values, dict) or not isinstance(values.get("cause"), str):
        return TerminationReport(message=text.strip())
    message = values.get("message")
    return TerminationReport(
        exit_code=_read_count(values, "exit_code", _MAX_EXIT_CODE),
        oom_kills=_read_count(values, "oom_kills", _MAX_KILLS),
        agent_cause=values["cause"],
        message=message if isinstance(message, str) else "",
    )


def _read_count(values: dict[str, Any], name: str, largest: int) -> int | None:
    value = values.get(name)
    return value if type(value) is int and 0 <= value <= largest else None


MEMORY_STEP: Final = 1.5
"""Three steps give 3.4 times the request; if a worker needs more, the cause is a leak rather than a wrong estimate."""
_FIRST_DELAY_S: Final = 10.0  # before a second new pod; doubled each time, like the kubelet's CrashLoopBackOff
_MAX_DELAY_S: Final = 300.0  # also the limit of the kubelet's CrashLoopBackOff


class RelaunchAction(Enum):
    """An action after a worker's end."""

    NOTHING = "nothing"  # it did its work
    NEW_POD = "new process or pod"  # another pod, or on a bare machine another agent process, on any node
    MORE_MEMORY = "new pod with more memory"
    ELSEWHERE = "new pod on another node"
    STOP = "stop with the error"  # the job ends, and shows the user's error


@dataclass(frozen=True)
class RelaunchRule:
    """An action, and how many times it is tried without progress; None for no limit."""

    action: RelaunchAction
    times: int | None = None


@dataclass(frozen=True)
class RelaunchDecision:
    """The action after a worker's end, with its details."""

    action: RelaunchAction
    delay_s: float = 0.0  # to wait before


_NEW: Final = RelaunchAction.NEW_POD
_ELSEWHERE: Final = RelaunchAction.ELSEWHERE

RELAUNCH_TABLE: Final[Mapping[TerminationCause, tuple[RelaunchRule, ...]]] = {
    TerminationCause.SUCCEEDED: (RelaunchRule(RelaunchAction.NOTHING),),
    TerminationCause.USER_ERROR: (),
    TerminationCause.OUT_OF_MEMORY: (RelaunchRule(RelaunchAction.MORE_MEMORY, 3),),
    TerminationCause.KILLED: (RelaunchRule(_NEW, 5), RelaunchRule(_ELSEWHERE, 2)),
    TerminationCause.CRASHED: (RelaunchRule(_NEW, 2), RelaunchRule(_ELSEWHERE, 1)),
    TerminationCause.PEER_LOST: (RelaunchRule(_NEW, 10),),
    TerminationCause.PREEMPTED: (RelaunchRule(_NEW),),
    TerminationCause.EVICTED: (RelaunchRule(_ELSEWHERE, 10),),
    TerminationCause.NODE_LOST: (RelaunchRule(_ELSEWHERE),),
    TerminationCause.HARDWARE: (RelaunchRule(_ELSEWHERE, 10),),
    TerminationCause.UNCLEAR_FAULT: (RelaunchRule(_NEW, 1), RelaunchRule(_ELSEWHERE, 1)),
    TerminationCause.LAUNCH_FAILED: (RelaunchRule(_NEW, 3),),
    TerminationCause.NO_TEACHER: (RelaunchRule(_NEW),),
    TerminationCause.QUORUM_MISSED: (RelaunchRule(_NEW),),
    TerminationCause.NOT_STORED: (),  # another pod would find the job done and nothing to store
    TerminationCause.UNKNOWN: (RelaunchRule(_NEW, 3),),
}
"""Actions to try, in this order, before the job stops. In addition, `edl run` restarts its workers up to ten times
without progress."""


def decide_relaunch(
    cause: TerminationCause, count: int, table: Mapping[TerminationCause, tuple[RelaunchRule, ...]] = RELAUNCH_TABLE
) -> RelaunchDecision:
    """Decide the action after a worker's end, the `count`-th (from 1) with this cause without progress."""
    left = count
    for rule in table[cause]:
        if rule.times is None or left <= rule.times:
            if rule.action is not RelaunchAction.NEW_POD or left == 1:
                return RelaunchDecision(rule.action)
            doublings = min(left - 2, 16)  # far beyond the longest delay, but small enough for a float
            return RelaunchDecision(rule.action, min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**doublings))
        left -= rule.times
    return RelaunchDecision(RelaunchAction.STOP)
