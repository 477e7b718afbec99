"""Answers calls of workers: what changes the state goes through the term's sequencer, and is journalled first."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

from edl.errors import ClosedError, ConflictError, EDLError, LeaseLostError, ProtocolError, SettingsError
from edl.master.naming import FORMAT, SERVICE
from edl.master.server.term import Term
from edl.protocol import master as messages
from edl.protocol.transport import grpc

__all__ = ["MasterServicer"]

Context = Any


class MasterServicer:
    """Answers while there is a term, and refuses with UNAVAILABLE while there is none: this master stands by.

    Args:
        job: its name.
        status: returns what `GetStatus` answers.
    """

    def __init__(self, job: str, status: Callable[[Term], dict[str, Any]]) -> None:
        self._job = job
        self._status = status
        self._term: Term | None = None
        self._why = "it has just been started"
        self._streams: set[asyncio.Task[Any]] = set()

    def lead(self, term: Term) -> None:
        """Answer from now on."""
        self._term = term

    def stand_by(self, why: str) -> None:
        """Refuse calls from now on, saying why, and end streams: their workers look for the next master at once."""
        self._term = None
        self._why = why
        for stream in self._streams:
            stream.cancel()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what gRPC's server wants to know."""
        commands: dict[str, tuple[str, Any, Any]] = {
            "CreateDataset": ("create_dataset", messages.CreateDataset, messages.DatasetReply),
            "ExtendDataset": ("extend_dataset", messages.ExtendDataset, messages.DatasetReply),
            "EndDataset": ("end_dataset", messages.EndDataset, messages.DatasetReply),
            "FlushDataset": ("flush_dataset", messages.FlushDataset, messages.DatasetReply),
            "Mark": ("mark", messages.Mark, messages.MarkReply),
            "Resume": ("resume", messages.Resume, messages.ResumeReply),
            "CloseSession": ("close_session", messages.CloseSession, messages.CloseSessionReply),
            "RetryPoisoned": ("retry_poisoned", messages.RetryPoisoned, messages.RetryPoisonedReply),
            "RestoreProgress": ("restore_progress", messages.RestoreProgress, messages.DatasetReply),
        }
        reads: dict[str, tuple[Callable[[Term, Any], Any], Any, Any]] = {
            "Hello": (self._hello, messages.HelloRequest, messages.HelloReply),
            "DescribeDataset": (_describe, messages.DescribeDatasetRequest, messages.DatasetReply),
            "GetProgress": (_progress, messages.DescribeDatasetRequest, messages.Progress),
            "GetStatus": (self._get_status, messages.GetStatusRequest, messages.GetStatusReply),
        }
        handlers: dict[str, Any] = {
            name: _unary(partial(self._answer, partial(_submit, field, reply), reply), request)
            for name, (field, request, reply) in commands.items()
        }
        handlers.update(
            (name, _unary(partial(self._answer, partial(_read, read), reply), request))
            for name, (read, request, reply) in reads.items()
        )
        handlers["Next"] = grpc.stream_stream_rpc_method_handler(
            self._next, messages.NextRequest.FromString, _serialize
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _leading(self) -> Term:
        if self._term is None:
            raise ClosedError(f"this master of job {self._job!r} stands by: {self._why}")
        return self._term

    async def _answer(
        self, answer: Callable[[Term, Any], Awaitable[Any]], reply: Callable[[], Any], request: Any, context: Context
    ) -> Any:
        with _refusing(context):
            return await answer(self._leading(), request)
        return reply()

    async def _next(self, requests: AsyncIterator[messages.NextRequest], context: Context) -> None:
        """Answer the turns of a session, in their order. A stream may have several sessions, one after the other."""
        stream = asyncio.current_task()
        assert stream is not None
        self._streams.add(stream)
        try:
            await self._take_turns(context)
        except asyncio.CancelledError:
            if self._term is not None:
                raise  # by the worker
            with _refusing(context):
                self._leading()
        finally:
            self._streams.discard(stream)

    async def _take_turns(self, context: Context) -> None:
        with _refusing(context):
            while (request := await context.read()) is not grpc.aio.EOF:
                term = self._leading()
                if request.HasField("turn"):
                    reply = await term.turn(request.turn)
                elif request.HasField("open"):
                    reply = await term.open_session(request.open)
                else:
                    raise SettingsError("a message of the stream opens a session, or is a turn")
                await context.write(reply)

    def _hello(self, term: Term, request: messages.HelloRequest) -> messages.HelloReply:
        return messages.HelloReply(format=FORMAT, job=self._job, term=term.number)

    def _get_status(self, term: Term, request: messages.GetStatusRequest) -> messages.GetStatusReply:
        return messages.GetStatusReply(json=json.dumps(self._status(term)))


class _NotFoundError(EDLError):
    """There is no such data set."""


def _unary(answer: Callable[[Any, Context], Awaitable[Any]], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(answer, request.FromString, _serialize)


async def _submit(field: str, reply: Callable[[], Any], term: Term, request: Any) -> Any:
    if field in ("mark", "resume"):
        term.hear(request.session)
    answer = await term.submit(messages.Command(**{field: request}))
    return reply() if answer is None else answer


async def _read(read: Callable[[Term, Any], Any], term: Term, request: Any) -> Any:
    """Answer from what the journal has: the state may be ahead of it."""
    answer = read(term, request)
    await term.sequencer.settled()
    return answer


def _describe(term: Term, request: messages.DescribeDatasetRequest) -> messages.DatasetReply:
    _check_known(term, request.dataset)
    return term.book.describe(request.dataset)


def _progress(term: Term, request: messages.DescribeDatasetRequest) -> messages.Progress:
    _check_known(term, request.dataset)
    return messages.Progress(progress=term.book.progress(request.dataset))


def _check_known(term: Term, dataset: str) -> None:
    if dataset not in term.book.datasets():
        raise _NotFoundError(f"there is no data set {dataset!r}; there are {sorted(term.book.datasets())}")


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
