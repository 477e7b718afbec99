"""The `heterogeneous` benchmark's two sides, over the same teachers. Runs as a `Child`.

`bare` asks each teacher separately, with a few requests in flight, to measure the sum of the teachers' rates. `reader`
is a `DistillReader` over all teachers, at full speed or at `pace` batches per second.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np

from benchmarks._child import WARM_UP_S, Window, answer
from benchmarks._load import ROWS
from benchmarks._models import label_of
from edl.distill import DistillReader, Options
from edl.distill.options import Policy
from edl.protocol import codec, kserve, names

_BARE_IN_FLIGHT = 8


def request(number: int) -> bytes:
    """Return a request in KServe's format."""
    header = kserve.ModelInferRequest(model_name="m")
    header.inputs.add(name="id", datatype="INT64", shape=[ROWS, 1])
    return codec.REQUEST.join(
        header.SerializeToString(), [np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.int64).data]
    )


async def bare(endpoints: list[str], seconds: float) -> dict[str, float]:
    """Return the sum of the teachers' rates."""
    window = Window([os.getpid()])

    async def worker(call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]) -> None:
        for number in itertools.count():
            if window.closed:
                return
            await call(request(number))
            window.requests += 1

    channels = [grpc.aio.insecure_channel(endpoint) for endpoint in endpoints]
    calls: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = [
        channel.unary_unary(names.method("ModelInfer")) for channel in channels
    ]
    workers = [asyncio.ensure_future(worker(call)) for call in calls for _ in range(_BARE_IN_FLIGHT)]
    await asyncio.sleep(WARM_UP_S)
    window.open()
    await asyncio.sleep(seconds)
    window.close()
    await asyncio.gather(*workers)
    for channel in channels:
        await channel.close()
    return window.figures(ROWS)


class ReaderSide:
    """A reader over the teachers, and the time at which its source yielded each batch."""

    def __init__(self, endpoints: list[str], stack: ExitStack, *, hedging: bool) -> None:
        policy = Policy() if hedging else Policy(hedge_budget=0.0)
        self._reader = DistillReader(ins=["id"], predicts=["label"], options=Options(policy=policy))
        self._reader.set_fixed_teacher(endpoints)
        self._reader.set_batch_generator(self._source)
        stack.callback(self._reader.close)
        self._pace = 0.0
        self._yielded: dict[int, float] = {}

    def measure(self, pace: float, seconds: float) -> dict[str, float]:
        """Run an epoch; return rates, latencies from source to training loop, and the share of extra requests."""
        self._pace = pace
        window = Window([os.getpid()])
        before = self._reader.stats()
        now = time.perf_counter()
        begin, end = now + WARM_UP_S, now + WARM_UP_S + seconds
        opened = False
        latencies = []
        for number, (ids, labels) in enumerate(self._reader()):
            now = time.perf_counter()
            assert ids[0, 0] == number * ROWS
            assert (labels[:, 0] == label_of(ids[:, 0])).all()
            window.requests += 1
            yielded_at = self._yielded.pop(number)
            if opened:
                latencies.append(now - yielded_at)
            elif now >= begin:
                window.open()
                opened = True
            if now >= end:
                window.close()
                break
        after = self._reader.stats()
        percentiles = statistics.quantiles(latencies, n=100)
        return {
            **window.figures(ROWS),
            "p50_s": percentiles[49],
            "p99_s": percentiles[98],
            "extra": (after.rows_hedged - before.rows_hedged) / (after.rows_asked - before.rows_asked),
        }

    def _source(self) -> Iterator[tuple[Any]]:
        started = time.perf_counter()
        self._yielded.clear()
        for number in itertools.count():
            if self._pace:
                time.sleep(max(0.0, started + number / self._pace - time.perf_counter()))
            self._yielded[number] = time.perf_counter()
            yield (np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.int64).reshape(-1, 1),)


def main() -> None:
    """Measure on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teachers", help="endpoints, separated by commas")
    endpoints = parser.parse_args().teachers.split(",")
    with ExitStack() as stack:
        readers = {hedging: ReaderSide(endpoints, stack, hedging=hedging) for hedging in (True, False)}

        def handle(given: dict[str, Any]) -> dict[str, float]:
            if given["side"] == "bare":
                return asyncio.run(bare(endpoints, given["seconds"]))
            return readers[given["hedging"]].measure(given["pace"], given["seconds"])

        answer(handle)


if __name__ == "__main__":
    main()
