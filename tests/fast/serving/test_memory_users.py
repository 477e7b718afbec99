"""Shared memory is no way for a client to have the teacher do what it may not do itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.testing import LocalTeacher
from tests.services.distill.test_lost_memory import clients, registered_names

CLIENT = """
import json, os, sys
from edl.protocol import codec, kserve, names
from edl.protocol.transport import grpc

endpoint, name, key, user = sys.argv[1:]
os.setuid(int(user))

def ask(method, **fields):
    kind = getattr(kserve, f"{method}Request")(**fields)
    try:
        answer = channel.unary_unary(names.method(method))(kind.SerializeToString(), timeout=20)
    except grpc.RpcError as exc:
        return f"{exc.code().name}: {exc.details()}"
    return str(getattr(kserve, f"{method}Response").FromString(answer))

with grpc.insecure_channel(endpoint) as channel:
    found = {
        "list": ask("SystemSharedMemoryStatus"),
        "unregister all": ask("SystemSharedMemoryUnregister"),
        "look": ask("SystemSharedMemoryStatus", name=name),
        "register": ask("SystemSharedMemoryRegister", name="mine", key=key, byte_size=4096),
    }
    request = kserve.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    tensor.parameters[names.SHM_REGION].string_param = name
    tensor.parameters[names.SHM_NBYTES].int64_param = 16
    try:
        channel.unary_unary(names.method("ModelInfer"))(request.SerializeToString(), timeout=20)
        found["read"] = "read"
    except grpc.RpcError as exc:
        found["read"] = exc.details()
    found["unregister"] = ask("SystemSharedMemoryUnregister", name=name)
print(json.dumps(found))
"""


@pytest.fixture
def reader() -> Iterator[DistillReader]:
    """With shared memory registered, in the middle of an epoch."""
    with LocalTeacher("echo") as teacher:
        found = DistillReader(
            ["x"], ["y"], teachers=[teacher.endpoint], teacher_batch_size=4, options=Options(teacher_timeout_s=60)
        )
        found.set_sample_generator(lambda: ((np.full(4, number, np.float32),) for number in range(400)))
        with found:
            yield found


def as_client(reader: DistillReader, user: int) -> tuple[dict[str, str], list[str], list[str]]:
    """What a second client finds; the names of the student's regions before and after."""
    epoch = reader()
    x, y = next(epoch)
    before = registered_names(reader)
    assert before, "shared memory was to be in use"
    connected: Any = clients(reader)[0]
    key = next(iter(connected._regions._known))
    command = [sys.executable, "-c", CLIENT, connected.endpoint, before[0], f"/{key}", str(user)]
    run = subprocess.run(command, check=True, capture_output=True, timeout=60)
    for x, y in epoch:
        assert (x == y).all()
    return json.loads(run.stdout), before, registered_names(reader)


def test_a_second_client_sees_its_own(reader: DistillReader) -> None:
    found, before, after = as_client(reader, os.geteuid())
    assert found["list"] == "", f"lists what another connection registered: {found}"
    assert before[0] in found["look"], "who knows the name, and could read the file itself, may"
    assert found["register"] == ""
    assert before[0] not in after, "it unregistered the student's by name"


if os.geteuid() == 0:  # who else cannot be another user

    def test_another_user_gets_nothing(reader: DistillReader) -> None:
        found, before, after = as_client(reader, 65534)
        assert found["list"] == ""
        assert "is not registered" in found["look"]
        assert "belongs to user 0, and the client is user 65534" in found["register"]
        assert "is not registered" in found["read"]
        assert before[0] in after, f"the student's memory was unregistered: {found}"
