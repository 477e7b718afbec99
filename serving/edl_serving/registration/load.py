"""What a teacher publishes of itself: the rows that it computed, and the seconds that it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edl.load_reporting import LoadPublisher, LoadSource
from edl.settings import LoadSettings

if TYPE_CHECKING:
    from edl.discovery import Instance
    from edl_serving.server import TeacherServer

__all__ = ["TeacherLoad", "public_endpoint"]


class TeacherLoad:
    """Publishes a teacher's load, from before its model is loaded until it has left.

    Args:
        url: of the discovery that the teacher registers in.
        service: that it registers as.
        settings: whether, and how often.

    Attributes:
        state: "starting", "ready", "unhealthy" or "draining".
        version: of the model; empty if unknown.
    """

    def __init__(self, url: str, service: str, settings: LoadSettings) -> None:
        self.state = "starting"
        self.version = ""
        self._instance: Instance | None = None
        self._server: TeacherServer | None = None
        source = LoadSource(service, "teachers", self._read, self._describe)
        self._publisher = LoadPublisher(url, [source], settings) if settings.publish else None

    def set_ready(self, server: TeacherServer, instance: Instance) -> None:
        """Publish what a server computes from now on.

        Args:
            server: the server, which is ready.
            instance: as it is registered.
        """
        self._server = server
        self._instance = instance
        self.set_state("ready")

    def set_state(self, state: str) -> None:
        """Publish another state, at once."""
        self.state = state
        if self._publisher is not None:
            self._publisher.publish_soon()

    def close(self) -> None:
        """Remove the record; see `LoadPublisher.close`."""
        if self._publisher is not None:
            self._publisher.close()

    def _read(self) -> Mapping[str, float | None]:
        server = self._server
        rows, compute_s, _, _ = server.load() if server is not None else (0, 0.0, 1, 0)
        return {"rows": rows, "compute_s": compute_s}

    def _describe(self) -> Mapping[str, Any]:
        server, instance = self._server, self._instance
        fields: dict[str, Any] = {
            "state": self.state,
            "version": self.version,
            "workers": 1,
            "queue_rows": 0,
            "note": "",
        }
        if server is not None and instance is not None:
            _, _, fields["workers"], fields["queue_rows"] = server.load()
            fields |= {"teacher": instance.id, "model": instance.model, "endpoint": public_endpoint(instance)}
        return fields


def public_endpoint(instance: Instance) -> str:
    """Return where others reach a teacher; empty for a Unix socket, whose path says nothing to them."""
    return "" if instance.address.startswith("unix:") else instance.endpoint
