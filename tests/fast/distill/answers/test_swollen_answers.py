"""Teachers that answer with far more than was asked for: refused before it takes memory, and said."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.errors import EDLError
from edl.protocol import codec, kserve, names, tensors
from edl.protocol.transport import grpc
from tests.fast.distill.conftest import Start, until

SWOLLEN_NBYTES = 200 << 20  # more than a channel takes at first
STUDENT = """
import json, resource, sys, time
import numpy as np
import edl.distill.engine.connection
from edl.distill import DistillReader, Options

# A busy machine takes long to send so much, and longer to compress it before, and the next attempt says nothing of why
# the one before failed.
edl.distill.engine.connection._CONNECT_TIMEOUT_S = 80.0

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def error_of(reader):
    try:
        list(reader())
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""

endpoint, *words = sys.argv[1:]
before, deadline = peak_mib(), time.monotonic() + 80
reader = DistillReader(["x"], ["y"], teachers=[endpoint], options=Options(teacher_timeout_s=5))
reader.set_batch_generator(lambda: [(np.zeros((2, 4), np.float32),)])
with reader:
    error = error_of(reader)
    while error.startswith("NoTeacherError") and not any(map(error.__contains__, words)):
        assert time.monotonic() < deadline, error
        error = error_of(reader)  # its first attempt to connect has not ended
print(json.dumps({"grew_mib": peak_mib() - before, "error": error}))
"""


@contextmanager
def strange_teacher(swollen: str, *, streams: bool, compression: grpc.Compression) -> Iterator[str]:
    """A KServe v2 server of `y` FP32[4], whose answers to the method `swollen` are large; its endpoint."""

    def answer(name: str, data: bytes) -> bytes:
        beside = bytes(SWOLLEN_NBYTES) if name == swollen else b""
        if name == "ModelInfer":
            return infer_response(data, beside)
        return bytes(answers[name].SerializeToString()) + (unknown_field(beside) if beside else b"")

    def stream(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for data in requests:
            response = kserve.ModelInferResponse.FromString(
                infer_response(data, bytes(SWOLLEN_NBYTES) if swollen == "ModelStreamInfer" else b"")
            )
            yield kserve.ModelStreamInferResponse(infer_response=response).SerializeToString()

    extensions = [names.EXTENSION_STREAM] if streams else []
    spec = kserve.ModelMetadataResponse(name="m", versions=["1"])
    for tensors_of, name in ((spec.inputs, "x"), (spec.outputs, "y")):
        tensors_of.add(name=name, datatype="FP32", shape=[-1, 4])
    config = kserve.ModelConfig(name="m", max_batch_size=8)
    config.parameters[names.MAX_ROWS].string_value = "8"
    index = kserve.RepositoryIndexResponse()
    index.models.add(name="m", state="READY")
    answers: dict[str, Any] = {
        "ServerReady": kserve.ServerReadyResponse(ready=True),
        "ServerMetadata": kserve.ServerMetadataResponse(extensions=[*extensions, "model_configuration"]),
        "ModelReady": kserve.ModelReadyResponse(ready=True),
        "ModelMetadata": spec,
        "ModelConfig": kserve.ModelConfigResponse(config=config),
        "RepositoryIndex": index,
        "ModelInfer": None,
    }
    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(lambda data, _, name=name: answer(name, data)) for name in answers
    }
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(stream)
    with futures.ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool, options=[("grpc.max_send_message_length", -1)], compression=compression)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(names.SERVICE, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()


def unknown_field(data: bytes) -> bytes:
    """Field 15, which no message of KServe v2 has."""
    return codec.join_response(b"", [data]).replace(b"\x32", b"\x7a", 1)


def infer_response(data: bytes, beside: bytes) -> bytes:
    header, _ = codec.decode_request(data)
    answer = kserve.ModelInferResponse(model_name="m", model_version="1", id=header.id)
    answer.outputs.add(name="y", datatype="FP32", shape=[2, 4])
    raw = [tensors.to_raw(np.zeros((2, 4), np.float32)), *([beside] if beside else [])]
    return codec.join_response(answer.SerializeToString(), raw)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.NoCompression])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ModelMetadata"])
def test_no_more_than_was_asked_for(method: str, compression: grpc.Compression) -> None:
    words = ("Options(max_answer_bytes=...)", *(("is compressed",) if compression is grpc.Compression.Gzip else ()))
    with strange_teacher(method, streams=method == "ModelStreamInfer", compression=compression) as endpoint:
        command = [sys.executable, "-c", STUDENT, endpoint, *words]
        run = subprocess.run(command, check=True, capture_output=True, timeout=100, text=True)
    found = json.loads(run.stdout.splitlines()[-1])
    assert any(remedy in found["error"] for remedy in words), f"the error says what is wrong: {found}"
    assert found["grew_mib"] < 100, f"{SWOLLEN_NBYTES >> 20} MiB were on their way: {found}"


def test_a_large_model_gets_room(start: Start) -> None:
    """What its metadata say is more than the channel takes at first."""
    teacher = start("echo", repeat=1_100_000, max_queue=4, max_batch=4)
    with DistillReader(["x"], ["y"], teachers=[teacher.endpoint]) as reader:
        reader.set_batch_generator(lambda: [(np.full((4, 4), 3, np.float32),)])
        [(_, y)] = list(reader())
        assert y.nbytes == 4 * 4 * 4 * 1_100_000
        assert (y == 3).all()
    options = Options(max_answer_bytes=64 << 20, teacher_timeout_s=3)
    with DistillReader(["x"], ["y"], teachers=[teacher.endpoint], options=options) as reader:
        reader.set_batch_generator(lambda: [(np.full((4, 4), 3, np.float32),)])

        def is_refused() -> bool:  # or a busy machine does not get so far in these seconds
            with pytest.raises(EDLError) as caught:
                list(reader())
            return re.search("larger than max .*max_answer_bytes", str(caught.value)) is not None

        until(is_refused, 60)
