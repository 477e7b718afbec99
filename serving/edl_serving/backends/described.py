"""What the backends share: a model whose inputs and outputs are said by the user, its files, a sample, or itself."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import numpy as np

from edl.errors import SettingsError
from edl_serving.backends.backend import Array, Backend, TensorSpec
from edl_serving.backends.specs import cast, complete_outputs, parse_specs, pick, spec_of

__all__ = ["DescribedBackend"]


class DescribedBackend(Backend):
    """A backend around `_ask`, which calls the model and returns all that it answers, by its own names.

    A subclass calls `_describe` at the end of its constructor, when `_ask` works.
    """

    _inputs: tuple[TensorSpec, ...] = ()
    _outputs: tuple[TensorSpec, ...] = ()
    _sample: Mapping[str, Array] | None = None

    def __init__(self, version: str, platform: str) -> None:
        self._version = version
        self._platform = platform

    def _describe(
        self,
        inputs: Sequence[str | TensorSpec],
        outputs: Sequence[str | TensorSpec],
        sample: Mapping[str, Array] | None,
        unknown: str,
    ) -> None:
        """Settle the specs.

        Args:
            inputs: tensors as text or `TensorSpec`; empty for those of the sample.
            outputs: likewise, or names alone; empty for all that the model answers.
            sample: a batch of each input: what the model is called with to find its outputs and to warm up, instead
                of zeros.
            unknown: says what to do if neither inputs nor sample are given.

        Raises:
            SettingsError: they cannot be used.
            Exception: whatever the model raised when it was called to find its outputs.
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
            self._sample = {spec.name: cast(spec, sample[spec.name]) for spec in self._inputs}
        self._outputs = complete_outputs(outputs, self._ask, self._inputs, self._sample)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._outputs

    @property
    def version(self) -> str:
        return self._version or self.version_if_unnamed

    @property
    def names_its_version(self) -> bool:
        return bool(self._version)

    @property
    def platform(self) -> str:
        return self._platform

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        answers = pick(self._ask(inputs), [spec.name for spec in self._outputs])
        return {spec.name: cast(spec, answers[spec.name]) for spec in self._outputs}

    def sample(self, rows: int) -> Mapping[str, Array]:
        if self._sample is None:
            return super().sample(rows)
        return {name: array[np.arange(rows) % len(array)] for name, array in self._sample.items()}

    @property
    def _sample_is_made_up(self) -> bool:
        return self._sample is None

    @abc.abstractmethod
    def _ask(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """All that the model answers to a batch."""
