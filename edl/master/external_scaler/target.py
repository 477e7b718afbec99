"""What the metadata of a KEDA trigger ask for. Decisions only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from edl.errors import SettingsError
from edl.load_reporting.wanted import WantedKind
from edl.quoting import quote

__all__ = ["ScalerTarget"]

_LONGEST_NAME: Final = 128  # of a service, as registries take it; a job's is no longer in any store's key
_KEYS: Final[Mapping[str, WantedKind]] = {"service": "teachers", "job": "workers"}


@dataclass(frozen=True)
class ScalerTarget:
    """Whose number is asked for.

    Attributes:
        kind: "teachers" of a service, or "workers" of a job.
        name: of the service or job.
        max_age_s: an older number counts as unknown, 0 for any.
    """

    kind: WantedKind
    name: str
    max_age_s: float = 0.0

    @property
    def metric_name(self) -> str:
        """The name of the metric, to which KEDA adds the trigger's number."""
        return f"edl-wanted-{self.kind}"

    @classmethod
    def parse(cls, metadata: Mapping[str, str]) -> ScalerTarget:
        """Read a trigger's metadata, in which KEDA's own keys, such as `scalerAddress`, are as well.

        Args:
            metadata: `service` or `job`, and perhaps `maxAgeSeconds`.

        Raises:
            SettingsError: they name neither or both, or what they name cannot be.
        """
        named = [(key, metadata[key]) for key in _KEYS if metadata.get(key)]
        if len(named) != 1:
            raise SettingsError(
                "the trigger's metadata must have either `service` (its teachers) or `job` (its workers)"
            )
        ((key, name),) = named
        if len(name) > _LONGEST_NAME or not name.isprintable() or "/" in name:
            raise SettingsError(f"metadata `{key}`: {quote(name)} is no name of a {key}")
        text = metadata.get("maxAgeSeconds", "") or "0"
        try:
            max_age_s = float(text)
        except ValueError:
            max_age_s = -1.0
        if not 0 <= max_age_s < float("inf"):
            raise SettingsError(f"metadata `maxAgeSeconds`: {quote(text)} is no number of seconds")
        return cls(_KEYS[key], name, max_age_s)
