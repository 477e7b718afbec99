"""For all tests: fixtures of real components, and an environment that says nothing about EDL."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import edl.protocol.transport  # noqa: F401 - before anybody imports grpc: it switches gRPC's fork handlers off

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

# An example's time says how busy the machine is, and so does the time that it takes to think of one.
hypothesis.settings.register_profile("edl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("edl")

pytest_plugins = [
    "tests.plugins_chromium",
    "tests.plugins_consul",
    "tests.plugins_etcd",
    "tests.plugins_kubernetes",
    "tests.plugins_prometheus",
    "tests.plugins_slurm",
    "tests.plugins_triton",
    "tests.plugins_vllm",
]

JOBS = "jobs/collective/"
SERIAL = (
    # Agents that get no turn for a second lose their place in the job, as they should.
    f"{JOBS}checkpoint/test_run_sharded.py",
    f"{JOBS}checkpoint/test_run_storage.py",
    f"{JOBS}health",
    f"{JOBS}inprocess",
    f"{JOBS}recovery",
    f"{JOBS}run",
    f"{JOBS}shutdown",
    f"{JOBS}status/test_live.py",
    f"{JOBS}torchrun",
    f"{JOBS}trainers",
    "jobs/test_demo.py",  # teachers and a student that share the cores already
    "jobs/test_example_elastic.py",
    "jobs/test_example_paddle.py",
    "jobs/test_soak.py",
    "fast/distill/teachers/test_limits.py",
    "services/distill/test_borrowed_triton.py",
    "jobs/load_reporting/test_closed_loop.py",  # four teachers, and a student whose time is measured
)
"""Folders and files of tests that run two at a time, beside no others (`python -m tests`)."""

ALONE = (
    f"{JOBS}health/test_nodecheck.py",  # how long a node's work takes
    "fast/distill/teachers/test_limits.py",  # one student's time beside another's
    "services/distill/test_borrowed_triton.py",  # how long a server's own clients wait
    "jobs/test_demo.py",
)
"""Those of them that measure time, and run one by one."""

LONG = (
    "jobs/test_readme.py",
    "fast/distill/reader/test_interrupted.py",
    "jobs/test_examples.py",
    "services/distill/test_lost_memory.py",
    "services/distill/test_triton_versions.py",
    "fast/distill/tls/test_tls_rotation.py",
    "fast/serving/test_fuzz.py",
    "fast/collective/checkpoint",
    "fast/test_notifier.py",
    f"{JOBS}inprocess",
    f"{JOBS}recovery",
    f"{JOBS}checkpoint/test_run_sharded.py",
    f"{JOBS}shutdown/test_ends.py",
    "services/collective/test_slurm.py",
    f"{JOBS}trainers",
    "kubernetes/scenarios/test_growth.py",  # has all GPUs, which others wait for later
)
"""Files that take long, and so begin first: a process that has nothing left waits for the last one."""


def _lies_in(item: pytest.Item, names: tuple[str, ...]) -> bool:
    place = item.path.relative_to(Path(__file__).parent).as_posix()
    return any(place == name or place.startswith(f"{name}/") for name in names)


@pytest.hookimpl(tryfirst=True)  # before pytest takes those that `-m` names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _lies_in(item, SERIAL):
            item.add_marker(pytest.mark.serial)
        if _lies_in(item, ALONE):
            item.add_marker(pytest.mark.alone)
    items.sort(key=lambda item: not _lies_in(item, LONG))  # stable: a file's tests stay together, in their order


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
