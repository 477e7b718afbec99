"""The `shards` benchmark's load: workers that do nothing but take shards and report them. Runs as a `Child`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from benchmarks._child import WARM_UP_S, answer
from edl.master.naming import SERVICE
from edl.protocol import master as messages
from edl.protocol.transport import DIRECT, grpc


async def measure(endpoint: str, dataset: str, streams: int, batch: int, seconds: float) -> dict[str, float]:
    """Return transitions per second. Handing out a shard and reporting it as done are one transition each.

    Args:
        endpoint: Endpoint of the master.
        dataset: Name of the data set.
        streams: Number of workers. Each has a single turn in flight.
        batch: Shards per turn.
        seconds: Length of the measurement.
    """
    transitions, closed = 0, False
    async with grpc.aio.insecure_channel(endpoint, options=DIRECT) as channel:
        method: Any = channel.stream_stream(
            f"/{SERVICE}/Next", lambda message: message.SerializeToString(), messages.NextReply.FromString
        )

        async def worker(name: str) -> None:
            nonlocal transitions
            call = method(timeout=600)
            opened = messages.OpenSession(dataset=dataset, session=name, holder=name)
            await call.write(messages.NextRequest(open=opened))
            await call.read()
            request = 0
            leases: Sequence[messages.Lease] = []
            while not closed or leases:
                request += 1
                turn = messages.Turn(session=name, request=request, want=0 if closed else batch)
                turn.done.extend([lease.id for lease in leases])
                turn.done_terms.extend([lease.term for lease in leases])
                await call.write(messages.NextRequest(turn=turn))
                reply = await call.read()
                if reply is grpc.aio.EOF:
                    raise RuntimeError(f"the stream ended: {await call.details()}")
                if reply.refused:
                    raise RuntimeError(f"a report was refused: {reply.refused[0].reason}")
                transitions += len(leases) + len(reply.leases)
                leases = reply.leases
            await call.done_writing()

        workers = [asyncio.ensure_future(worker(secrets.token_hex(16))) for _ in range(streams)]
        await asyncio.sleep(WARM_UP_S)
        before, begun = transitions, time.perf_counter()
        await asyncio.sleep(seconds)
        rate = (transitions - before) / (time.perf_counter() - begun)
        closed = True
        await asyncio.gather(*workers)
    return {"per_s": rate}


if __name__ == "__main__":
    answer(lambda request: asyncio.run(measure(**request)))
