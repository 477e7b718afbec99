"""Triton's own client against our server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as triton_shm
from tritonclient.utils import InferenceServerException

from edl_serving import Array
from edl_serving.cmd_register import ForeignServer
from tests.fast.serving.conftest import TIMEOUT_S, StartInside
from tests.fast.serving.fakes import Base, Mixed, logits


def mixed_inputs() -> tuple[list[Any], Array]:
    """Four rows for the model `Mixed`, and what `x` is in them."""
    x = np.random.default_rng(1).random((4, 3), np.float32)
    words = np.array([["w0", "é"], ["w1", "é"], ["w2", "é"], ["w3", "é"]], object)
    inputs = [triton.InferInput("x", x.shape, "FP32"), triton.InferInput("words", words.shape, "BYTES")]
    inputs[0].set_data_from_numpy(x)
    inputs[1].set_data_from_numpy(words)
    return inputs, x


JOINED = [f"w{row} é".encode() for row in range(4)]


def test_server_describes_itself_and_answers(inside: StartInside) -> None:
    with triton.InferenceServerClient(inside(Mixed(), max_batch_rows=16).target) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        for model, ready in ((("m",), True), (("m", "1"), True), (("other",), False), (("m", "2"), False)):
            assert client.is_model_ready(*model) is ready
        metadata = client.get_model_metadata("m", as_json=True)
        assert metadata["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": ["-1", "-1"]}
        config = client.get_model_config("m", as_json=True)["config"]
        assert config["max_batch_size"] == 16
        assert config["input"][1] == {"name": "words", "data_type": "TYPE_STRING", "dims": ["2"]}
        (found,) = client.get_model_repository_index(as_json=True)["models"]
        assert found == {"name": "m", "version": "1", "state": "READY"}
        assert {"edl_top_k", "edl_dtype", "system_shared_memory"} <= set(client.get_server_metadata().extensions)
        with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*unknown model 'other'"):
            client.get_model_metadata("other")
        inputs, x = mixed_inputs()
        result = client.infer("m", inputs, request_id="seven")
        assert result.get_response().id == "seven"
        np.testing.assert_allclose(result.as_numpy("logits"), logits(x), rtol=1e-6)
        assert result.as_numpy("width").tolist() == [3] * 4
        assert result.as_numpy("joined").tolist() == JOINED
        wanted = [triton.InferRequestedOutput("joined"), triton.InferRequestedOutput("logits")]
        result = client.infer("m", inputs, outputs=wanted)
        assert [output.name for output in result.get_response().outputs] == ["joined", "logits"]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_stream_marks_the_final_response(inside: StartInside, wanted: bool) -> None:
    """On which clients of decoupled models wait."""
    inputs, _ = mixed_inputs()
    answers: SimpleQueue[Any] = SimpleQueue()
    with triton.InferenceServerClient(inside(Mixed()).target) as client:
        client.start_stream(lambda result, error: answers.put(error or result.get_response()))
        client.async_stream_infer("m", inputs, request_id="7", enable_empty_final_response=wanted)
        answer = answers.get(timeout=TIMEOUT_S)
        client.stop_stream()
    assert answer.id == "7"
    assert answer.parameters["triton_final_response"].bool_param is wanted


def test_statistics_count_calls_of_the_model(inside: StartInside) -> None:
    """As `edl register` and Triton's tools read them."""
    server = inside(Mixed())
    with triton.InferenceServerClient(server.target) as client:
        before = ForeignServer(server.target, "m", TIMEOUT_S).read_counts()
        for _ in range(2):
            client.infer("m", mixed_inputs()[0])
        (found,) = client.get_inference_statistics().model_stats
        after = ForeignServer(server.target, "m", TIMEOUT_S).read_counts()
        with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*'other'"):
            client.get_inference_statistics("other")
    assert {batch.batch_size: batch.compute_infer.count for batch in found.batch_stats}[4] == 2
    assert (before.rows, after.rows, found.inference_count) == (0, 8, 8)
    assert (after.compute_s or 0) > 0


@pytest.fixture
def region() -> Iterator[Any]:
    """Shared memory made by Triton's client library: its name, and a handle."""
    name = f"edl-test-{uuid.uuid4().hex}"
    handle = triton_shm.create_shared_memory_region(name, f"/{name}", 10_000)
    yield name, handle
    triton_shm.destroy_shared_memory_region(handle)


def test_system_shared_memory(inside: StartInside, region: Any) -> None:
    server = inside(Mixed())
    inputs, x = mixed_inputs()
    name, handle = region
    with triton.InferenceServerClient(server.target) as client:
        client.register_system_shared_memory(name, f"/{name}", 10_000)
        assert name in client.get_system_shared_memory_status(as_json=True)["regions"]
        triton_shm.set_shared_memory_region(handle, [x], offset=64)
        inputs[0].set_shared_memory(name, x.nbytes, offset=64)
        outputs = [triton.InferRequestedOutput(each) for each in ("logits", "width", "joined")]
        outputs[0].set_shared_memory(name, 4 * 5 * 4, offset=1000)
        outputs[2].set_shared_memory(name, 500, offset=2000)
        result = client.infer("m", inputs, outputs=outputs)
        assert result.as_numpy("width").tolist() == [3] * 4
        found = triton_shm.get_contents_as_numpy(handle, np.float32, (4, 5), offset=1000)
        np.testing.assert_allclose(found, logits(x), rtol=1e-6)
        joined = result.get_output("joined")
        assert joined.parameters["shared_memory_region"].string_param == name
        assert joined.parameters["shared_memory_byte_size"].int64_param == 4 * (4 + 5)
        assert triton_shm.get_contents_as_numpy(handle, np.object_, (4,), offset=2000).tolist() == JOINED
        del found
        outputs[0].set_shared_memory(name, 4 * 5 * 4 - 1, offset=1000)
        with pytest.raises(InferenceServerException, match="'logits' has 80 bytes"):
            client.infer("m", inputs, outputs=outputs)
        inputs[0].set_shared_memory(name, x.nbytes, offset=9_999)
        with pytest.raises(InferenceServerException, match="lie outside"):
            client.infer("m", inputs)
        os.truncate(f"/dev/shm/{name}", 0)
        inputs[0] = triton.InferInput("x", x.shape, "FP32")  # the old one would keep its offset
        inputs[0].set_shared_memory(name, x.nbytes)
        with pytest.raises(InferenceServerException, match="has shrunk to 0 bytes"):
            client.infer("m", inputs)
        client.unregister_system_shared_memory(name)
        with pytest.raises(InferenceServerException, match="is not registered"):
            client.infer("m", inputs)
        assert Path(f"/dev/shm/{name}").exists()  # the client's to delete


def test_shared_memory_can_be_turned_off(inside: StartInside, region: Any) -> None:
    with triton.InferenceServerClient(inside(Base(), shared_memory=False).target) as client:
        assert "system_shared_memory" not in client.get_server_metadata().extensions
        with pytest.raises(InferenceServerException, match="turned off"):
            client.register_system_shared_memory(region[0], f"/{region[0]}", 64)


def test_messages_of_any_size_up_to_the_limit(inside: StartInside) -> None:
    x = np.ones((500_000, 4), np.float32)  # 8 MB, beyond gRPC's usual limit
    inputs = [triton.InferInput("x", x.shape, "FP32").set_data_from_numpy(x)]
    with triton.InferenceServerClient(inside(Base(), max_queue_rows=len(x)).target) as client:
        assert client.infer("m", inputs).as_numpy("logits").shape == (500_000, 5)
    with (
        triton.InferenceServerClient(inside(Base(), max_message_bytes=100_000).target) as client,
        pytest.raises(InferenceServerException, match="RESOURCE_EXHAUSTED"),
    ):
        client.infer("m", inputs)


def test_compressed_requests_are_refused(inside: StartInside) -> None:
    """A few hundred bytes of it could become gigabytes."""
    x = np.ones((4, 4), np.float32)
    inputs = [triton.InferInput("x", x.shape, "FP32").set_data_from_numpy(x)]
    with triton.InferenceServerClient(inside(Base()).target) as client:
        for algorithm in ("gzip", "deflate"):
            with pytest.raises(InferenceServerException, match="takes no compressed messages: send them without"):
                client.infer("m", inputs, compression_algorithm=algorithm)
        client.infer("m", inputs)
