"""KServe v2 over HTTP, on the server's metrics port, for `curl` and for clients without gRPC.

An HTTP request is turned into the `ModelInferRequest` that a gRPC client would have sent, so the queue, limits and
checks are the same. Tensors are sent as JSON, or as raw bytes after the JSON
(https://github.com/kserve/open-inference-protocol, the binary tensor extension).

The metrics port has neither TLS nor tokens. So requests on this port are refused if the server has credentials,
or if more hosts can reach this port than the server's own. Students use gRPC, which is faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np

from edl import __version__
from edl.errors import ProtocolError
from edl.http_server.access import HostCheck
from edl.protocol import codec, kserve, names
from edl.protocol.codec import Buffer
from edl.protocol.tensors import dtype_of, from_raw, to_raw
from edl.protocol.transport import grpc
from edl.quoting import quote
from edl_serving.inference import Call, InferenceServicer
from edl_serving.request_error import RequestError, invalid_argument, not_found

_MOST_JSON: Final = 4 << 20
"""Maximum bytes of JSON in a request: as Python objects, they take 30 times the memory. Raw bytes may exceed this."""
_PATH: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(/ready|/infer)?")
_HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_HOSTS: Final = HostCheck(local=False)
_STATUS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: "400 Bad Request",
    grpc.StatusCode.PERMISSION_DENIED: "403 Forbidden",
    grpc.StatusCode.NOT_FOUND: "404 Not Found",
    grpc.StatusCode.UNIMPLEMENTED: "405 Method Not Allowed",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "429 Too Many Requests",
    grpc.StatusCode.UNAVAILABLE: "503 Service Unavailable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "504 Gateway Timeout",
}


class HttpApi:
    """A thread-safe WSGI application below `/v2`, whose requests `inference` answers on `loop`.

    If `refusal` is not empty, all requests except health checks are refused with this reason.
    """

    def __init__(
        self, inference: InferenceServicer, loop: asyncio.AbstractEventLoop, max_bytes: int, refusal: str
    ) -> None:
        self._inference = inference
        self._loop = loop
        self._max_bytes = max_bytes
        self._refusal = refusal

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, raw = "200 OK", list[Buffer]()
        try:
            answer, raw = self._answer(environ)
        except RequestError as error:
            status, answer = _STATUS.get(error.code, "500 Internal Server Error"), {"error": error.message}
        head = json.dumps(answer).encode() if answer is not None else b""
        headers = [("Cache-Control", "no-store"), ("Content-Length", str(len(head) + sum(map(len, raw))))]
        kind = "application/octet-stream" if raw else "application/json"
        headers += [("Content-Type", kind), *([(_HEADER_LENGTH, str(len(head)))] if raw else [])]
        start_response(status, headers)
        return [head, *map(bytes, raw)]

    def _answer(self, environ: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[Buffer]]:
        inference, path, method = self._inference, str(environ["PATH_INFO"]), environ["REQUEST_METHOD"]
        model = inference.model
        if path == "/v2/health/live":
            return None, []
        if path == "/v2/health/ready":
            return self._check_ready()
        if self._refusal:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, self._refusal, reason="http")
        if "HTTP_ORIGIN" in environ or not _HOSTS.allows(environ.get("HTTP_HOST")):  # a page's, or under its own name
            words = "requests from web pages, or under names other than localhost and this host's, are refused"
            raise RequestError(grpc.StatusCode.PERMISSION_DENIED, f"{words}: use an IP address", reason="http")
        if path in ("/v2", "/v2/"):
            extensions = [*model.extensions(), "binary_tensor_data"]
            return {"name": "edl", "version": __version__, "extensions": extensions}, []
        found = _PATH.fullmatch(path)
        if found is None:
            raise not_found(f"no path {quote(path)}: try /v2/models/{model.name}/infer")
        name, version, what = found[1], found[2] or "", found[3]
        model.check_request(name, version)
        if what == "/ready":
            return self._check_ready()
        if what is None:
            metadata = model.metadata()
            tensors = {
                kind: [{"name": item.name, "datatype": item.datatype, "shape": list(item.shape)} for item in specs]
                for kind, specs in (("inputs", metadata.inputs), ("outputs", metadata.outputs))
            }
            versions = list(metadata.versions)
            return {"name": model.name, "versions": versions, "platform": model.platform, **tensors}, []
        if method != "POST":
            raise RequestError(grpc.StatusCode.UNIMPLEMENTED, f"{method} of {path}: use POST", reason="http")
        fields, data = self._read(environ)
        try:
            header, sent, as_bytes = _as_message(fields, data, name, version)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, ProtocolError) as exc:
            raise invalid_argument(f"not a valid KServe request: {type(exc).__name__}: {exc}") from exc
        client = f"http:{environ.get('REMOTE_ADDR')}"
        asked = self._infer(client, header, sent, len(header) + len(data))
        answer = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        if isinstance(answer, RequestError):
            raise answer
        return _as_fields(answer, as_bytes)

    def _check_ready(self) -> tuple[None, list[Buffer]]:
        if not self._inference.lifecycle.ready:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, f"not ready: {self._inference.lifecycle.state.value}")
        return None, []

    def _read(self, environ: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        if environ.get("HTTP_CONTENT_ENCODING", "identity") != "identity":
            raise invalid_argument("compressed bodies are not accepted: send the body without Content-Encoding")
        if "HTTP_TRANSFER_ENCODING" in environ:
            raise invalid_argument("chunked bodies are not accepted: send Content-Length in place of Transfer-Encoding")
        try:
            length = int(environ.get("CONTENT_LENGTH") or "")
            head = int(environ.get("HTTP_INFERENCE_HEADER_CONTENT_LENGTH") or length)
        except ValueError:
            raise invalid_argument(f"Content-Length and {_HEADER_LENGTH}: expected numbers") from None
        if not 0 <= head <= length:
            raise invalid_argument(f"{_HEADER_LENGTH} is {head:,}, and Content-Length {length:,}")
        if length > self._max_bytes:
            raise invalid_argument(f"{length:,} bytes exceed {self._max_bytes:,} (edl serve --max-message)")
        try:
            body = environ["wsgi.input"].read(length)
        except OSError as exc:  # the client disconnected, or is silent
            raise invalid_argument(f"the body did not arrive: {exc}") from exc
        if len(body) < length:
            raise invalid_argument(f"{len(body):,} bytes arrived, but Content-Length is {length:,}")
        if head > _MOST_JSON:
            words = "send large tensors after the JSON, as raw bytes"
            raise invalid_argument(f"{head:,} bytes of JSON, but at most {_MOST_JSON:,}: {words}")
        try:
            fields = json.loads(body[:head])
        except (ValueError, RecursionError) as exc:
            raise invalid_argument(f"the body is not JSON: {exc}") from exc
        if not isinstance(fields, dict):
            raise invalid_argument("the body is not a JSON object")
        return fields, body[head:]

    async def _infer(self, name: str, header: bytes, raw: list[memoryview], nbytes: int) -> bytes | RequestError:
        """Compute a request on the event loop, with the limits that apply to a call over gRPC."""
        inference, call = self._inference, Call(name, "", None)
        with contextlib.ExitStack() as stack:
            try:
                inference.admit(call, nbytes, stack.callback)
            except RequestError as error:
                inference.record_error(error, call, "", nbytes)
                return error.copy()
            return await inference.answer(call, header, raw, nbytes, "", None, codec.RESPONSE.join)


def _as_message(
    fields: Mapping[str, Any], data: bytes, name: str, version: str
) -> tuple[bytes, list[memoryview], Callable[[str], bool]]:
    """Return the header and tensors of a `ModelInferRequest`, and whether an output is wanted as raw bytes."""
    message = kserve.ModelInferRequest(model_name=name, model_version=version, id=fields.get("id", ""))
    given = dict(fields.get("parameters", {}))
    default, wanted = given.pop("binary_data_output", False), dict[str, bool]()
    _set_parameters(message, given)
    raw, at = list[memoryview](), 0
    for item in fields["inputs"]:
        parameters = dict(item.get("parameters", {}))
        nbytes = parameters.pop("binary_data_size", None)
        if any(type(size) is not int or size < 0 for size in item["shape"]):
            raise ValueError(
                f"input {quote(item['name'])} has the shape {quote(item['shape'])}: expected whole numbers"
            )
        tensor = message.inputs.add(name=item["name"], datatype=item["datatype"], shape=item["shape"])
        _set_parameters(tensor, parameters)
        if nbytes is not None:
            if type(nbytes) is not int or not 0 <= nbytes <= len(data) - at:
                raise ValueError(
                    f"binary_data_size={nbytes!r} of {item['name']!r}: expected 0 to {len(data) - at}, the bytes left"
                )
            raw.append(memoryview(data)[at : at + nbytes])
            at += nbytes
        elif names.SHM_REGION not in parameters:  # which is refused with the reason that gRPC gives
            raw.append(memoryview(to_raw(_array_of(item))))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes after the last tensor")
    for item in fields.get("outputs", []):
        parameters = dict(item.get("parameters", {}))
        if parameters.pop("classification", 0):
            raise ValueError("classification is not supported: request the output itself, or edl_top_k")
        wanted[item["name"]] = parameters.pop("binary_data", default)
        _set_parameters(message.outputs.add(name=item["name"]), parameters)
    return message.SerializeToString(), raw, lambda output: bool(wanted.get(output, default))


def _array_of(item: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return a tensor that was sent as JSON, flat or nested; raise ValueError for numbers that its type cannot hold."""
    kind, data = item["datatype"], item["data"]
    if kind == "BYTES":
        return np.array(data, object).reshape(-1)
    array, dtype = np.array(data).reshape(-1), dtype_of(kind)
    fits = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[dtype.kind]
    if kind == "BF16":
        raise ValueError(f"input {quote(item['name'])}: BF16 is accepted only as raw bytes (binary_data_size)")
    if array.size and (array.dtype.kind not in fits or (kind != "BOOL" and _has_booleans(data))):
        raise ValueError(f"input {quote(item['name'])}: not all of its data are {kind}")
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if (cast != array).any() if dtype.kind in "iu" else dtype.kind == "f" and not np.isfinite(cast).all():
        raise ValueError(f"input {quote(item['name'])} has values that {kind} cannot hold")
    return cast


def _has_booleans(data: Any) -> bool:
    """Return whether a tensor's numbers include booleans, which numpy would turn into 0 and 1."""
    return any(map(_has_booleans, data)) if isinstance(data, list) else isinstance(data, bool)


def _set_parameters(message: Any, given: Mapping[str, Any]) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in given.items():
        setattr(message.parameters[name], kinds[type(value)], value)


def _as_fields(answer: bytes, as_bytes: Callable[[str], bool]) -> tuple[dict[str, Any], list[Buffer]]:
    """Return a `ModelInferResponse` as JSON, and the tensors to send after the JSON."""
    header, raw = codec.RESPONSE.split(answer)
    message = kserve.ModelInferResponse.FromString(header)
    outputs, behind = list[dict[str, Any]](), list[Buffer]()
    for tensor, data in zip(message.outputs, raw, strict=True):
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if as_bytes(tensor.name):
            output["parameters"] = {"binary_data_size": len(data)}
            behind.append(data)
        else:
            array = from_raw(tensor.datatype, tuple(tensor.shape), data).reshape(-1)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise invalid_argument(f"output {tensor.name!r} has values that JSON cannot hold: ask for binary_data")
            try:
                output["data"] = [item.decode() if isinstance(item, bytes) else item for item in array.tolist()]
            except UnicodeDecodeError:
                words = f"output {tensor.name!r} has bytes that are not text: ask for binary_data"
                raise invalid_argument(words) from None
        outputs.append(output)
    found = {"model_name": message.model_name, "model_version": message.model_version, "outputs": outputs}
    return {**found, **({"id": message.id} if message.id else {})}, behind
