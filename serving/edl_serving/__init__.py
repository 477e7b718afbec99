"""The teacher server: a model answered for over KServe v2 gRPC.

`Backend` is what a model looks like to the server, `TeacherServer` serves one, `serve` runs it until a signal.
Students, Triton's own clients and `edl.distill` talk to it alike.

What does not belong here: the student's side, balancing, and training. Only public names of `edl` are used, and
`edl` never imports this package.
"""

from __future__ import annotations

from edl.protocol import transport as _transport  # noqa: F401 - before grpc_health imports gRPC its own way
from edl_serving.backend import Array, Backend, TensorSpec
from edl_serving.run import serve
from edl_serving.server import TeacherServer
from edl_serving.settings import ServerSettings

__all__ = ["Array", "Backend", "ServerSettings", "TeacherServer", "TensorSpec", "serve"]
