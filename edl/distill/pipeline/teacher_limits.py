"""Waits for the first teacher of each service, and reports the teachers' limits.

A wait ends with a teacher, with `NoTeacherError` at its deadline, or at once if all teachers lack what is asked for
(`Engine.lacking`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from edl.distill.engine.engine import Engine
from edl.distill.teachers import Teachers
from edl.distill.transport.calls import rows_that_fit
from edl.distill.transport.schema import ModelSpec
from edl.protocol.tensors import Array

logger = logging.getLogger("edl.distill")

_SAY_AFTER_S = 5.0
"""How long to wait for a first teacher before logging it, which is when a person begins to wonder."""
_LOOK_S = 0.2
"""How often a wait checks whether it should go on."""


class TeacherLimits:
    """The limits of the teachers, known once the first of them is connected.

    A route is the number of the only service that labels a row; None if all services do. `stopped` returns whether the
    work was ended, which ends all waiting. A wait raises `NoTeacherError` at its deadline, and `SettingsError` as soon
    as all teachers have answered and none has what is asked for.
    """

    def __init__(self, teachers: Sequence[Teachers], engines: Sequence[Engine], timeout_s: float) -> None:
        self._teachers = teachers
        self._engines = engines
        self._timeout_s = timeout_s

    def asked(self, route: int | None) -> range:
        """Return the numbers of the services that label a chunk of a route."""
        return range(len(self._engines)) if route is None else range(route, route + 1)

    def knows_teacher(self, route: int | None) -> bool:
        """Return whether all services that label chunks of a route have had a teacher."""
        return all(self._engines[index].await_spec(0.0) is not None for index in self.asked(route))

    def max_rows(self, stopped: Callable[[], bool], route: int | None = None) -> int:
        """Return the largest number of rows in a request that the teachers of a route accept; 0 for any."""
        known = [index for index in self.asked(route) if self.await_spec(index, stopped) is not None]
        limits = [self._engines[index].limits.max_rows for index in known]
        return min((limit for limit in limits if limit), default=0)

    def max_sequence(self, route: int | None = None) -> int:
        """Return the length of the longest sequence that some teacher of every service accepts; 0 for any."""
        limits = [self._engines[index].limits.max_sequence for index in self.asked(route)]
        return min((limit for limit in limits if limit), default=0)

    def rows_that_fit(self, fields: Mapping[str, Array], route: int | None = None) -> int:
        """Return how many rows of this size fit into a request to any teacher of a route; 0 for any number."""
        fitting = [
            rows_that_fit(fields, spec, max_nbytes)
            for engine in (self._engines[index] for index in self.asked(route))
            if (max_nbytes := engine.limits.max_nbytes) and (spec := engine.await_spec(0)) is not None
        ]
        return min(fitting, default=0)

    def awaits_sequence(self, rows: int, since: float, route: int | None = None) -> bool:
        """Return whether to wait for a teacher that accepts a sequence which is too long for all known ones.

        For a fixed list, that makes sense while some teachers are still connecting. For a service it always does,
        because its teachers come and go.
        """
        services = [(self._teachers[index], self._engines[index]) for index in self.asked(route)]
        short = [
            (group, engine)
            for group, engine in services
            if engine.limits.max_sequence and rows > engine.limits.max_sequence
        ]
        if not short or time.monotonic() - since > self._timeout_s:
            return False
        return all(group.service is not None or engine.awaits_teachers for group, engine in short)

    def await_max_sequence(self, rows: int, stopped: Callable[[], bool], route: int | None = None) -> int:
        """Wait as long as `awaits_sequence` says, and return `max_sequence`."""
        begin = time.monotonic()
        warned = False
        asked = self.asked(route)
        while not stopped() and self.awaits_sequence(rows, begin, route):
            for index in asked:
                self._engines[index].wait_changed(_LOOK_S / len(asked))
            if not warned and time.monotonic() - begin > _SAY_AFTER_S:
                warned = True
                logger.warning(
                    "a sequence has %d tokens, and the known teachers accept at most %d: waiting up to %g s for "
                    "another",
                    rows,
                    self.max_sequence(route),
                    self._timeout_s,
                )
        return self.max_sequence(route)

    def lacks_teacher(self, since: float, route: int | None = None) -> bool:
        """Return whether a service of a route has had no teacher yet."""
        for index in self.asked(route):
            engine = self._engines[index]
            if engine.await_spec(0.0) is None:
                self._check_wait(index, since)
                return True
        return False

    def _check_wait(self, index: int, since: float) -> None:
        """Raise if the wait for a service's first teacher has reached its deadline or has become useless."""
        engine = self._engines[index]
        error = engine.lacking()
        if error is not None:
            raise error
        if time.monotonic() - since > self._timeout_s:
            raise engine.no_teacher()

    def await_any(self, stopped: Callable[[], bool]) -> int | None:
        """Wait for the first teacher of any service; return the service's number, None if there was none in time.

        Args:
            stopped: Function that returns whether the work was ended, which ends the wait.
        """
        begin = time.monotonic()
        while not stopped():
            for index, engine in enumerate(self._engines):
                if engine.await_spec(0.0) is not None:
                    return index
            if time.monotonic() - begin > self._timeout_s or all(engine.lacking() for engine in self._engines):
                break
            self._engines[0].await_spec(_LOOK_S)
        return None

    def await_spec(self, index: int, stopped: Callable[[], bool]) -> ModelSpec | None:
        """Wait for the first teacher of a service; return None if the work was ended before."""
        engine = self._engines[index]
        begin = time.monotonic()
        warned = False
        while not stopped():
            spec = engine.await_spec(_LOOK_S)
            if spec is not None:
                return spec
            self._check_wait(index, begin)
            if not warned and time.monotonic() - begin > _SAY_AFTER_S:
                warned = True
                found = engine.describe_teachers()
                logger.warning("no teacher of %s yet (%s): waiting up to %g s", engine.name, found, self._timeout_s)
        return None
