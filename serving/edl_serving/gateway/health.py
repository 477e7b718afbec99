"""The health of an engine, looked at over and over beside the requests."""

from __future__ import annotations

import asyncio
import logging
import threading

from edl.background import BackgroundLoop
from edl.errors import SettingsError
from edl_serving.gateway.engine import EngineAccess, EngineConnection, EngineRefusal
from edl_serving.gateway.inspection import EngineFacts, explain_refusal, probe_endpoint, read_model
from edl_serving.gateway.top_rows import EngineAnswerError
from edl_serving.registration.probe import ProbeStatus, ReadinessTracker
from edl_serving.request_error import RequestError

__all__ = ["EngineHealth"]

_log = logging.getLogger(__name__)


class EngineHealth:
    """Asks an engine for its health, and whether its model is still the one that it was at the start.

    An engine that comes back may have been started with other settings: it is asked about a short prompt then, and so
    is one that has refused a request as if it had been.

    Args:
        engine: how to reach it.
        facts: found at the start.
        k: entries of a position that it must give.
        every_s: seconds between two questions.
        timeout_s: for an answer.
        failures: questions without an answer after which the engine is away; a refusal counts at once.

    Attributes:
        fault: why the engine cannot be asked; empty if it can.
    """

    def __init__(
        self, engine: EngineAccess, facts: EngineFacts, k: int, every_s: float, timeout_s: float, failures: int
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._k = k
        self._doubts = ""
        self._doubted = 0  # how often; of equal words, those that come during a probe are not answered by it
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._tracker = ReadinessTracker(failures)
        self._tracker.record_probe(ProbeStatus.READY)
        self._changed = ""
        self._lock = threading.Lock()  # of the fault and its causes: requests find them beside the looks
        self.fault = ""
        self._loop = BackgroundLoop("edl-engine-health", self._look)

    def set_changed(self, why: str) -> str:
        """Say that the engine serves other weights than at the start, and is of no use any more.

        Args:
            why: in words.

        Returns:
            The fault.
        """
        changed = (
            f"{self._engine.address} is not what it was: {why}; labels of both would be mixed. Start this gateway "
            "again, with another --model-version"
        )
        with self._lock:
            self._changed = changed
            if self.fault != changed:
                _log.error("%s", changed)
            self.fault = changed
        return changed

    def set_doubtful(self, path: str, refusal: EngineRefusal) -> str:
        """Say that the engine refuses what it gave at the start: no request is sent until it gives that again.

        Args:
            path: that was asked.
            refusal: its answer.

        Returns:
            The fault.
        """
        return self._doubt(explain_refusal(self._engine, path, refusal, self._k))

    def set_other_model(self, why: str) -> str:
        """Say that another model has answered: no request is sent until the model of the start answers again.

        Args:
            why: in words.

        Returns:
            The fault.
        """
        return self._doubt(f"{self._engine.address}: {why}")

    def _doubt(self, why: str) -> str:
        with self._lock:
            if why != self._doubts:
                _log.error("%s", why)
            self._doubts = why
            self._doubted += 1
            self.fault = self.fault or why
        return why

    def close(self) -> None:
        """Ask no more. May be called twice."""
        self._loop.close(self._timeout_s + 1.0)

    def _look(self) -> float:
        status, why = asyncio.run(self._ask())
        self._tracker.record_probe(status)
        with self._lock:
            fault = self._changed or self._doubts or ("" if self._tracker.registered else why)
            if fault and not self.fault:
                _log.warning("%s. The gateway goes on: it is out of discovery until the engine is back", fault)
            elif self.fault and not fault:
                _log.warning("%s is back", self._engine.address)
            self.fault = fault
        return self._every_s

    async def _ask(self) -> tuple[ProbeStatus, str]:
        """Return what the engine's health is, and what is wrong."""
        name = str(self._engine.address)
        try:
            connection = EngineConnection(self._engine)
        except SettingsError as exc:
            return ProbeStatus.NOT_READY, str(exc)
        try:
            await connection.get("/health", self._timeout_s)
            found = await read_model(connection, self._facts.model, self._timeout_s)
            if self._doubts or not self._tracker.registered:
                await self._probe(connection)
        except EngineAnswerError as exc:
            return ProbeStatus.NOT_READY, f"{name} does not answer as it did: {exc}"
        except EngineRefusal as refusal:
            return ProbeStatus.NOT_READY, f"{name} is not healthy: {refusal}"
        except RequestError as error:
            return ProbeStatus.NO_ANSWER, error.message
        finally:
            await connection.close()
        wanted = self._facts.root, self._facts.max_model_len
        if found != wanted:
            self.set_changed(f"its model {self._facts.model!r} was {wanted}, and is {found}")
        return ProbeStatus.READY, ""

    async def _probe(self, connection: EngineConnection) -> None:
        facts, doubted = self._facts, self._doubted
        try:
            probe = await probe_endpoint(connection, facts.endpoint, facts.model, self._k, facts)
        except EngineRefusal as refusal:
            if refusal.status not in (429, 503):
                self.set_doubtful(facts.endpoint.path, refusal)
            raise
        change = probe.find_change(facts)
        if change:
            self.set_changed(change)
        with self._lock:
            if self._doubted == doubted:
                self._doubts = ""
