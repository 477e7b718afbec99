"""What conditions and events of an ElasticJob say: each reason, what it means, and what to do.

The page docs/kubernetes-conditions.md has the same tables; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edl.master.scaling.terminations import TerminationCause

__all__ = ["CONDITION_REASONS", "EVENT_REASONS", "FAILURE_ADVICE", "FAILURE_REASONS"]

FAILURE_REASONS: Final[Mapping[TerminationCause, str]] = {
    TerminationCause.USER_ERROR: "UserError",
    TerminationCause.OUT_OF_MEMORY: "OutOfMemory",
    TerminationCause.KILLED: "Killed",
    TerminationCause.CRASHED: "Crashed",
    TerminationCause.PEER_LOST: "PeerLost",
    TerminationCause.EVICTED: "Evicted",
    TerminationCause.HARDWARE: "HardwareFault",
    TerminationCause.UNCLEAR_FAULT: "UnclearFault",
    TerminationCause.LAUNCH_FAILED: "LaunchFailed",
    TerminationCause.NOT_STORED: "NotStored",
    TerminationCause.UNKNOWN: "UnknownEnd",
}
"""Of the condition `Failed`, by the cause that ended the job. The causes that are missing never end a job."""

FAILURE_ADVICE: Final[Mapping[str, str]] = {
    "UserError": "mend the script, delete the job and submit it again",
    "OutOfMemory": "ask for more memory in spec.template, or find what leaks",
    "Killed": "find out what kills it: `kubectl describe pod`, and the kernel's log of its node",
    "Crashed": "look for a library, driver or image that does not fit: native code crashed on two nodes",
    "PeerLost": "look at the network between the nodes, and at the other workers' logs",
    "Evicted": "ask for the memory and ephemeral storage that it uses, so that it goes where they are",
    "HardwareFault": "look at the GPUs of the nodes named in status.members; several nodes failed",
    "UnclearFault": "run the script with CUDA_LAUNCH_BLOCKING=1: a kernel failed on two nodes",
    "LaunchFailed": "mend the image, volume, secret or init container that the message names",
    "NotStored": "look at the storage of spec.checkpoint: the last state did not get there",
    "UnknownEnd": "look at the node's kubelet: nothing tells why the pod ended",
    "DeadlineExceeded": "raise spec.activeDeadlineSeconds, or give it more workers",
}
"""What to do about each reason of the condition `Failed`."""

CONDITION_REASONS: Final[Mapping[str, Mapping[str, str]]] = {
    "Accepted": {
        "Valid": "The spec can be worked on.",
        "StoreChangeIgnored": "The job keeps the store and checkpoint that it started with, until it runs no more.",
        "StoreNotAllowed": "The operator may not read the job's store: neither progress nor a useful size is known.",
        "StoreUnreachable": "The store does not answer the operator; the job keeps the size that was wanted last.",
    },
    "Scheduled": {
        "AllScheduled": "All workers that are wanted have a node.",
        "MinimumScheduled": "At least `minReplicas` workers have a node; others wait for room.",
        "Unschedulable": "The scheduler finds no node for a worker that the job needs to start; it has its words.",
        "WaitingForNode": "The scheduler has not looked at the workers yet.",
        "BackingOff": "Workers that ended are made again after a while.",
        "Suspended": "`spec.suspend` is true: there are no workers.",
        "Finished": "The job has ended.",
    },
    "Running": {
        "WorkersRunning": "At least `minReplicas` workers run.",
        "NotScheduled": "Too few workers have a node: see `Scheduled`.",
        "Starting": "Containers of the workers are being started.",
        "ContainerWaiting": "A container cannot be started: the kubelet's words are in the message.",
        "BackingOff": "Workers that ended are made again after a while; the message says why they ended.",
        "Ending": "A worker has come to the end of the script, so the job has ended: the others are waited for.",
        "Suspended": "`spec.suspend` is true: there are no workers.",
        "Finished": "The job has ended.",
    },
    "Suspended": {
        "SuspendRequested": "`spec.suspend` is true; `edl resume` goes on from the checkpoint.",
        "NotSuspended": "`spec.suspend` is false.",
    },
    "Complete": {
        "WorkersSucceeded": "The script has ended well.",
        "NotFinished": "The job goes on.",
        "JobFailed": "The job has failed: see `Failed`.",
    },
    "Failed": {
        "NotFailed": "The job has not failed.",
        "DeadlineExceeded": "It has run for `activeDeadlineSeconds`.",
        "UserError": "The script raised, or ended with an exit code of its own: the message has its traceback.",
        "OutOfMemory": "A worker was killed for want of memory, at last with 3.4 times the template's.",
        "Killed": "A worker was killed by SIGKILL again and again, and nothing tells by whom.",
        "Crashed": "Native code of the script crashed (SIGSEGV and the like), on another node as well.",
        "PeerLost": "A worker lost contact with the others again and again.",
        "Evicted": "Nodes ran short of memory, disk or devices, and put a worker out ten times.",
        "HardwareFault": "GPUs of ten nodes were found broken.",
        "UnclearFault": "A GPU kernel failed, on another node as well.",
        "LaunchFailed": "A container could not start, four times: image, volume, secret, command or init container.",
        "NotStored": "The script ended well, but its last state did not get to storage.",
        "UnknownEnd": "A worker ended four times, and nothing says why; exit code 255 with no "
        "message from `edl run` counts as this.",
    },
}
"""Type of a condition -> reason -> what it means."""

EVENT_REASONS: Final[Mapping[str, str]] = {
    "Started": "The first workers are made.",
    "Growing": "More workers are made: there is room, or the target has risen.",
    "Shrinking": "Workers are let go: the target has fallen. They save, and end within `gracePeriodSeconds`.",
    "NoRoom": "A worker beyond `minReplicas` found no node and is let go; it is tried again later.",
    "WorkerEnded": "A worker's pod ended, why, and what is done about it.",
    "MasterEnded": "The master's pod ended, why, and what is done about it.",
    "NameTaken": "A pod of another resource has the name of a new worker's: the next try's name is used.",
    "ShardsGivenUp": "The master ended since shards had failed again and again: `edl status JOB` shows them.",
    "MemoryNotSet": "A worker ended for want of memory, and the template sets none that could be raised.",
    "ScaleIgnored": "`spec.replicas` was set, but `spec.scaling` is `auto`: set it to `external` for `kubectl scale`.",
    "StoreChangeIgnored": "Another store or checkpoint is not taken while pods run: suspend the job, then resume it.",
    "StoreNotAllowed": "The operator does not read the job's store; the message says what would allow it.",
    "StoreUnreachable": "The store has not answered the operator for half a minute; the message says why.",
    "Suspended": "The workers are let go since `spec.suspend` is true.",
    "Resumed": "`spec.suspend` is false again.",
    "Succeeded": "The job has succeeded.",
    "Failed": "The job has failed; the message has the traceback's end.",
}
"""Reason of an event -> what it means."""
