"""The health of an engine, looked at over and over beside the requests."""

from __future__ import annotations

import asyncio
import logging

from edl.background import BackgroundLoop
from edl.errors import SettingsError
from edl_serving.gateway.engine import EngineAccess, EngineConnection, EngineRefusal
from edl_serving.gateway.inspection import EngineFacts, read_model
from edl_serving.registration.probe import ProbeStatus, ReadinessTracker
from edl_serving.request_error import RequestError

__all__ = ["EngineHealth"]

_log = logging.getLogger(__name__)


class EngineHealth:
    """Asks an engine for its health, and whether its model is still the one that it was at the start.

    Args:
        engine: how to reach it.
        facts: found at the start.
        every_s: seconds between two questions.
        timeout_s: for an answer.
        failures: questions without an answer after which the engine is away; a refusal counts at once.

    Attributes:
        fault: why the engine cannot be asked; empty if it can.
    """

    def __init__(
        self, engine: EngineAccess, facts: EngineFacts, every_s: float, timeout_s: float, failures: int
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._tracker = ReadinessTracker(failures)
        self._tracker.record_probe(ProbeStatus.READY)
        self._changed = ""
        self.fault = ""
        self._loop = BackgroundLoop("edl-engine-health", self._look)

    def set_changed(self, why: str) -> str:
        """Say that the engine serves other weights than at the start, and is of no use any more.

        Args:
            why: in words.

        Returns:
            The fault.
        """
        self._changed = (
            f"{self._engine.address} is not what it was: {why}; labels of both would be mixed. Start this gateway "
            "again, with another --model-version"
        )
        self.fault = self._changed
        return self._changed

    def close(self) -> None:
        """Ask no more. May be called twice."""
        self._loop.close(self._timeout_s + 1.0)

    def _look(self) -> float:
        status, why = asyncio.run(self._ask())
        self._tracker.record_probe(status)
        fault = self._changed or ("" if self._tracker.registered else why)
        if bool(fault) != bool(self.fault):
            _log.log(logging.ERROR if fault else logging.WARNING, "%s", fault or f"{self._engine.address} is back")
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
        except EngineRefusal as refusal:
            return ProbeStatus.NOT_READY, f"{name} is not healthy: {refusal}"
        except RequestError as error:
            return ProbeStatus.NO_ANSWER, error.message
        finally:
            await connection.close()
        wanted = self._facts.root, self._facts.max_sequence + 2
        if found != wanted:
            self.set_changed(f"its model {self._facts.model!r} was {wanted}, and is {found}")
        return ProbeStatus.READY, ""
