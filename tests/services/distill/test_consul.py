"""A student and teachers that find each other through a real Consul agent, which is killed and comes back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from edl.distill import DistillReader, Options
from tests.fast.distill.conftest import Start
from tests.fast.distill.reading import check, samples
from tests.plugins_consul import ConsulAgent
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until


def test_outage_is_reported_and_not_felt(start: Start, consul_agent: ConsulAgent) -> None:

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

        wait_until(step(lambda stats: stats.teachers_live == 1))
        consul_agent.kill()
        wait_until(step(lambda stats: stats.discovery))
        assert reader.stats().teachers_live == 1, "the teacher last known is kept"
        consul_agent.restart()
        wait_until(step(lambda stats: not stats.discovery))
        start("echo", service="s", discovery=consul_agent.url, delay_s=0.002)
        wait_until(step(lambda stats: stats.teachers_live == 2))
    assert [number for _, number, _ in delivered] == list(range(len(delivered)))
    assert all(label[0] == number for _, number, label in delivered)


def test_one_cut_off_from_consul_is_kept(start: Start, consul_agent: ConsulAgent) -> None:
    proxy = TcpProxy("127.0.0.1", int(consul_agent.url.rpartition(":")[2]))
    teacher = start("echo", service="cut", discovery=f"consul://127.0.0.1:{proxy.port}")

    def reader_of(count: int) -> DistillReader:
        made = DistillReader(["x", None], ["y"], teacher_batch_size=4)
        return made.set_dynamic_teacher(consul_agent.url, "cut").set_sample_generator(samples(count))

    with reader_of(40) as reader:
        check(list(reader()), 40)
        proxy.refuse()
        wait_until(lambda: "lapsed" in reader.stats().discovery)
        check(list(reader()), 40)
        wait_until(lambda: "cannot be kept registered" in teacher.log)
        with reader_of(8) as newcomer:
            check(list(newcomer()), 8)
        proxy.restore()
        wait_until(lambda: not reader.stats().discovery)
        assert reader.stats().rows_resent == 0
        teacher.terminate()
        wait_until(lambda: reader.stats().teachers_live == 0)
        assert reader.stats().discovery == "", "it deregistered"
    proxy.close()
