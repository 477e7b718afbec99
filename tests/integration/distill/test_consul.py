"""A student and teachers that find each other through a real Consul agent, which is killed and comes back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from tests.integration.distill.conftest import Start, until
from tests.plugins_consul import ConsulAgent


@pytest.mark.consul
def test_an_outage_of_consul_is_said_and_not_felt(start: Start, consul_agent: ConsulAgent) -> None:
    def source() -> Iterator[Any]:
        for number in itertools.count():
            yield np.full(4, number, np.float32), number

    start("echo", service="s", discovery=consul_agent.url, delay_s=0.002)
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=4, options=Options(teacher_timeout_s=60))
    reader.set_dynamic_teacher(consul_agent.url, "s").set_sample_generator(source)
    delivered: list[Any] = []
    with reader:
        rows = reader()

        def step(condition: Any) -> Any:
            def pull() -> bool:
                delivered.extend(itertools.islice(rows, 20))
                return bool(condition(reader.stats()))

            return pull

        until(step(lambda stats: stats.teachers_live == 1), 10)
        consul_agent.kill()
        until(step(lambda stats: stats.discovery), 30)
        assert reader.stats().teachers_live == 1, "the teacher last known is kept"
        consul_agent.restart()
        until(step(lambda stats: not stats.discovery), 30)
        start("echo", service="s", discovery=consul_agent.url, delay_s=0.002)
        until(step(lambda stats: stats.teachers_live == 2), 30)
    assert [number for _, number, _ in delivered] == list(range(len(delivered)))
    assert all(label[0] == number for _, number, label in delivered)
