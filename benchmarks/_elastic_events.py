"""Events that happen to an elastic job, and how long the remaining workers take to recover."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks._elastic_job import Job
from benchmarks._step_logs import longest_gap_s, median_step_s

__all__ = ["ADVERSARIES", "Event", "Outcome", "get_over", "join", "kill_node", "kill_rank"]

_RECENT = 30
_SECOND_KILL_S = 0.15


@dataclass(frozen=True)
class Event:
    """An event at `at`, after which the `survivors` should recover and the places in `after` train together."""

    at: float
    survivors: list[str]
    after: list[str]


@dataclass(frozen=True)
class Outcome:
    """How a job recovered from an event.

    Attributes:
        seconds: Seconds from the event to the slowest survivor's first step in the next world.
        pause_s: A survivor's longest time between two steps, minus its usual time.
        lost: Steps that were finished before the event and had to be repeated.
    """

    seconds: float
    pause_s: float
    lost: int


def get_over(job: Job, happen: Callable[[Job], Event], timeout_s: float) -> Outcome:
    """Let an event happen to a job, and wait until it trains again.

    Raises:
        Hang: The job does not train again.
    """
    job.step_logs.read()
    usual = {place: median_step_s(steps[-_RECENT:]) for place, steps in job.step_logs.steps.items() if len(steps) > 1}
    event = happen(job)
    job.together(event.after, count=2, timeout_s=timeout_s)
    resumed = {place: job.step_logs.resumed(place).at for place in event.survivors}
    pauses = [
        longest_gap_s(job.step_logs.steps[place], event.at, resumed[place]) - usual[place] for place in event.survivors
    ]
    return Outcome(max(resumed.values()) - event.at, max(pauses), job.step_logs.lost(event.survivors))


def kill_rank(job: Job, victim: str) -> Event:
    """Send SIGKILL to one rank. The job replaces it if the job itself starts ranks."""
    rest = [place for place in job.places() if place != victim]
    at = job.signal_rank(victim)
    return Event(at, rest, job.places())


def join(job: Job) -> Event:
    """Add a node."""
    members = job.places()
    at = job.start(max(job.nodes) + 1)
    return Event(at, members, job.places())


def _stop_rank(job: Job) -> Event:
    at = job.signal_rank("1-0", signal.SIGSTOP)
    return Event(at, ["0-0", "2-0"], job.places())


def kill_node(job: Job, number: int) -> Event:
    """Send SIGKILL to a node's agent and everything that it started."""
    at = job.kill_node(number)
    return Event(at, job.places(), job.places())


def _kill_two(job: Job) -> Event:
    job.signal_rank("1-0")
    at = job.signal_rank("2-0")
    return Event(at, ["0-0"], job.places())


def _kill_again(job: Job) -> Event:
    job.signal_rank("1-0")
    time.sleep(_SECOND_KILL_S)  # not a wait for a condition: this is when the second worker dies
    at = job.kill_node(2)
    return Event(at, ["0-0"], job.places())


def _leave(job: Job) -> Event:
    at = job.ask_to_leave(1)
    return Event(at, job.places(), job.places())


ADVERSARIES: dict[str, Callable[[Job], Event]] = {
    "a worker: SIGKILL": lambda job: kill_rank(job, "1-0"),
    "a worker: SIGSTOP": _stop_rank,
    "a node with its agent: SIGKILL": lambda job: kill_node(job, 1),
    "the first node with its agent: SIGKILL": lambda job: kill_node(job, 0),
    "two workers at once: SIGKILL": _kill_two,
    "a worker, and a node during the recovery: SIGKILL": _kill_again,
    "a node leaves: SIGTERM": _leave,
}
"""Events for a job with three nodes and one rank on each."""
