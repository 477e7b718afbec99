"""Teacher servers as processes: started, waited for, stopped or killed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import grpc

from benchmarks import _models
from benchmarks._child import ROOT

__all__ = ["Teacher"]

_START_S = 60.0


class Teacher:
    """A teacher server in a process of its own.

    Args:
        model: a factory of `benchmarks/_models.py`.
        max_batch: rows.
        discovery, service: where to register, and as what; empty for not at all.
        options: of the factory.

    Raises:
        RuntimeError: it was not ready in time; with what it printed.
    """

    def __init__(
        self, model: str, *, max_batch: int = 32, discovery: str = "", service: str = "", **options: Any
    ) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.endpoint = f"127.0.0.1:{port}"
        settings = {"model": model, "port": port, "max_batch": max_batch, "options": options}
        settings |= {"discovery": discovery, "service": service}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        command = [sys.executable, "-m", "benchmarks._teachers", json.dumps(settings)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()

    def _wait_ready(self) -> None:
        from edl.protocol import kserve, names

        deadline = time.monotonic() + _START_S
        while True:
            with grpc.insecure_channel(self.endpoint) as channel:
                ready = channel.unary_unary(
                    names.method("ServerReady"),
                    request_serializer=kserve.ServerReadyRequest.SerializeToString,
                    response_deserializer=kserve.ServerReadyResponse.FromString,
                )
                try:
                    if ready(kserve.ServerReadyRequest(), timeout=1.0).ready:
                        return
                except grpc.RpcError:
                    pass  # not up yet: asked again until the deadline
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise RuntimeError(f"a teacher did not start:\n{self._log.read()[-3000:]}")
            time.sleep(0.05)


def main() -> None:
    """The process: serve until SIGTERM."""
    from edl.discovery import Instance, open_registry
    from edl_serving import ServerSettings, TeacherServer, serve
    from edl_serving.backends.callable import CallableBackend

    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=json.loads)
    given = parser.parse_args().settings
    factory = getattr(_models, given["model"])
    settings = ServerSettings(given["model"], port=given["port"], max_batch_rows=given["max_batch"])
    with ExitStack() as stack:

        def join(server: TeacherServer) -> None:
            if given["service"]:
                registry = stack.enter_context(open_registry(given["discovery"]))
                instance = Instance(given["service"], f"{os.getpid()}", "127.0.0.1", server.port)
                stack.enter_context(registry.register(instance, ttl_s=2.0))

        sys.exit(serve(settings, CallableBackend(factory(**given["options"])), join=join, leave=stack.close))


if __name__ == "__main__":
    main()
