"""For all tests: fixtures of real components, and an environment that says nothing about EDL."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import hypothesis
import pytest

import edl.protocol.transport  # noqa: F401 - before anybody imports grpc: it switches gRPC's fork handlers off

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background has SIGINT ignored, and so would every program that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example's time says how busy the machine is.
hypothesis.settings.register_profile("edl", deadline=None)
hypothesis.settings.load_profile("edl")

pytest_plugins = ["tests.plugins_consul", "tests.plugins_triton"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from outside, and a discovery file of the test's own as the default."""
    for name in os.environ:
        if name.startswith(("EDL_", "PADDLE_DISTILL_", "CONSUL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
