"""Implements the protocol between students and teachers: KServe v2 over gRPC.

`kserve` contains the message classes, `codec` converts requests to bytes and back, `tensors` converts tensors between
raw bytes and numpy arrays, and `names` lists the names on the wire.
"""

from __future__ import annotations

from edl.protocol import codec, kserve, names, tensors

__all__ = ["codec", "kserve", "names", "tensors"]
