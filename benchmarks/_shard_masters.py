"""The `shards` benchmark's servers: EDL's master, and a dictionary behind the same gRPC service. Runs as a `Child`.

The dictionary works like the task manager in DLRover and ElasticDL: it keeps waiting tasks and running tasks, and
writes nothing to disk. It uses the same messages over the same kind of stream, so that only the implementation differs.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import threading
from collections.abc import AsyncIterator
from typing import Any

from benchmarks._child import answer
from edl.background import BackgroundLoop
from edl.master import MasterServer, MasterSettings, ShardSettings, open_dataset
from edl.master.naming import SERVICE
from edl.protocol import master as messages
from edl.protocol.transport import grpc

SHARD_UNITS = 10
SIZES = {"thousand": 1_000, "million": 1_000_000}
"""Endless data sets, and their shards per epoch."""
_OPTIONS = [("grpc.so_reuseport", 0)]


def serve_edl(folder: str) -> None:
    """Serve EDL's master, with its journal in a folder, until standard input is closed."""
    settings = ShardSettings(shard_size=SHARD_UNITS, epochs=0, shuffle=True, session_s=600, lease_s=600)
    specs = {name: open_dataset(f"range:{shards * SHARD_UNITS}", settings).spec for name, shards in SIZES.items()}
    master = MasterSettings(store=f"sqlite:///{folder}/store.sqlite", journal=f"sqlite:///{folder}/journal.sqlite")
    with MasterServer("bench", master, specs) as server:
        if not server.wait_leading(60):
            raise RuntimeError(f"the master does not lead: {server.failure}")
        answer(lambda request: {"endpoint": server.endpoint})


class Dictionary:
    """A deque of waiting tasks and a dictionary of running tasks, for one epoch after the other."""

    def __init__(self) -> None:
        self._tasks = 0
        self._todo: collections.deque[tuple[int, int, int]] = collections.deque()
        self._doing: dict[int, tuple[str, tuple[int, int, int]]] = {}
        self._epoch = 0

    def turn(self, turn: messages.Turn) -> messages.NextReply:
        for done in turn.done:
            self._doing.pop(done, None)
        reply = messages.NextReply(request=turn.request, epoch=self._epoch)
        for _ in range(turn.want):
            if not self._todo:
                count = SIZES["thousand"]
                self._todo.extend((shard, shard * SHARD_UNITS, (shard + 1) * SHARD_UNITS) for shard in range(count))
                self._epoch += 1
            shard, start, stop = self._todo.popleft()
            self._tasks += 1
            self._doing[self._tasks] = (turn.session, (shard, start, stop))
            reply.leases.add(id=self._tasks, term=1, epoch=self._epoch, shard=shard, start=start, stop=stop)
        return reply


def serve_dictionary() -> None:
    """Serve the dictionary until standard input is closed."""
    tasks = Dictionary()
    ports: list[int] = []
    started, stopping = threading.Event(), threading.Event()

    async def follow(requests: AsyncIterator[messages.NextRequest], context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(tasks.turn(request.turn) if request.HasField("turn") else messages.NextReply())

    async def serve() -> None:
        server = grpc.aio.server(options=_OPTIONS)
        handlers: dict[str, Any] = {
            "Next": grpc.stream_stream_rpc_method_handler(
                follow, messages.NextRequest.FromString, lambda reply: reply.SerializeToString()
            )
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        started.set()
        while not stopping.is_set():  # noqa: ASYNC110 - the process ends soon after
            await asyncio.sleep(0.1)
        await server.stop(0)

    def run() -> None:
        asyncio.run(serve())

    loop = BackgroundLoop("edl-dictionary", run, stopping.set)
    started.wait(30)
    answer(lambda request: {"endpoint": f"127.0.0.1:{ports[0]}"})
    loop.close()


def main() -> None:
    """Serve the master or the dictionary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--journal", help="folder for the journal of EDL's master (default: serve the dictionary)")
    folder = parser.parse_args().journal
    if folder:
        serve_edl(folder)
    else:
        serve_dictionary()


if __name__ == "__main__":
    main()
