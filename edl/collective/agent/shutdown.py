"""What an agent does at its end with states that are not in storage yet, and with its folder in memory."""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import wait
from dataclasses import dataclass, field, replace

from edl.background import start_call
from edl.collective.agent.exit_codes import ExitCode
from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.launch_spec import LaunchSpec
from edl.collective.agent.signals import StopSignals
from edl.collective.agent.termination_message import TerminationMessage
from edl.collective.checkpoint.storage.persister import CheckpointPersister

__all__ = ["ShutdownState", "note_unstored_state", "release_host_folder", "store_last_state"]

logger = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 30.0
"""For a last state, or without progress of it at a job's end. Kubernetes kills a pod 30 s after SIGTERM by default."""
_POLL_S = 0.05  # a second signal ends the wait this soon; a person does not notice it
_SILENT_S = 1.0  # most states are stored sooner, and nothing need be written about them


@dataclass
class ShutdownState:
    """What has to be known when an agent gives everything back.

    Attributes:
        code: the exit code, None while there is none.
        joined: whether the other nodes have seen this node.
        is_last_node: whether no other node was there last that was to stay.
        stored: whether nothing is left that had to be taken to storage.
        end: what ended this node's part, as far as is known beside the exit code.
    """

    code: int | None = None
    joined: bool = False
    is_last_node: bool = True
    stored: bool = True
    end: TerminationMessage = field(default_factory=TerminationMessage)

    @property
    def exit_code(self) -> int | None:
        """The process's exit code: a job that is done is not a success while its result is in no storage."""
        return ExitCode.NOT_STORED if self.code == ExitCode.DONE and not self.stored else self.code

    @property
    def termination(self) -> TerminationMessage:
        """What ended this node, as far as is known by now."""
        code = self.exit_code
        message = "the job is done, its last state is not stored" if code == ExitCode.NOT_STORED else self.end.message
        return replace(self.end, exit_code=int(code if code is not None else ExitCode.FAILED), message=message)

    @property
    def job_over(self) -> bool:
        """Whether the job has ended, and this node was in it."""
        return self.joined and self.code in (ExitCode.DONE, ExitCode.FAILED)


def store_last_state(
    persister: CheckpointPersister, signals: StopSignals, shutdown: ShutdownState, *, resumable: bool
) -> None:
    """Wait until the last checkpoint is stored, for a while, or until a second signal ends the wait.

    Args:
        persister: closed here.
        signals: of this agent.
        shutdown: `stored` is set here.
        resumable: whether a state in memory can be stored by a later start of the same command.
    """
    done = shutdown.code == ExitCode.DONE
    # Slurm ends the wait itself: by its KillWait or GraceTime, which were chosen for what the storage needs.
    patient = done or (signals.slurm and signals.stopping)
    if done:
        persister.store_newest()
    # In a thread, since a storage that hangs cannot be called back. The thread ends with the process; what it has not
    # completed by then is left incomplete, which readers know.
    closing = start_call("edl-store-last", lambda: persister.close(_STORE_TIMEOUT_S, patient=patient))
    began = time.monotonic()
    announced = False
    while not closing.done() and not signals.urgent:
        wait([closing], _POLL_S)
        if signals.stopping and not announced and time.monotonic() - began > _SILENT_S and not closing.done():
            announced = True
            until = (
                "Slurm waits for it as long as its KillWait"
                if signals.slurm
                else "asked once more, this node leaves without it"
            )
            logger.info("the last checkpoint is being stored; %s", until)
    shutdown.stored = closing.done() and closing.result()
    if not closing.done():
        logger.warning("the last checkpoint was not stored; what was stored before is as it was")
    if shutdown.exit_code == ExitCode.NOT_STORED:
        code = int(ExitCode.NOT_STORED)
        fields = {"exit_code": code}
        logger.error("the job is done, its last state is not stored: exit code %d", code, extra=fields)
        if resumable:
            logger.info(
                "it stays in this host's memory for an hour: the same command stores it, once the storage takes it"
            )


def note_unstored_state(host: HostFolder, spec: LaunchSpec, shutdown: ShutdownState) -> None:
    """Note in the folder that the last state of a job that is done is not stored yet, before that is tried.

    An agent that is killed meanwhile leaves the folder behind; a later start of the same command stores the state.

    Args:
        host: is removed, with the note, once the state is stored.
        spec: this node's part of the job.
        shutdown: how this node's part ended.
    """
    if shutdown.joined and shutdown.code == ExitCode.DONE and spec.checkpoint and spec.resumable:
        with contextlib.suppress(OSError):  # no room: the state is stored all the same, if nothing kills the agent
            host.unstored = True


def release_host_folder(host: HostFolder, spec: LaunchSpec, shutdown: ShutdownState) -> None:
    """Give the folder up; its state stays for a later start if this node left last, or could not store it.

    Args:
        host: closed here.
        spec: this node's part of the job.
        shutdown: how this node's part ended.
    """
    if shutdown.exit_code == ExitCode.NOT_STORED:
        host.unstored = True
        host.close(keep=spec.resumable)
        return
    keep = shutdown.code not in (ExitCode.DONE, ExitCode.FAILED) and shutdown.is_last_node and spec.resumable
    host.close(keep, used=shutdown.joined, ended=shutdown.job_over)
