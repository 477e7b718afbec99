"""Frames over a socket: what is sent arrives, in order and unchanged, and nonsense ends the connection in words."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edl.errors import ProtocolError
from edl.protocol.frames import FrameKind, FrameSocket, TlsSocket, body_parts, split_body
from tests.certificates import HERE, Authority
from tests.waiting import DEADLINE_S

few = settings(max_examples=60)


@few
@given(st.binary(max_size=100), st.lists(st.binary(max_size=300), max_size=4))
def test_bodies_are_read_as_written(header: bytes, tensors: list[bytes]) -> None:
    body = memoryview(b"".join(body_parts(header, tensors)))
    found, views = split_body(body)
    assert (found, [bytes(view) for view in views]) == (header, tensors)


@few
@given(st.binary(max_size=200))
@example(b"\xff" * 200)
@example(b"\0\0\0\0\xff\xff\xff\xff")
@example(b"\0\0\0\0\2\0\0\0" + b"\xff" * 16)
def test_any_body_is_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        header, tensors = split_body(memoryview(body))
        assert len(header) + sum(map(len, tensors)) <= len(body)


class End:
    """One end of a connection, which keeps what comes."""

    def __init__(self, sock: Any) -> None:
        self.found: list[tuple[int, int, bytes]] = []
        self.ended = asyncio.Event()
        self.why = ""
        self.frames = FrameSocket(sock, self._begin, self._take, self._end)

    def _begin(self, kind: int, number: int, nbytes: int) -> bool:
        if kind > FrameKind.PONG:
            raise ProtocolError(f"no kind {kind}")
        return number % 7 != 3  # whose frames are dropped

    def _take(self, kind: int, number: int, body: memoryview) -> None:
        if number % 5 == 4:
            self.frames.pause()
            asyncio.get_running_loop().call_later(0, self.frames.resume)
        self.found.append((kind, number, bytes(body)))

    def _end(self, why: str) -> None:
        self.why = why
        self.ended.set()


async def ends(folder: Path, tls: bool) -> tuple[End, End]:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    if not tls:
        return End(left), End(right)
    pair = Authority().issue(*HERE).save(folder)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(pair["cert"], pair["key"])
    asking = ssl.create_default_context(cafile=pair["cert"])
    asking.check_hostname = False
    asking.verify_mode = ssl.CERT_NONE
    server, client = TlsSocket(left, serving, serves=True), TlsSocket(right, asking, serves=False)
    shown, _ = await asyncio.gather(client.shake_hands(), server.shake_hands())
    assert shown
    return End(server), End(client)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_frames_arrive_in_order(tmp_path: Path, tls: bool, seed: int) -> None:
    """Both ways at once: none, small and large ones, some dropped, some withdrawn, with pauses."""
    rng = random.Random(seed)

    async def run() -> None:
        both = await ends(tmp_path, tls)
        sent: tuple[list[Any], list[Any]] = ([], [])
        acknowledged = [0, 0]
        for number in range(60):
            side = rng.randrange(2)
            parts = [rng.randbytes(rng.choice([0, 1, 30, 5000, 70_000, 900_000])) for _ in range(rng.randrange(4))]

            def done(side: int = side) -> None:
                acknowledged[side] += 1

            frame = both[side].frames.send(FrameKind.REQUEST, number, parts, done)
            if rng.random() < 0.1 and both[side].frames.withdraw(frame):
                continue
            sent[side].append((FrameKind.REQUEST, number, b"".join(parts)))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        for side in (0, 1):
            wanted = [frame for frame in sent[side] if frame[1] % 7 != 3]
            while len(both[1 - side].found) < len(wanted):  # noqa: ASYNC110 - the loop's own callbacks bring them
                await asyncio.sleep(0)
            assert both[1 - side].found == wanted
            assert acknowledged[side] == len(sent[side])
        both[0].frames.close("enough")
        await both[1].ended.wait()
        assert (both[0].why, both[1].why) == ("enough", "the peer closed the connection")

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_nonsense_ends_the_connection(tmp_path: Path) -> None:
    async def run() -> None:
        left, right = socket.socketpair()
        right.setblocking(False)
        end = End(right)
        with left:
            left.sendall(bytes([99]) + bytes(500))
            await end.ended.wait()
        assert end.why == "no kind 99"

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
