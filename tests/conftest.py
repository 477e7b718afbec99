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

pytest_plugins = ["tests.plugins_consul", "tests.plugins_etcd", "tests.plugins_slurm", "tests.plugins_triton"]

SERIAL = (
    "integration/collective",  # agents that get no turn for a second lose their place in the job, as they should
    "integration/test_demo.py",  # teachers and a student that share the cores already
    "integration/test_example_elastic.py",
    "integration/test_example_paddle.py",
    "integration/test_soak.py",
    "integration/distill/test_limits.py",  # one student's time beside another's
)
"""Folders and files of tests that do not run beside others (`python -m tests`)."""


@pytest.hookimpl(tryfirst=True)  # before pytest takes those that `-m` names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(folder).as_posix()
        if any(place == name or place.startswith(f"{name}/") for name in SERIAL):
            item.add_marker(pytest.mark.serial)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from outside, and a discovery file of the test's own as the default."""
    for name in os.environ:
        if name.startswith(("EDL_", "PADDLE_DISTILL_", "CONSUL_", "ETCDCTL_", "SLURM_", "SLURMD_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
