"""For all tests: fixtures of real components, and an environment that says nothing about EDL."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest

import edl.protocol.transport  # noqa: F401 - before anybody imports grpc: it switches gRPC's fork handlers off
from edl.discovery import Registry, Store, open_registry, open_store

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background has SIGINT ignored, and so would every program that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        # `nohup` has them ignored, and so has a shell for what runs in its background: torchrun tells its workers
        # otherwise, `edl run` does not.
        signal.signal(_number, signal.SIG_DFL)

# torch asks DNS for the name of each peer that connects. A question that is lost is asked again after a second, not
# after five, within which tests of recovery would take a worker for lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# The same examples in each run: a test is red because of a change, never by luck. To look for new faults, run
# `pytest --hypothesis-profile=explore`. How long an example takes says how busy the machine is.
_busy = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("edl", max_examples=50, derandomize=True, **_busy)
hypothesis.settings.register_profile("explore", max_examples=1000, **_busy)
hypothesis.settings.load_profile("edl")

pytest_plugins = [
    "tests.plugins_chromium",
    "tests.plugins_consul",
    "tests.plugins_etcd",
    "tests.plugins_kubernetes",
    "tests.plugins_prometheus",
    "tests.plugins_reporting",
    "tests.plugins_slurm",
    "tests.plugins_triton",
    "tests.plugins_vllm",
]


@pytest.fixture(autouse=True)
def clean_logging() -> Iterator[None]:
    """A command that a test calls in this process leaves no handler on a stream that closes with the test."""
    loggers = [logging.getLogger(name) for name in ("", "edl", "edl_serving")]
    before = [(list(logger.handlers), logger.level) for logger in loggers]
    yield
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        for handler in set(logger.handlers).difference(handlers):
            logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from outside, and a discovery file of the test's own as the default."""
    for name in os.environ:
        if name.startswith(("EDL_", "PADDLE_DISTILL_", "CONSUL_", "ETCDCTL_", "KUBE", "SLURM_", "SLURMD_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes with the test what it is given."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a store of the test's own."""
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as store:
        yield store


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with open_registry(url) as registry:
        yield registry
