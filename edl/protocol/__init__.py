"""What travels between students and teachers: KServe v2 over gRPC.

`kserve` has the message classes, `codec` turns requests into bytes and back, `tensors` turns these into numpy arrays,
`names` lists the names on the wire.
"""

from __future__ import annotations

from edl.protocol import codec, kserve, names, tensors

__all__ = ["codec", "kserve", "names", "tensors"]
