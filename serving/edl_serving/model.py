"""The served model's metadata and configuration, as the server reports them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edl.errors import SettingsError
from edl.protocol import kserve, names
from edl.quoting import quote
from edl_serving.backends.backend import Backend, TensorSpec
from edl_serving.backends.source import WeightsVersion
from edl_serving.request_error import invalid_argument, not_found
from edl_serving.settings import ServerSettings

_SHARED = (
    *("version", "inputs", "outputs", "max_top_k", "sequence_input", "max_sequence"),
    *("optional_outputs", "instance_meta"),
)
"""Attributes in which all instances of a model must agree."""


class ServedModel:
    """What all instances of the served model share; `top_k_outputs` is empty if the model computes whole outputs."""

    def __init__(self, settings: ServerSettings, backends: Sequence[Backend]) -> None:
        if not backends:
            raise SettingsError("a server needs at least one backend")
        first = backends[0]
        self.name = settings.model
        self.version = first.version
        self.platform = first.platform
        self.inputs = tuple(first.inputs)
        self.outputs = tuple(first.outputs)
        for other in backends[1:]:
            if any(getattr(other, name) != getattr(first, name) for name in _SHARED):
                raise SettingsError(f"the backends of model {self.name!r} differ in version, inputs or outputs")
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            if not specs:
                raise SettingsError(f"model {self.name!r} has no {kind}s")
            if len({spec.name for spec in specs}) < len(specs):
                raise SettingsError(f"model {self.name!r} has two {kind}s with the same name")
        for spec in self.outputs:
            if spec.datatype == "BF16":
                raise SettingsError(f"output {spec.name!r} is BF16: declare it as FP32 and let students ask for FP16")
        self.max_message_bytes = settings.max_message_bytes
        self.max_batch_rows = settings.max_batch_rows
        self.max_top_k = first.max_top_k
        self.top_k_outputs = first.top_k_outputs if first.max_top_k is not None else frozenset[str]()
        self.optional_outputs = dict(first.optional_outputs)
        # Students sum these values, and rounding could make them larger than the remaining probability.
        self.uncast_outputs = frozenset(self.optional_outputs if first.max_top_k is not None else ())
        self.instance_meta = dict(first.instance_meta)
        self.check_inputs = first.check_inputs
        self.checks_inputs = type(first).check_inputs is not Backend.check_inputs
        self.sequence_input = first.sequence_input
        self.max_sequence = min(first.max_sequence or settings.max_batch_rows, settings.max_batch_rows)
        self._settings = settings
        if self.sequence_input is not None and TensorSpec(self.sequence_input, "INT32") not in self.inputs:
            raise SettingsError(
                f"model {self.name!r} has no input {self.sequence_input!r} of INT32, one number per row"
            )

    def inputs_of(self, sent: Collection[str]) -> tuple[TensorSpec, ...]:
        optional = {*self.optional_outputs.values()} - {*sent}
        return tuple([spec for spec in self.inputs if spec.name not in optional])

    def outputs_of(self, sent: Collection[str]) -> tuple[TensorSpec, ...]:
        missing = {name for name, needed in self.optional_outputs.items() if needed not in sent}
        return tuple([spec for spec in self.outputs if spec.name not in missing])

    def check_request(self, name: str, version: str) -> None:
        """Refuse a request for another model or version with NOT_FOUND, as Triton does: other servers may have it."""
        if not name:  # an invalid request, whichever server gets it
            raise invalid_argument(f"the request names no model: this server has {self.name!r}")
        if name != self.name:
            raise not_found(f"unknown model {quote(name)}: this server has {self.name!r}")
        if version not in ("", self.version):
            only = f"only {self.version!r}" if self.version else "because its version is unknown"
            raise not_found(f"model {self.name!r} has no version {quote(version)}, {only}")

    def metadata(self) -> kserve.ModelMetadataResponse:
        """Return the model's metadata; shapes include the batch dimension, as in KServe."""
        answer = kserve.ModelMetadataResponse(
            name=self.name, versions=[self.version] if self.version else [], platform=self.platform
        )
        for specs, field in ((self.inputs_of(()), answer.inputs), (self.outputs_of(()), answer.outputs)):
            for spec in specs:
                field.add(name=spec.name, datatype=spec.datatype, shape=[-1, *spec.shape])
        return answer

    def config(self) -> kserve.ModelConfigResponse:
        """Return Triton's model configuration as far as it applies here; `dims` omits the batch dimension."""
        config = kserve.ModelConfig(
            name=self.name,
            platform=self.platform,
            backend=self.platform,
            max_batch_size=self._settings.max_batch_rows,
        )
        for spec in self.inputs_of(()):
            config.input.add(name=spec.name, data_type=_type_of(spec), dims=spec.shape)
        for spec in self.outputs_of(()):
            config.output.add(name=spec.name, data_type=_type_of(spec), dims=spec.shape)
        config.dynamic_batching.max_queue_delay_microseconds = round(self._settings.max_delay_s * 1e6)
        config.parameters[names.MAX_ROWS].string_value = str(self._settings.max_queue_rows)
        config.parameters[names.MAX_BYTES].string_value = str(self._settings.max_message_bytes)
        if self.sequence_input is not None:
            config.parameters[names.SEQUENCES].string_value = self.sequence_input
            config.parameters[names.MAX_SEQUENCE].string_value = str(self.max_sequence)
        if self.max_top_k is not None:
            config.parameters[names.MAX_TOP_K].string_value = str(self.max_top_k)
        if self.optional_outputs:
            optional = ",".join(sorted({*self.optional_outputs.values()}))
            config.parameters[names.OPTIONAL_INPUTS].string_value = optional
        if isinstance(self.version, WeightsVersion):
            config.parameters[names.WEIGHTS_VERSION].string_value = self.version
        if names.TOKENIZER_META in self.instance_meta:
            config.parameters[names.TOKENIZER].string_value = self.instance_meta[names.TOKENIZER_META]
        return kserve.ModelConfigResponse(config=config)

    def extensions(self) -> list[str]:
        offered = ["model_configuration", names.TOP_K, names.DTYPE]
        if self._settings.tensor_channel:
            offered.append(names.EXTENSION_CHANNEL)
        if self._settings.check_nan:
            offered.append(names.EXTENSION_NO_NAN)
        if self._settings.shared_memory:
            offered.append(names.EXTENSION_SHARED_MEMORY)
        return offered


def _type_of(spec: TensorSpec) -> kserve.DataType:
    name = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    value: kserve.DataType = getattr(kserve, name)
    return value
