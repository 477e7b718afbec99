"""Teachers for the tests of readers: servers in this process, and processes of their own to kill, pause and drain."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

from edl.discovery import Instance, Registry
from edl.discovery.registry import Registration
from edl.testing import LocalTeacher, models
from edl_serving import Backend
from edl_serving.backends.callable import CallableBackend
from edl_serving.model import ServedModel
from tests.fast.serving.conftest import Inside

Start = Callable[..., LocalTeacher]


@pytest.fixture
def start(stack: ExitStack) -> Start:
    """Starts teachers as processes, and ends them with the test. Takes a second or two each; see `serve`."""
    return lambda model, **options: stack.enter_context(LocalTeacher(model, **options))


OVER_CHANNEL = os.environ.get("EDL_TEST_WIRE") != "grpc"
"""Readers are tested over gRPC alone by `EDL_TEST_WIRE=grpc`."""


class Served(Inside):
    """A teacher in this process, which takes milliseconds to start.

    Args:
        model: the name of a model in `edl.testing.models`, made with `options`; or a model, or a backend.
        server: settings of `ServerSettings`.
        options: of the named model.
    """

    def __init__(self, model: Any = "echo", server: dict[str, Any] | None = None, **options: Any) -> None:
        made = getattr(models, model)(**options) if isinstance(model, str) else model
        settings = {"tensor_channel": OVER_CHANNEL, **(server or {})}
        super().__init__(made if isinstance(made, Backend) else CallableBackend(made), **settings)
        self._is_open = True

    @property
    def endpoint(self) -> str:
        """`host:port`, as students take it."""
        return self.target

    def close(self) -> None:
        """End it. May be called twice."""
        if self._is_open:
            self._is_open = False
            super().close()


Serve = Callable[..., Served]
Register = Callable[..., Registration]


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    """Starts teachers in this process, and ends them with the test; see `Served`."""
    return lambda *arguments, **options: stack.enter_context(closing(Served(*arguments, **options)))


def announce_less(monkeypatch: pytest.MonkeyPatch, *extensions: str) -> None:
    """Have teachers in this process not announce these extensions, as other servers and older ones."""
    whole = ServedModel.extensions
    monkeypatch.setattr(ServedModel, "extensions", lambda model: [e for e in whole(model) if e not in extensions])


def instance_of(endpoint: str, service: str, teacher_id: str = "") -> Instance:
    """What a ready teacher registers."""
    host, _, port = endpoint.rpartition(":")
    return Instance(service=service, id=teacher_id or endpoint, address=host, port=int(port), state="ready")


@pytest.fixture
def register(registry: Registry) -> Register:
    """Registers endpoints for as long as the test runs; call with the endpoint and the service."""
    return lambda endpoint, service, teacher_id="": registry.register(
        instance_of(endpoint, service, teacher_id), ttl_s=600
    )
