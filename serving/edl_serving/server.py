"""The server's life: start, warm up, serve, drain, stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edl_serving.backend import Backend
from edl_serving.settings import ServerSettings

__all__ = ["TeacherServer", "serve"]


class TeacherServer:
    """Serves one model over KServe v2 gRPC, on the running event loop.

    Args:
        settings: see there.
        backends: one or more instances of the model, alike in names, types and shapes; each gets a thread of its own.
            The server closes them in `stop`.
    """

    def __init__(self, settings: ServerSettings, backends: Backend | Sequence[Backend]) -> None:
        raise NotImplementedError

    @property
    def port(self) -> int:
        """The TCP port that is listened on, 0 before `start`."""
        raise NotImplementedError

    @property
    def metrics_port(self) -> int | None:
        """The port of `/metrics`, None where it is off."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Warmed up and not draining: what `ServerReady`, `ModelReady` and the health service say."""
        raise NotImplementedError

    async def start(self) -> int:
        """Listen (not ready yet), warm the model up, become ready.

        Returns:
            The TCP port.

        Raises:
            SettingsError: the address cannot be listened on.
            Exception: whatever `Backend.warm_up` raised; the server is stopped by then.
        """
        raise NotImplementedError

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Stop being ready, refuse new requests with UNAVAILABLE, finish the ones that were accepted.

        Args:
            timeout_s: None for `settings.drain_timeout_s`.

        Returns:
            Whether all were finished in time.
        """
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop at once (requests in flight are cancelled) and close the backends. May be called twice."""
        raise NotImplementedError


def serve(
    settings: ServerSettings,
    backends: Backend | Sequence[Backend],
    *,
    join: Callable[[TeacherServer], None] | None = None,
    leave: Callable[[], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Call it from the main thread.

    The first signal: no longer ready, `leave`, finish what is in flight within `settings.drain_timeout_s`.
    The second one ends the process at once, with exit code 128 + its number.

    Args:
        join: called in a worker thread once the server is ready, to enter discovery. What it raises ends the server
            and is raised again here.
        leave: called in a worker thread when draining begins, to leave discovery. What it raises is logged.

    Returns:
        The process's exit code: 0 if everything in flight was answered, 1 if the deadline passed first.
    """
    raise NotImplementedError
