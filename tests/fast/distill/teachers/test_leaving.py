"""Teachers that leave while requests are under way, and come back: each sample once, in order, whatever the call."""

from __future__ import annotations

import itertools

import pytest

from edl.discovery import Instance, open_registry
from edl.distill import DistillReader, Options
from edl.protocol import names
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.reading import check, samples


@pytest.mark.parametrize("streamed", [True, False])
def test_flickering_registration_is_harmless(
    start: Start, registry_url: str, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """Back before it is gone, a teacher gets a new connection; closing the old one cancels what is under way on it."""
    if not streamed:
        monkeypatch.setattr(names, "EXTENSION_STREAM", "not announced")  # as by another server: a call for each request
    teacher = start("echo", delay_s=0.01)
    address, _, port = teacher.endpoint.rpartition(":")
    instance = Instance(service="s", id="flickering", address=address, port=int(port), state="ready")
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=4, options=Options(teacher_timeout_s=60))
    reader.set_dynamic_teacher(registry_url, "s").set_sample_generator(samples(1600))
    with open_registry(registry_url) as registry, reader:
        registration = registry.register(instance, ttl_s=10)
        rows = reader()
        delivered = []
        for _ in range(8):
            delivered += itertools.islice(rows, 40)
            registration.close()
            until(lambda: reader.stats().teachers["flickering"].state in ("draining", "gone"), 20)
            registration = registry.register(instance, ttl_s=10)
        delivered += rows
        stats = reader.stats()
        registration.close()
    check(delivered, 1600)
    assert stats.rows_received == 1600
    assert stats.rows_hedged == 0, "there is nobody else to ask"


@pytest.mark.parametrize("streamed", [True, False])
def test_closed_connections_requests_move(
    start: Start, registry_url: str, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """An instance that moves to another address is disconnected at once, requests under way or not."""
    if not streamed:
        monkeypatch.setattr(names, "EXTENSION_STREAM", "not announced")
    here, there = start("echo", delay_s=0.2), start("echo", delay_s=0.002)
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=4, options=Options(teacher_timeout_s=60))
    reader.set_dynamic_teacher(registry_url, "s").set_sample_generator(samples(400))
    address, _, port = here.endpoint.rpartition(":")
    moving = Instance(service="s", id="moving", address=address, port=int(port), state="ready")
    with open_registry(registry_url) as registry, registry.register(moving, ttl_s=10) as registration, reader:
        rows = reader()
        delivered = [next(rows)]
        until(lambda: reader.stats().teachers["moving"].in_flight > 0, 20)
        address, _, port = there.endpoint.rpartition(":")
        registration.update(Instance(service="s", id="moving", address=address, port=int(port), state="ready"))
        delivered += rows
        stats = reader.stats()
    check(delivered, 400)
    assert stats.rows_resent > 0
    assert stats.rows_received == 400
