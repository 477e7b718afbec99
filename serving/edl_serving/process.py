"""A teacher server as a whole process: started, registered, drained on a signal, and ended with a parent process."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from typing import Any

from edl.background import start_call
from edl_serving.admission import warn_of_no_credentials
from edl_serving.backends.backend import Backend
from edl_serving.server import TeacherServer
from edl_serving.settings import ServerSettings

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0  # for backends to release a GPU's memory after a drain
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    settings: ServerSettings,
    backends: Backend | Sequence[Backend],
    *,
    join: Callable[[TeacherServer], None] | None = None,
    leave: Callable[[], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Call it from the main thread.

    At the first signal: the server is not ready any more; `leave`, while requests are still served; then new requests
    are refused, and accepted requests are finished. All of it takes at most `settings.drain_timeout_s`. The second
    signal ends the process at once, as that signal does by default (to a shell: exit code 128 + its number).

    Args:
        settings: of the server.
        backends: see `TeacherServer`.
        join: called in a thread once the server is ready, to enter discovery. What it raises ends the server, and is
            raised again here.
        leave: called in a thread when draining begins, to leave discovery. What it raises is logged.

    Returns:
        The process's exit code: 0 if everything accepted was answered, 1 if the deadline passed first.

    Raises:
        SettingsError: the settings, or the backends, cannot be served.
        Exception: what `Backend.warm_up` or `join` raised.
    """
    return asyncio.run(_serve(settings, backends, join, leave))


async def _serve(
    settings: ServerSettings,
    backends: Backend | Sequence[Backend],
    join: Callable[[TeacherServer], None] | None,
    leave: Callable[[], None] | None,
) -> int:
    server = TeacherServer(settings, backends)
    signalled = _on_first_signal()
    close_within_s = 0.0
    joined = asyncio.Event()
    if join is not None:
        probes = server.metrics.probes
        probes.add_check("/readyz", "discovery", lambda: "" if joined.is_set() else "not registered yet")
    try:
        starting = asyncio.ensure_future(server.start())
        if not await _done_before(signalled, starting):
            starting.cancel()
            await asyncio.wait({starting})
            return 0
        _log.info("model %r is served on %s:%d", settings.model, settings.host, server.port)
        warn_of_no_credentials(settings.host, settings.credentials)
        if join is not None:
            joining = _in_thread(lambda: join(server))
            if not await _done_before(signalled, joining):  # else `leave` could overtake it
                await asyncio.wait({joining}, timeout=settings.drain_timeout_s / 2)
                joining.cancel()  # a call that ends when the loop is closed has nothing to wake there
            joined.set()
        await signalled.wait()
        drained = await _drain(server, leave)
        if drained:
            close_within_s = _CLOSE_S
        return 0 if drained else 1
    finally:
        await server.stop(close_within_s)
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)


def _on_first_signal() -> asyncio.Event:
    """Return an event that the first signal sets; the next signal kills, as by default."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        for ended_by in _SIGNALS:
            loop.remove_signal_handler(ended_by)
            signal.signal(ended_by, signal.SIG_DFL)
        _log.info("%s: draining; a second signal ends at once", number.name)
        signalled.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, handle, number)
    return signalled


async def _done_before(signalled: asyncio.Event, work: asyncio.Future[Any]) -> bool:
    """Wait for `work`; return False if the signal comes first. Raise what `work` raises."""
    signal_wait = asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait({signal_wait, work}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        signal_wait.cancel()
    if work.done():
        work.result()
    return work.done()


def _in_thread(call: Callable[[], None]) -> asyncio.Future[None]:
    """Run `call` in a thread that does not keep the process from ending if it hangs."""
    return asyncio.wrap_future(start_call("edl-discovery", call))


async def _drain(server: TeacherServer, leave: Callable[[], None] | None) -> bool:
    """Drain the server; return whether everything accepted was answered within the settings' deadline."""
    loop = asyncio.get_running_loop()
    timeout_s = server.settings.drain_timeout_s
    deadline = loop.time() + timeout_s
    await server.leave()
    if leave is not None:
        try:
            await asyncio.wait_for(_in_thread(leave), timeout_s / 2)
        except asyncio.TimeoutError:
            _log.error("leaving discovery takes longer than %.1f s; going on without", timeout_s / 2)
        except Exception as exc:  # noqa: BLE001 - whatever discovery says, students' requests are finished first
            _log.error("leaving discovery raised %s: %s", type(exc).__name__, exc, exc_info=exc)
    drained = await server.drain(max(0.0, deadline - loop.time()))
    if drained:
        _log.info("drained")
    else:
        _log.error("requests were left unanswered after %.1f s", timeout_s)
    return drained
