"""A student and teachers that find each other through a real Consul agent, which is killed and comes back."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.reading import check, samples
from tests.plugins_consul import ConsulAgent


@pytest.mark.consul
def test_outage_is_reported_and_not_felt(start: Start, consul_agent: ConsulAgent) -> None:
    """An outage of consul is said and not felt."""

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

        until(step(lambda stats: stats.teachers_live == 1), 60)
        consul_agent.kill()
        until(step(lambda stats: stats.discovery), 30)
        assert reader.stats().teachers_live == 1, "the teacher last known is kept"
        consul_agent.restart()
        until(step(lambda stats: not stats.discovery), 30)
        start("echo", service="s", discovery=consul_agent.url, delay_s=0.002)
        until(step(lambda stats: stats.teachers_live == 2), 30)
    assert [number for _, number, _ in delivered] == list(range(len(delivered)))
    assert all(label[0] == number for _, number, label in delivered)


@contextlib.contextmanager
def forwarding(port: int) -> Iterator[tuple[int, threading.Event]]:
    """A port that leads to `port` of this host until the event is set, and again when it is cleared."""
    cut = threading.Event()
    open_sockets: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not cut.is_set() and (data := source.recv(65536)):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                if cut.is_set():
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", port))
                open_sockets.extend((client, server))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1], cut
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for each in open_sockets:
                each.close()


@pytest.mark.consul
def test_one_cut_off_from_consul_is_kept(start: Start, consul_agent: ConsulAgent) -> None:
    with forwarding(int(consul_agent.url.rpartition(":")[2])) as (port, cut):
        teacher = start("echo", service="cut", discovery=f"consul://127.0.0.1:{port}")
        reader = DistillReader(["x", None], ["y"], teacher_batch_size=4, options=Options(teacher_timeout_s=5))
        reader.set_dynamic_teacher(consul_agent.url, "cut").set_sample_generator(samples(40))
        with reader:
            check(list(reader()), 40)
            cut.set()
            until(lambda: "lapsed" in reader.stats().discovery, 30)
            check(list(reader()), 40)
            until(lambda: "cannot be kept registered" in teacher.log, 30)
            newcomer = DistillReader(["x", None], ["y"], teacher_batch_size=4, options=Options(teacher_timeout_s=30))
            with newcomer.set_dynamic_teacher(consul_agent.url, "cut").set_sample_generator(samples(8)):
                check(list(newcomer()), 8)
            cut.clear()
            until(lambda: not reader.stats().discovery, 30)
            assert reader.stats().rows_resent == 0
            teacher.terminate()
            until(lambda: reader.stats().teachers_live == 0, 30)
            assert reader.stats().discovery == "", "it deregistered"
