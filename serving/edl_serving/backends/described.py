"""The common part of the backends: specs of inputs and outputs, from the user, files, a sample, or the model."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import numpy as np

from edl.errors import SettingsError
from edl_serving.backends.backend import Array, Backend, TensorSpec
from edl_serving.backends.specs import cast_to_spec, complete_outputs, parse_specs, select_outputs, spec_of

__all__ = ["DescribedBackend"]


class DescribedBackend(Backend):
    """A backend around `_run_model`, which calls the model and returns all outputs, by the model's own names.

    A subclass calls `_resolve_specs` at the end of its constructor, when `_run_model` works.

    Args:
        version: empty if unknown.
        platform: as `ModelMetadata` calls it.
    """

    _inputs: tuple[TensorSpec, ...] = ()
    _outputs: tuple[TensorSpec, ...] = ()
    _sample: Mapping[str, Array] | None = None

    def __init__(self, version: str, platform: str) -> None:
        self._version = version
        self._platform = platform

    def _resolve_specs(
        self,
        inputs: Sequence[str | TensorSpec],
        outputs: Sequence[str | TensorSpec],
        sample: Mapping[str, Array] | None,
        unknown: str,
    ) -> None:
        """Set the specs of inputs and outputs.

        Args:
            inputs: tensors as text or `TensorSpec`; empty for those of the sample.
            outputs: likewise, or names alone; empty for all that the model answers.
            sample: a batch of the inputs: what the model is called with to find its outputs and to warm up, instead of
                zeros.
            unknown: says what to do if neither inputs nor sample are given.

        Raises:
            SettingsError: they cannot be used.
            Exception: what the model raised when it was called to find its outputs.
        """
        self._inputs = parse_specs(inputs)
        if sample and not self._inputs:
            self._inputs = tuple(spec_of(name, array) for name, array in sample.items())
        if not self._inputs:
            raise SettingsError(unknown)
        if sample:
            missing = [spec.name for spec in self._inputs if spec.name not in sample]
            if missing:
                raise SettingsError(f"--sample has {', '.join(sample)}, and no {missing[0]!r}")
            self._sample = {spec.name: cast_to_spec(spec, sample[spec.name]) for spec in self._inputs}
        self._outputs = complete_outputs(outputs, self._run_model, self._inputs, self._sample)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs, as resolved."""
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs, as resolved."""
        return self._outputs

    @property
    def version(self) -> str:
        """The version that was given, or else `version_if_unnamed`."""
        return self._version or self.version_if_unnamed

    @property
    def names_its_version(self) -> bool:
        """Whether a version was given."""
        return bool(self._version)

    @property
    def platform(self) -> str:
        """The platform that was given."""
        return self._platform

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs, cast to their specs."""
        answers = select_outputs(self._run_model(inputs), [spec.name for spec in self._outputs])
        return {spec.name: cast_to_spec(spec, answers[spec.name]) for spec in self._outputs}

    def sample(self, rows: int) -> Mapping[str, Array]:
        """Return rows of the sample, over and over; zeros without a sample."""
        if self._sample is None:
            return super().sample(rows)
        return {name: array[np.arange(rows) % len(array)] for name, array in self._sample.items()}

    @property
    def _sample_is_made_up(self) -> bool:
        return self._sample is None

    @abc.abstractmethod
    def _run_model(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return all outputs of the model for a batch, by the model's names."""
