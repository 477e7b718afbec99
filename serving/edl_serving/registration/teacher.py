"""A teacher as others see it: in discovery, and in the file that says that it is ready."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edl.discovery import Instance
from edl.protocol import names
from edl_serving.command_line.serve_config import ServeConfig
from edl_serving.registration.address import warn_of_loopback
from edl_serving.registration.announcer import Announcer
from edl_serving.registration.ready_file import ReadyFile

if TYPE_CHECKING:
    from edl_serving.server import TeacherServer

__all__ = ["Presence"]

_log = logging.getLogger(__name__)
_TELL_S = 2.0  # at most, to tell a registry that may be away of our leaving: the lease tells others as well
_JOIN_S = 10.0  # what is wrong with a registration shows within this; a registry that is away does not end the server


class Presence:
    """This teacher in discovery, and the file that says that it is ready. `join` and `leave` are for `serve`."""

    def __init__(self, config: ServeConfig, ready_file: ReadyFile) -> None:
        self._config = config
        self._ready_file = ready_file
        self._instance: Instance | None = None
        self._metrics_port: int | None = None
        self._announcer: Announcer | None = None
        self._moving = threading.Lock()  # between the event loop, which tells of a canary, and `join` and `leave`
        self._healthy = True
        self._left = False
        self.version = ""
        announcement = config.announcement
        if announcement.url is not None:
            self._announcer = Announcer(announcement.url, announcement.ttl_s, self._on_shown)

    def join(self, server: TeacherServer) -> None:
        """Enter discovery; a registry that is away is tried again in the background."""
        told = self._config.announcement
        self._metrics_port = server.metrics_port
        self._instance = told.instance(self._config.address, server.port, self._config.server.model, self._meta())
        server.watch_ready(self._ready_changed)
        if self._announcer is None:
            self._say_ready(self._instance)
            return
        announcer = self._announcer
        server.metrics.watch(
            "edl_teacher_registered",
            "Whether discovery has this teacher, and its lease is kept.",
            lambda: float(announcer.shown is not None and not announcer.error),
        )
        warn_of_loopback(told.url, self._config.address, "--host 0.0.0.0")
        with self._moving:
            if self._healthy:
                self._announcer.want(self._instance)
        self._announcer.settle(_JOIN_S)

    def _ready_changed(self, healthy: bool) -> None:
        """Be in discovery only while the model answers. Returns at once."""
        with self._moving:
            self._healthy = healthy
            if self._left or self._instance is None:
                return
            if not healthy:
                self._ready_file.remove()
            if self._announcer is not None:
                self._announcer.want(self._instance if healthy else None)
            elif healthy:
                self._say_ready(self._instance)

    def leave(self) -> None:
        """Show as draining, and give students a moment to hear of it."""
        with self._moving:
            self._left = True
        self._ready_file.remove()
        if self._announcer is None or self._instance is None or not self._healthy:
            return
        quarter_s = self._config.server.drain_timeout_s / 4  # the rest is for requests in flight
        self._instance = replace(self._instance, state="draining")
        self._announcer.want(self._instance)
        if self._announcer.settle(min(_TELL_S, quarter_s)):
            time.sleep(min(self._config.linger_s, quarter_s))

    def __enter__(self) -> Presence:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._announcer is not None:
            self._announcer.close(_TELL_S)

    def _meta(self) -> dict[str, str]:
        meta = {"pid": str(os.getpid())}
        if self.version:
            meta["version"] = self.version
        # Equal on student and teacher if they share a kernel, and so perhaps memory.
        with contextlib.suppress(OSError):
            meta["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if self._config.server.uds is not None:
            meta["uds"] = str(Path(self._config.server.uds).absolute())
        if self._config.server.credentials.cert:
            meta[names.TLS_META] = "1"
        return meta

    def _on_shown(self, instance: Instance | None) -> None:
        if instance is not None and instance.state == "ready":
            _log.info("registered as %s/%s at %s", instance.service, instance.id, self._config.announcement.url)
            self._say_ready(instance)

    def _say_ready(self, instance: Instance) -> None:
        self._ready_file.write(
            {
                "endpoint": instance.endpoint,
                "port": instance.port,
                "metrics_port": self._metrics_port,
                "pid": os.getpid(),
            }
        )
