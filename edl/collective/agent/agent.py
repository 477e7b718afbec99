"""One node's part of a job: it keeps the node's record, follows the job's, and runs this node's workers accordingly.

A single thread acts; the others only put what they learn (a record changed, a worker ended, a signal came) into its
queue. `context` is what an agent holds, `join` what it does before it joins, `reconciler` what it does from then on.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable

from edl.collective.agent.context import Events, Gone, Part, take_part
from edl.collective.agent.health.stragglers import StepTimes
from edl.collective.agent.join import arrive
from edl.collective.agent.launch_spec import Launch
from edl.collective.agent.reconciler import Conduct
from edl.collective.agent.signals import AskedToLeaveError, Signals
from edl.discovery.store import Store
from edl.errors import DiscoveryError

__all__ = ["Agent"]

_TICK_S = 0.1
_PAUSING_TICK_S = 0.01
_REREAD_S = 1.0
_WINDOW_S = 5.0


class Agent:
    """Runs one node of a job until the job has ended or this node shall leave.

    Args:
        told: this node's part.
        store: shared by all nodes; stays the caller's to close.
        say: called with each line that a person should see.
    """

    def __init__(self, told: Launch, store: Store, say: Callable[[str], None]) -> None:
        self._told = told
        self._store = store
        self._say = say
        self._events: Events = queue.SimpleQueue()
        self._signals = Signals(lambda: self._events.put(None), slurm=told.slurm)
        self._step_times = StepTimes()
        self._shared_at = time.monotonic()
        self._read_at = -math.inf
        self._said_leaving = False
        self._gone: set[str] = set()

    def run(self) -> int:
        """Take part until the end. Returns the exit code, an `Exit`.

        Call it from the main thread: signals are handled here, and workers die with the thread that started them.

        Raises:
            SettingsError: checkpoints cannot be stored where they shall be.
            DiscoveryError: the store cannot be reached when this node comes.
            EDLError: the process that forks workers died while it imported, or took too long.
        """
        with self._signals, take_part(self._told, self._store, self._say, self._signals, self._events) as part:
            try:
                code = arrive(part)
                conduct = Conduct(part)
                while code is None:
                    code = self._turn(part, conduct)
            except AskedToLeaveError:
                self._say("asked to leave: leaving")
                if part.ending.joined:
                    part.chronicle.tell("leave", "asked to")
                code = self._signals.exit_code
            part.ending.code = code
        ended = part.ending.exit_code
        assert ended is not None
        return ended

    def _turn(self, part: Part, conduct: Conduct) -> int | None:
        """Wait for something to happen, or a moment, and act on it."""
        woken = self._drain(part, _PAUSING_TICK_S if conduct.pausing else _TICK_S)
        if self._signals.urgent:
            self._say("asked a second time: leaving at once")
            return self._signals.exit_code
        if self._signals.asked and not self._said_leaving:
            self._said_leaving = True
            self._say("asked to leave: the others are told, and this node goes after the next steps")
        part.crew.look()
        part.chronicle.observe(conduct.doing, part.crew, part.replicas.replicated_us)
        self._share_times(part)
        reread_s = _REREAD_S if part.crew.running and not conduct.pausing else _TICK_S
        due = time.monotonic() - self._read_at >= reread_s
        if not (woken or due or conduct.paused_unsaid or part.crew.failing):
            return None
        asked_at = time.monotonic()
        try:
            for node in list(self._gone):
                part.membership.bury(node)  # an error leaves it for the next turn: it may have served the store
                self._gone.discard(node)
            records = part.membership.read()
            self._read_at = time.monotonic()
            code = conduct.act(records)
        except DiscoveryError as exc:
            code = conduct.without_store(exc)
        part.crew.go_on(asked_at, conduct.until)
        return code

    def _drain(self, part: Part, timeout_s: float) -> bool:
        """Take in all events. Returns whether there were any."""
        woken = False
        try:
            event = self._events.get(timeout=timeout_s)
            while True:
                woken = True
                if isinstance(event, Gone):
                    self._gone.add(event.node)
                elif event is not None:
                    part.crew.take(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return woken

    def _share_times(self, part: Part) -> None:
        """Every window, tell the others what this node's ranks took for a step."""
        now = time.monotonic()
        if not part.crew.running or now - self._shared_at < _WINDOW_S:
            return
        self._shared_at = now
        first = part.crew.first_rank
        own_s = self._step_times.window({first + rank: one for rank, one in part.crew.readings().items()})
        if own_s:
            part.chronicle.share_times(part.crew.generation, own_s, leads=first == 0)
