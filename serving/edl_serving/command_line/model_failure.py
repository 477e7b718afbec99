"""The report of a model that failed before it was ready: where to look."""

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

__all__ = ["describe_failure"]

_OURS = str(Path(__file__).parents[1])
_CALLS = {complete_outputs.__code__, Backend.warm_up.__code__, DescribedBackend.warm_up.__code__}
"""Where the model is called with a batch that EDL has made up as the user said."""


def describe_failure(exc: BaseException, source: ModelSource) -> str:
    """Describe an exception that a model raised.

    The stack is that of the user's code, from where EDL called it. It is left out where it holds libraries only, which
    were given inputs of the user's flags: then the flags are where to look.

    Args:
        exc: what was raised.
        source: the model.

    Returns:
        Text for standard error, of several lines.
    """
    complaint = "".join(traceback.format_exception_only(type(exc), exc)).strip()
    batch = _batch_flags(source) if any(frame.f_code in _CALLS for frame in _frames(exc.__traceback__)) else ""
    if not batch:
        return f"the model failed:\n{_users_stack(exc)}"
    if _is_library(exc, source.package):
        return f"the model was called with {batch}, and failed: {complaint}"
    return f"the model failed:\n{_users_stack(exc)}\nedl serve: it was called with {batch}"


def _batch_flags(source: ModelSource) -> str:
    """Return the batch by the flags that describe it; empty if the model itself does."""
    if source.sample:
        return f"the batch in --sample {source.sample!r}"
    flags = " ".join(f"--input {text!r}" for text in source.inputs)
    return f"zeros of the types and sizes of {flags}" if flags else ""


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(trace))


def _theirs(exc: BaseException) -> TracebackType | None:
    """Return the traceback from where EDL called the user's code; None if the fault is EDL's own."""
    trace = theirs = exc.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_OURS):
            theirs = trace.tb_next
        trace = trace.tb_next
    return theirs


def _users_stack(exc: BaseException) -> str:
    """Format the traceback from where EDL called the user's code; all of it if the fault is EDL's own."""
    trace = _theirs(exc) or exc.__traceback__
    return "".join(traceback.format_exception(type(exc), exc, trace)).rstrip()


def _is_library(exc: BaseException, package: str) -> bool:
    """Return whether the stack holds libraries only; the named module is the user's, even if it is installed."""
    frames = [*_frames(_theirs(exc))]
    return bool(frames) and all(
        is_library(frame.f_code.co_filename) and top_name(str(frame.f_globals.get("__name__"))) != package
        for frame in frames
    )
