"""Converts a teacher's answers to labels, and checks model, version, names, types, shapes and NaN."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from edl.distill.compress import TopK, to_float16, top_k
from edl.distill.dispatch.actions import FailureKind
from edl.distill.transport.calls import RequestFailed
from edl.distill.transport.channel import Body
from edl.distill.transport.probe import ServerModel, is_name
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import OutputSpec, Reply, kserve_datatype
from edl.errors import ProtocolError, SettingsError
from edl.protocol import codec, kserve, names, tensors
from edl.protocol.tensors import Array
from edl.quoting import listed, quote

_MOST_HEADERS = 64
"""Headers of answers that are known by their bytes: requests of one shape have one; more would only hold memory."""
_LONGEST_HEADER = 4096  # bytes of a header that is worth remembering
_FLOATING = ("FP16", "FP32", "FP64", "BF16")  # what `dtype` is about


class ReplyReader:
    """Reads the answers on one connection. Each method raises `RequestFailed` for an answer that cannot be used."""

    def __init__(self, endpoint: str, output_spec: OutputSpec, server: ServerModel) -> None:
        self.spec = server.spec  # with the version that the last answer named, where any is taken
        self._endpoint = endpoint
        self._output_spec = output_spec
        self._server = server
        self._checks_nan = names.EXTENSION_NO_NAN not in server.extensions
        self._headers: dict[bytes, tuple[str, list[tuple[str, str, tuple[int, ...]]]]] = {}

    def read(self, answer: Body, payload: Payload) -> Reply:
        """Return the outputs of a request's rows, and their version."""
        try:
            version, arrays = self._arrays(*answer)
            sent = payload.rows + payload.padding
            outputs = {name: self._output(name, arrays, sent) for name in self._output_spec.outputs}
            if payload.padding:
                outputs = {name: output[: payload.rows] for name, output in outputs.items()}
            return Reply(outputs, version)
        except (ProtocolError, SettingsError) as exc:  # SettingsError: arrays that are no top-k labels
            raise RequestFailed(FailureKind.BAD_OUTPUT, f"{self._endpoint}: {exc}") from exc

    def unusable(self, what: str) -> RequestFailed:
        """Return the error for an answer that cannot be used."""
        return RequestFailed(FailureKind.BAD_OUTPUT, f"{self._endpoint} (model {self.spec.name!r}): {what}")

    def rows_hint(self, rows: int) -> str:
        """Return what to do if a request had more rows than a foreign server takes, which need not say how many."""
        if self._server.is_edl or rows < 2:
            return ""
        return f"; if the model takes fewer than {rows} rows, say so with set_teacher_batch_size (batch_rows=)"

    def _arrays(self, header: bytes, raw: list[memoryview]) -> tuple[str, dict[str, Array]]:
        known = self._headers.get(header)
        if known is None:
            message = codec.parse_response(header)
            self._check_model(message.model_name)
            version = self._version(message.model_version)
            self._check_outputs(message.outputs)
            if not raw:
                return version, {
                    tensor.name: tensors.from_contents(tensor.datatype, tensor.shape, tensor.contents)
                    for tensor in message.outputs
                }
            specs = [(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in message.outputs]
            if len(self._headers) >= _MOST_HEADERS or len(header) > _LONGEST_HEADER:
                self._headers.clear()
            known = self._headers[header] = version, specs  # answers to requests of one shape have one header
        version, specs = known
        if version and version != self.spec.version:
            self._version(version)  # a server that went back to a version that it had before
        if len(raw) != len(specs):
            raise ProtocolError(f"{len(specs)} outputs with {len(raw)} raw contents")
        return version, {
            name: tensors.from_raw(datatype, shape, data)
            for (name, datatype, shape), data in zip(specs, raw, strict=True)
        }

    def _check_model(self, named: str) -> None:
        """Check that an answer is of the model that is asked for; some servers do not say."""
        if not named or named == self.spec.name:
            return
        what = f"it answers for model {quote(named)}, and {self.spec.name!r} is asked for"
        if self._server.is_edl:  # another server has taken the address: a new connection tells what it has
            raise RequestFailed(FailureKind.LOST, f"{self._endpoint}: {what}")
        raise self.unusable(what)

    def _check_outputs(self, outputs: Iterable[kserve.ModelInferResponse.InferOutputTensor]) -> None:
        """Check that outputs differ in name, and are of the types that the model's metadata say."""
        found: set[str] = set()
        for tensor in outputs:
            if tensor.name in found:
                raise self.unusable(f"output {quote(tensor.name)} is in its answer twice")
            found.add(tensor.name)
            spec = self.spec.outputs.get(tensor.name)
            if spec is not None and spec.datatype and tensor.datatype not in self._datatypes(spec.datatype):
                raise self.unusable(f"output {tensor.name!r} is {quote(tensor.datatype)}, not {spec.datatype!r}")

    def _datatypes(self, described: str) -> tuple[str, ...]:
        """Return the datatypes that an output may have whose metadata say `described`: `dtype` asks for another."""
        if self._output_spec.dtype is None or described not in _FLOATING:
            return (described,)
        return described, kserve_datatype(self._output_spec.dtype)

    def _version(self, named: str) -> str:
        """Return the version that an answer is of, by the version that it names; empty if that cannot be known.

        gRPC connects again by itself, perhaps to a server that took the address of the former; and a foreign server may
        load another version while it serves, or have several. Our own say the same here as in their metadata.
        """
        asked, expected = self._output_spec.version, self.spec.version
        unnamed = not named and not self.spec.versions and bool(asked)  # `version=` stands for it
        if self._server.is_edl and named != expected and not unnamed:
            what = f"{self._endpoint} has version {named!r} of its model now, and had {expected!r}"
            raise RequestFailed(FailureKind.LOST, what)
        if asked:
            if named != expected and (named or self._server.version_required):
                what = f"it answers with version {named!r}" if named else "its answer names no version, of several"
                raise self.unusable(f"{what}, and version={expected!r} is asked for")
            return expected
        if not named:
            return expected if len(self.spec.versions) == 1 else ""
        if named != expected:
            if not is_name(named):
                raise self.unusable(f"it answers with version {quote(named)}, which is none")
            self.spec = replace(self.spec, version=named)
        return named

    def _output(self, name: str, found: dict[str, Array], rows: int) -> Array | TopK:
        k = self._output_spec.top_k
        if k is None:
            return self._checked(name, found, rows)
        ids_name, values_name, tail_name = names.top_k_names(name)
        if ids_name not in found:
            whole = self._checked(name, found, rows)
            if self.spec.max_top_k:  # which sends whole what is no distribution over classes
                return whole
            # The server knows nothing of top-k: do it here.
            return top_k(whole, min(k, whole.shape[-1]), self._output_spec.temperature)
        width = self.spec.outputs[name].shape[-1] if name in self.spec.outputs else -1
        return TopK(
            ids=self._checked(ids_name, found, rows),
            values=self._checked(values_name, found, rows),
            tail_lse=self._checked(tail_name, found, rows),
            temperature=self._output_spec.temperature,
            classes=width if width > 0 else None,
        )

    def _checked(self, name: str, found: dict[str, Array], rows: int) -> Array:
        array = found.get(name)
        if array is None:
            raise self.unusable(f"no output {name!r}, only {listed(found) or 'none'}")
        if array.ndim == 0 or array.shape[0] != rows:
            raise self.unusable(f"output {name!r} has shape {list(array.shape)} for {rows} rows{self.rows_hint(rows)}")
        spec = self.spec.outputs.get(name)
        if spec is not None and not spec.fits(array.shape[1:]):
            raise self.unusable(f"output {name!r} has rows of shape {list(array.shape[1:])}, not {list(spec.shape)}")
        if array.dtype.kind == "f":
            # `min` propagates NaN, and takes half the time of checking each value.
            if self._checks_nan and array.size and np.isnan(array.min()):
                row = int(np.argwhere(np.isnan(array))[0][0])
                raise self.unusable(f"output {name!r} is NaN in row {row} of {rows}")
            dtype = self._output_spec.dtype
            if dtype is not None and array.dtype != dtype and name not in self._server.uncast_outputs:
                array = to_float16(array) if dtype == "float16" else array.astype(dtype)
        return array
