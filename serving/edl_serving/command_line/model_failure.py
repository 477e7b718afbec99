"""What `edl serve` says when the model failed before it was ready: whose fault it may be, and where to look."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

from edl_serving.backends.backend import Backend
from edl_serving.backends.described import DescribedBackend
from edl_serving.backends.source import ModelSource, top_name
from edl_serving.backends.specs import complete_outputs
from edl_serving.backends.target import is_library

__all__ = ["what_failed"]

_OURS = str(Path(__file__).parents[1])
_CALLS = {complete_outputs.__code__, Backend.warm_up.__code__, DescribedBackend.warm_up.__code__}
"""Where the model is called with a batch that EDL has made up as the user said."""


def what_failed(exc: BaseException, source: ModelSource) -> str:
    """A text for standard error.

    The stack is that of the user's code, from where EDL called it. It is left out where only libraries are in it, which
    were given what the user said of the inputs: then that is where to look.
    """
    complaint = "".join(traceback.format_exception_only(type(exc), exc)).strip()
    said = _said(source) if any(frame.f_code in _CALLS for frame in _frames(exc.__traceback__)) else ""
    if not said:
        return f"the model failed:\n{_users_stack(exc)}"
    if _is_library(exc, source.package):
        return f"the model was called with {said}, and failed: {complaint}"
    return f"the model failed:\n{_users_stack(exc)}\nedl serve: it was called with {said}"


def _said(source: ModelSource) -> str:
    """The batch, by the flags that say what it looks like; empty if the model itself does."""
    if source.sample:
        return f"the batch in --sample {source.sample!r}"
    flags = " ".join(f"--input {text!r}" for text in source.inputs)
    return f"zeros of the types and sizes of {flags}" if flags else ""


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(trace))


def _theirs(exc: BaseException) -> TracebackType | None:
    """The traceback from where EDL called the user's code; None if the fault is EDL's own."""
    trace = theirs = exc.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_OURS):
            theirs = trace.tb_next
        trace = trace.tb_next
    return theirs


def _users_stack(exc: BaseException) -> str:
    """The traceback from where EDL called the user's code; all of it if the fault is EDL's own."""
    trace = _theirs(exc) or exc.__traceback__
    return "".join(traceback.format_exception(type(exc), exc, trace)).rstrip()


def _is_library(exc: BaseException, package: str) -> bool:
    """Whether nothing that the user wrote is in the stack; what is named is the user's, even if it is installed."""
    frames = [*_frames(_theirs(exc))]
    return bool(frames) and all(
        is_library(frame.f_code.co_filename) and top_name(str(frame.f_globals.get("__name__"))) != package
        for frame in frames
    )
