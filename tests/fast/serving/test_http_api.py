"""KServe v2 over HTTP on the metrics port: `curl`'s JSON, tritonclient's bytes, and what is refused."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

from edl.settings import Credentials
from tests.fast.serving.conftest import TIMEOUT_S, Inside, StartInside
from tests.fast.serving.fakes import Base, Mixed

DATA = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]


@pytest.fixture
def server(inside: StartInside) -> Inside:
    return inside(Base(), metrics_port=0)


def ask(server: Inside, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.server.metrics_port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]


def tensor(**changed: Any) -> dict[str, Any]:
    return {"id": "7", "inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": DATA, **changed}]}


def test_json(server: Inside) -> None:
    assert ask(server, "/v2/health/live") == ask(server, "/v2/health/ready") == (200, None)
    assert ask(server, "/v2/models/m/ready") == (200, None)
    assert "binary_tensor_data" in ask(server, "/v2")[1]["extensions"]
    assert ask(server, "/v2/models/m")[1]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    status, answer = ask(server, "/v2/models/m/infer", tensor())
    output = {"name": "logits", "datatype": "FP32", "shape": [2, 5], "data": [*range(10, 15), *range(26, 31)]}
    assert (status, answer["id"], answer["outputs"]) == (200, "7", [output])
    assert ask(server, "/v2/models/m/infer", tensor(data=[*DATA[0], *DATA[1]]))[1] == answer


def test_text_and_bytes(inside: StartInside) -> None:
    server = inside(Mixed(), metrics_port=0)
    words = {"name": "words", "datatype": "BYTES", "shape": [1, 2], "data": ["é", "b"]}
    body = {"inputs": [*tensor(shape=[1, 2], data=[1, 2])["inputs"], words], "outputs": [{"name": "joined"}]}
    assert ask(server, "/v2/models/m/infer", body)[1]["outputs"][0]["data"] == ["é b"]
    words["data"] = [1, 2]
    assert ask(server, "/v2/models/m/infer", body)[0] == 400


def test_triton_client(server: Inside) -> None:
    pytest.importorskip("geventhttpclient", reason="tritonclient[http] is not installed")
    import tritonclient.http as triton

    with triton.InferenceServerClient(f"127.0.0.1:{server.server.metrics_port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("m")
        assert client.get_server_metadata()["name"] == "edl"
        assert client.get_model_metadata("m")["outputs"][0]["name"] == "logits"
        for binary in (True, False):
            given = triton.InferInput("x", [2, 4], "FP32")
            given.set_data_from_numpy(np.array(DATA, np.float32), binary_data=binary)
            for wanted in (None, [triton.InferRequestedOutput("logits", binary_data=binary)]):
                answer = client.infer("m", [given], outputs=wanted, request_id="7")
                assert answer.as_numpy("logits")[:, 0].tolist() == [10.0, 26.0]
                assert answer.get_response()["id"] == "7"


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (tensor(datatype="INT32"), {}, 400, "not all of its data are INT32"),
        (tensor(data=[1e40] * 8), {}, 400, "FP32 cannot hold"),
        (tensor(data=[1.0, True] * 4), {}, 400, "not all of its data are FP32"),
        (tensor(shape=[3, 4]), {}, 400, "takes 48 bytes"),
        (tensor(name="z"), {}, 400, "'z'"),
        (tensor(parameters={"binary_data_size": 32}), {}, 400, "expected 0 to 0, the bytes left"),
        (tensor(data=[[1], [1, 2]]), {}, 400, "not a valid KServe request"),
        ({}, {}, 400, "inputs"),
        (b"{", {}, 400, "not JSON"),
        (tensor(parameters={"binary_data_size": "0"}), {}, 400, "binary_data_size='0'"),
        (tensor(), {"Inference-Header-Content-Length": "9" * 9}, 400, "is 999,999,999, and Content-Length"),
        (b" " * (5 << 20), {}, 400, "at most 4,194,304"),
        (tensor(), {"Origin": "http://evil.example"}, 403, "web pages"),
        (tensor(), {"Host": "rebound.example"}, 403, "names other than localhost"),
        (tensor(), {"Content-Encoding": "gzip"}, 400, "Content-Encoding"),
    ],
)
def test_refusals(server: Inside, body: Any, headers: dict[str, str], status: int, words: str) -> None:
    found, error = ask(server, "/v2/models/m/infer", body, **headers)
    assert (found, words in error) == (status, True), error


def test_chunked_bodies_are_refused(server: Inside) -> None:
    """By the head alone, without the body, which a client could not finish to send."""
    port = server.server.metrics_port
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        connection.putrequest("POST", "/v2/models/m/infer")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        answer = connection.getresponse()
        assert (answer.status, b"chunked bodies are not accepted" in answer.read()) == (400, True)


def test_unreadable_requests_get_json(server: Inside) -> None:
    long = "x" * 70_000
    for path, header, expected, words in ((f"/{long}", "", 414, "URI Too Long"), ("/v2", long, 431, "too long")):
        status, error = ask(server, path, X=header)
        assert (status, words in error) == (expected, True), error


def test_other_paths(server: Inside) -> None:
    assert ask(server, "/v2/models/dogs")[0] == 404
    assert ask(server, "/v2/models/m/versions/9/infer", tensor())[0] == 404
    assert ask(server, "/v2/models/m/infer")[0] == 405
    assert ask(server, "/v2", Host="192.0.2.7:8002")[0] == 200, "an address cannot be rebound, as a name can"


def test_no_requests_beside_tokens(inside: StartInside, tmp_path: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\n")
    tokens.chmod(0o600)
    server = inside(Base(), metrics_port=0, credentials=Credentials(token_file=str(tokens)))
    assert ask(server, "/v2/health/ready")[0] == 200
    status, error = ask(server, "/v2/models/m/infer", tensor())
    assert (status, "use gRPC" in error) == (503, True)
