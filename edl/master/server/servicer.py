"""Answers calls of workers: what changes the state is journalled first.

`master.proto` is the table of calls: a method whose request is a kind of `Command` is applied to the book of shards,
`Next` is a stream of such requests, and every other method reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Final

from edl.errors import ClosedError, ConflictError, EDLError, LeaseLostError, ProtocolError, SettingsError
from edl.master.naming import FORMAT, SERVICE
from edl.master.server.term import Term
from edl.protocol import master as messages
from edl.protocol.transport import grpc
from edl.quoting import did_you_mean

__all__ = ["MasterServicer"]

Context = Any

_COMMAND: Final[Any] = messages.Command.DESCRIPTOR
_FIELDS: Final[dict[str, str]] = {
    field.message_type.name: field.name for field in _COMMAND.oneofs_by_name["kind"].fields
}
"""The field of a `Command` that holds a request, by the request's type."""


class MasterServicer:
    """Answers while there is a term, and refuses with UNAVAILABLE while there is none, because this master stands by.

    `status` returns what `GetStatus` answers.
    """

    def __init__(self, job: str, status: Callable[[Term], dict[str, Any]]) -> None:
        self._job = job
        self._status = status
        self._term: Term | None = None
        self._why = "it has just been started"
        self._streams: dict[asyncio.Task[Any], str] = {}  # and the session that each has opened last

    def lead(self, term: Term) -> None:
        """Answer from now on."""
        self._term = term

    def stand_by(self, why: str) -> None:
        """Refuse calls from now on, and end streams, so that their workers look for the next master at once."""
        self._term = None
        self._why = why
        for stream in self._streams:
            stream.cancel()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the methods for gRPC's server."""
        handlers: dict[str, Any] = {}
        for method in _COMMAND.file.services_by_name[SERVICE.rpartition(".")[2]].methods:
            request, reply = (getattr(messages, kind.name) for kind in (method.input_type, method.output_type))
            if method.name == "Next":
                handler = grpc.stream_stream_rpc_method_handler(self._next, request.FromString, _serialize)
            else:
                answer = partial(self._answer, method.name, reply)
                handler = grpc.unary_unary_rpc_method_handler(answer, request.FromString, _serialize)
            handlers[method.name] = handler
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _leading(self) -> Term:
        if self._term is None:
            raise ClosedError(f"this master of job {self._job!r} stands by: {self._why}")
        return self._term

    async def _answer(self, method: str, reply: Callable[[], Any], request: Any, context: Context) -> Any:
        with _refusing(context):
            term = self._leading()
            field = _FIELDS.get(request.DESCRIPTOR.name)
            if field is None:
                answer = self._read(method, term, request)
                await term.settled()  # the state may be ahead of the journal
            else:
                if field in ("mark", "resume"):
                    term.clock.hear(request.session)
                answer = await term.submit(messages.Command(**{field: request}))
            if field == "restore_progress":
                self._end_lost_streams(term)
            return reply() if answer is None else answer
        return reply()

    def _read(self, method: str, term: Term, request: Any) -> Any:
        """Answer a call that changes nothing."""
        if method == "Hello":
            return messages.HelloReply(format=FORMAT, job=self._job, term=term.number)
        if method == "GetStatus":
            return messages.GetStatusReply(json=json.dumps(self._status(term)))
        if request.dataset not in term.book.datasets():
            there = sorted(term.book.datasets())
            hint = did_you_mean(request.dataset, there)
            raise _NotFoundError(f"data set {request.dataset!r} does not exist; these do: {there}{hint}")
        if method == "DescribeDataset":
            return term.book.describe(request.dataset)
        assert method == "GetProgress", method
        return messages.Progress(progress=term.book.progress(request.dataset))

    def _end_lost_streams(self, term: Term) -> None:
        """End the streams of sessions that were ended, so that their readers drop what they have at hand at once."""
        for stream, session in self._streams.items():
            if session and term.book.session(session) is None:
                stream.cancel()

    async def _next(self, requests: AsyncIterator[messages.NextRequest], context: Context) -> None:
        """Answer the turns of a session, in their order. A stream may have several sessions, one after the other."""
        stream = asyncio.current_task()
        assert stream is not None
        self._streams[stream] = ""
        try:
            await self._take_turns(stream, context)
        except asyncio.CancelledError:
            term, session = self._term, self._streams[stream]
            if term is not None and (not session or term.book.session(session) is not None):
                raise  # by the worker
            with _refusing(context):
                self._leading()
                raise LeaseLostError(f"session {session!r} has ended") from None
        finally:
            del self._streams[stream]

    async def _take_turns(self, stream: asyncio.Task[Any], context: Context) -> None:
        with _refusing(context):
            while (request := await context.read()) is not grpc.aio.EOF:
                term = self._leading()
                if request.HasField("turn"):
                    reply = await term.turn(request.turn)
                elif request.HasField("open"):
                    reply = await term.open_session(request.open)
                    self._streams[stream] = request.open.session
                else:
                    raise SettingsError("a message of the stream opens a session, or is a turn")
                await context.write(reply)


class _NotFoundError(EDLError):
    """There is no such data set."""


@contextlib.contextmanager
def _refusing(context: Context) -> Iterator[None]:
    """Turn errors into gRPC's. Not by `context.abort`: its error would hold on to the server until it is collected."""
    try:
        yield
    except EDLError as exc:
        context.set_code(next(code for kind, code in _CODES.items() if isinstance(exc, kind)))
        context.set_details(str(exc))


_CODES: Final = {
    _NotFoundError: grpc.StatusCode.NOT_FOUND,
    SettingsError: grpc.StatusCode.INVALID_ARGUMENT,
    ConflictError: grpc.StatusCode.ALREADY_EXISTS,
    LeaseLostError: grpc.StatusCode.FAILED_PRECONDITION,
    ProtocolError: grpc.StatusCode.DATA_LOSS,
    EDLError: grpc.StatusCode.UNAVAILABLE,
}


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
