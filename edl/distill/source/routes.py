"""Tells by a field of a sample, or of a batch's rows, which service labels it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edl.errors import SourceError
from edl.quoting import listed

__all__ = ["Router"]


@dataclass(frozen=True)
class Router:
    """Which service labels what.

    Attributes:
        find: finds the value in a sample, or the values of all rows in a batch.
        routes: by value, the service's number. `None` is that of all other values.
    """

    find: Callable[[Any], Any]
    routes: Mapping[Any, int]

    def of_sample(self, sample: Any, what: str) -> int:
        """Return the number of the service that labels a sample.

        Args:
            sample: as the source yielded it.
            what: its place in the source, for messages.

        Raises:
            SourceError: it has no such field, or a value that no service is named for.
        """
        return self._route(_plain(self._found(sample, what)), what)

    def of_batch(self, batch: Any, rows: int, what: str) -> list[int]:
        """Return by row the number of the service that labels it.

        Args:
            batch: with a value for each row, or a single one for all of them.
            rows: of the batch.
            what: its place in the source, for messages.

        Raises:
            SourceError: it has no such field, another number of values, or one that no service is named for.
        """
        found = _plain(self._found(batch, what))
        if not isinstance(found, list | tuple):
            if not self._is_value(found):
                raise SourceError(
                    f"{what} has {found!r} for route: expected a list, an array or a tensor of values, or a single one"
                )
            return [self._route(found, what)] * rows
        if len(found) != rows:
            raise SourceError(f"{what} has {len(found)} values of route for {rows} rows")
        return [self._route(_plain(value), f"{what}, row {row}") for row, value in enumerate(found)]

    def _found(self, value: Any, what: str) -> Any:
        try:
            return self.find(value)
        except StopIteration as exc:
            raise SourceError(f"what finds the route of {what} raised StopIteration") from exc
        except (LookupError, TypeError, AttributeError) as exc:
            raise SourceError(f"{what} has no field for route: {exc}") from exc

    def _route(self, value: Any, what: str) -> int:
        found = None
        if self._is_value(value):
            others = self.routes.get(None)
            if isinstance(value, bytes):
                others = self.routes.get(value.decode(errors="replace"), others)
            with contextlib.suppress(TypeError):  # a tuple with a list, say, which is the key of nothing
                found = self.routes.get(value, others)
        if found is None:
            known = listed([repr(known) for known in self.routes])
            raise SourceError(
                f"{what} has route {value!r}, and teachers are named for {known}: name those for it as well, or under "
                "None those for all other values"
            )
        return found

    def _is_value(self, value: Any) -> bool:
        """Return whether this is a value of a field; anything else was not understood, and is not among all others."""
        if isinstance(value, float):
            return not math.isnan(value)
        return value is None or isinstance(value, str | bytes | int) or type(value) in map(type, self.routes)


def _plain(value: Any) -> Any:
    """Return numbers and strings of arrays and tensors as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value
