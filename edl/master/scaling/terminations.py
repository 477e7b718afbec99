"""Why a worker's process or pod ended: one cause, from one pure function over all that is known of its end.

No single source tells. An exit code of 137 is a SIGKILL by anybody; Kubernetes says `OOMKilled` only where the
container's first process died of it; a node that is lost says nothing at all. So the evidence is weighed, the most
specific first: what the agent found out about its hardware, then memory, then what became of the pod and its node, and
only then exit codes and signals.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["TerminationCause", "TerminationReport", "TerminationVerdict", "find_termination_cause"]

_SIGNAL_BASE: Final = 128
"""A shell's and Kubernetes' exit code of a process that a signal killed is this and the signal's number."""
_LAST_SIGNAL: Final = 64  # SIGRTMAX on Linux: larger exit codes are a program's own, such as 255

# What `edl run` ends with: see edl.collective.agent.ending, which this package does not import.
_EXIT_FAULTY_NODE: Final = 69  # EX_UNAVAILABLE
_EXIT_NOT_STORED: Final = 74  # EX_IOERR
_EXIT_TRY_AGAIN: Final = 75  # EX_TEMPFAIL
_EXIT_NOT_KNOWN: Final = 255  # containerd's UnknownExitStatus: it lost the process, or never started it


class TerminationCause(Enum):
    """Why a worker's process or pod ended."""

    SUCCEEDED = "succeeded"
    """It did all it had to."""
    USER_ERROR = "user_error"
    """The script raised, or ended with a code of its own."""
    OUT_OF_MEMORY = "out_of_memory"
    """The kernel killed it, or a process that works for it, for want of memory within its own limit."""
    KILLED = "killed"
    """By SIGKILL, and nothing tells by whom."""
    CRASHED = "crashed"
    """Native code did what it must not: SIGSEGV, SIGBUS, SIGABRT and the like."""
    PEER_LOST = "peer_lost"
    """It lost contact with another worker; the cause is elsewhere."""
    PREEMPTED = "preempted"
    """Its place was taken for something more important, or it was asked to leave (SIGTERM)."""
    EVICTED = "evicted"
    """The node had too little of something, and the kubelet chose this pod, or refused it when it came."""
    NODE_LOST = "node_lost"
    """The node is gone, or no longer answers."""
    HARDWARE = "hardware"
    """A GPU of the node is broken, or the node failed the check before joining."""
    UNCLEAR_FAULT = "unclear_fault"
    """A kernel did what it must not: its own error, or the GPU's."""
    LAUNCH_FAILED = "launch_failed"
    """The container never ran: its image, command, volume or configuration cannot be had."""
    QUORUM_MISSED = "quorum_missed"
    """Too few nodes came within the deadline."""
    NOT_STORED = "not_stored"
    """The script ended well, but its last state did not get to storage."""
    UNKNOWN = "unknown"
    """Nothing is known of its end."""


@dataclass(frozen=True)
class TerminationReport:
    """What is known of an ended worker. Plain values, so that an agent, an operator and a test can all fill it.

    Attributes:
        exit_code: of the process or container; negative for a signal as Python has it, above 128 as Kubernetes has it.
        signal: that killed it, if a source says so apart from the exit code; 0 for none.
        oom_kills: by how much its cgroup's counter `oom_kill` (`edl.cgroups`) grew since its present processes started;
            None if unknown. Counted from further back, a kill that was got over would be taken for the cause.
        agent_cause: what the agent says of its workers: a value of `edl.collective`'s `ExitCause`.
        pod_phase: `status.phase`.
        pod_reason: `status.reason`, such as `Evicted`.
        container_reason: of the container's terminated or waiting state, such as `OOMKilled` or `ErrImagePull`.
        conditions: reasons of the pod's conditions that are true, such as `PreemptionByScheduler`.
        events: reasons of the pod's and its node's events since it started, such as `Preempted`.
        node_ready: whether its node answers; None if unknown.
        message: the traceback, or what else the user should read.
    """

    exit_code: int | None = None
    signal: int = 0
    oom_kills: int | None = None
    agent_cause: str = ""
    pod_phase: str = ""
    pod_reason: str = ""
    container_reason: str = ""
    conditions: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    node_ready: bool | None = None
    message: str = ""


@dataclass(frozen=True)
class TerminationVerdict:
    """The cause that was found, and what it was found from.

    Attributes:
        cause: why the worker ended.
        evidence: what tells so, in a line for a person.
    """

    cause: TerminationCause
    evidence: str


_BY_AGENT: Final[Mapping[str, TerminationCause]] = {
    "killed": TerminationCause.KILLED,
    "contact": TerminationCause.PEER_LOST,
    "error": TerminationCause.USER_ERROR,
    "hardware": TerminationCause.HARDWARE,
    "unclear": TerminationCause.UNCLEAR_FAULT,
    "missing": TerminationCause.UNCLEAR_FAULT,
}
"""The words of `edl.collective.agent.health.failures.ExitCause`; a test compares the two."""

# Reasons that Kubernetes gives. Of conditions and pods: https://kubernetes.io/docs/concepts/workloads/pods/disruptions/
# and k8s.io/api/core/v1; of events: pkg/kubelet/events and the scheduler and the controllers of nodes and taints.
_PREEMPTED: Final = frozenset({"PreemptionByScheduler", "Preempted", "Preempting", "EvictionByEvictionAPI"})
_NODE_LOST: Final = frozenset(
    {
        *("DeletionByTaintManager", "DeletionByPodGC", "TaintManagerEviction", "NodeLost", "NodeNotReady"),
        *("NodeShutdown", "Shutdown", "Terminated", "RemovingNode", "DeletingNode"),
    }
)
_EVICTED: Final = frozenset(
    {
        *("Evicted", "TerminationByKubelet"),
        # Refused by the kubelet when it came to its node, as after a restart: pkg/kubelet/lifecycle and cm/admission.
        *("UnexpectedAdmissionError", "NodeAffinity", "NodePorts", "TopologyAffinityError", "AdmissionFailed"),
    }
)
_NO_ROOM_PREFIX: Final = "OutOf"  # and a resource: OutOfcpu, OutOfnvidia.com/gpu
_MEMORY: Final = frozenset({"OOMKilled"})
_LAUNCH: Final = frozenset(
    {
        *("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"),
        *(
            "CreateContainerConfigError",
            "CreateContainerError",
            "ContainerCannotRun",
            "StartError",
            "RunContainerError",
        ),
        *("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"),
        "InitContainerFailed",  # not of Kubernetes, whose pod only says that it has failed
    }
)
_CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
_LEAVING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_BY_EXIT_CODE: Final[Mapping[int, TerminationCause]] = {
    _EXIT_FAULTY_NODE: TerminationCause.HARDWARE,
    _EXIT_TRY_AGAIN: TerminationCause.QUORUM_MISSED,
}


def find_termination_cause(report: TerminationReport) -> TerminationVerdict:
    """Return why a worker ended.

    Args:
        report: all that is known; every field may be missing.
    """
    number, code = _read_exit(report)
    if code == 0 and not number:
        return TerminationVerdict(TerminationCause.SUCCEEDED, "exit code 0")
    if code == _EXIT_NOT_STORED:  # the job's end as well, which no later loss of the pod makes untrue
        return TerminationVerdict(TerminationCause.NOT_STORED, f"exit code {code}")
    return (
        _find_by_hardware(report, code)
        or _find_by_memory(report, number)
        or _find_by_pod(report, code, number)
        or _find_by_exit(report, code, number)
    )


def _read_exit(report: TerminationReport) -> tuple[int, int | None]:
    """Return the signal that ended the worker, 0 for none, and its exit code, None where there is none."""
    code = report.exit_code
    if report.signal:
        return report.signal, None
    if code is not None and code < 0:
        return -code, None
    if code is not None and _SIGNAL_BASE < code <= _SIGNAL_BASE + _LAST_SIGNAL:
        return code - _SIGNAL_BASE, None
    return 0, code


def _find_by_hardware(report: TerminationReport, code: int | None) -> TerminationVerdict | None:
    """Return what the agent found out about the node, which no later loss of the pod makes untrue."""
    if report.agent_cause == "hardware":
        return TerminationVerdict(TerminationCause.HARDWARE, "the agent found a broken GPU")
    if code == _EXIT_FAULTY_NODE:
        return TerminationVerdict(TerminationCause.HARDWARE, f"exit code {code}: the node is faulty")
    return None


def _find_by_memory(report: TerminationReport, number: int) -> TerminationVerdict | None:
    if report.container_reason in _MEMORY:
        return TerminationVerdict(TerminationCause.OUT_OF_MEMORY, "the container's status says OOMKilled")
    # A node short of memory evicts by SIGTERM first; where it kills, the counter grows as well, and the pod says so.
    if report.oom_kills and not ({report.pod_reason, *report.conditions} & _EVICTED):
        what = f"its cgroup counts {report.oom_kills} oom_kill" + (f" beside signal {number}" if number else "")
        return TerminationVerdict(TerminationCause.OUT_OF_MEMORY, what)
    return None


def _find_by_pod(report: TerminationReport, code: int | None, number: int) -> TerminationVerdict | None:
    """Return what became of the pod: of reasons in its status first, of events only where its end fits them.

    Events outlive what they tell of: a node may have been away for a moment long before the script raised.
    """
    status = {report.pod_reason, report.container_reason, *report.conditions}
    if found := status & _PREEMPTED:
        return TerminationVerdict(TerminationCause.PREEMPTED, f"the pod's status says {min(found)}")
    if found := status & _NODE_LOST:
        return TerminationVerdict(TerminationCause.NODE_LOST, f"the pod's status says {min(found)}")
    if found := status & _EVICTED or ({report.pod_reason} if report.pod_reason.startswith(_NO_ROOM_PREFIX) else set()):
        return TerminationVerdict(TerminationCause.EVICTED, f"the pod's status says {min(found)}")
    if found := status & _LAUNCH:
        return TerminationVerdict(TerminationCause.LAUNCH_FAILED, f"the container's status says {min(found)}")
    found_out = not number and report.agent_cause not in ("", "killed", "contact")
    if code is not None or found_out or number in _CRASHES:
        return None
    if report.node_ready is False:
        return TerminationVerdict(TerminationCause.NODE_LOST, "its node no longer answers")
    kinds = {
        TerminationCause.PREEMPTED: _PREEMPTED,
        TerminationCause.NODE_LOST: _NODE_LOST,
        TerminationCause.EVICTED: _EVICTED,
        TerminationCause.LAUNCH_FAILED: _LAUNCH,
    }
    for cause, reasons in kinds.items():
        if found := set(report.events) & reasons:
            return TerminationVerdict(cause, f"an event says {min(found)}")
    return None


def _find_by_exit(report: TerminationReport, code: int | None, number: int) -> TerminationVerdict:
    if code is not None and code in _BY_EXIT_CODE:
        return TerminationVerdict(_BY_EXIT_CODE[code], f"exit code {code}")
    # Of a process that a signal ended, the agent's word may be about an earlier end, which the job got over: nobody's
    # job is stopped for that. A lost peer and an unclear fault end a process by SIGABRT as well.
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
    return TerminationVerdict(TerminationCause.UNKNOWN, "nothing is known of its end")
