"""The soft-label cache as a reader uses it: under which key labels are looked up before teachers are asked."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edl.distill.cache import CacheKey, CacheView, Found, SequenceIds, SoftLabelCache, fingerprints_of
from edl.distill.source.chunk import Chunk
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec
from edl.errors import NoTeacherError, SettingsError
from edl.protocol.names import POSITION
from edl.protocol.tensors import Array

__all__ = ["CacheConfig", "CacheKeyTemplate", "CacheMiss", "chunk_ids", "look_up_offline", "offline_view", "open_view"]


logger = logging.getLogger("edl.distill")


@dataclass(frozen=True)
class CacheConfig:
    """Which cache, and what its ids mean.

    Attributes:
        dataset: tells data sets, their versions and augmentations apart; see `CacheKey`.
    """

    cache: SoftLabelCache
    dataset: str = ""


@dataclass(frozen=True)
class CacheKeyTemplate:
    """Key of a service's labels, but for the model's version.

    Attributes:
        output_spec: what is asked for.
        dataset: see `CacheKey`.
        service: see `CacheKey`.
        inputs: names of all inputs that may be sent.
        weights_versions: versions that are hashes of the weights, as teachers of the service have said.
    """

    output_spec: OutputSpec
    dataset: str
    service: str
    inputs: tuple[str, ...] = ()
    weights_versions: Collection[str] = ()

    def key(self, spec: ModelSpec, version: str) -> CacheKey:
        """Return the key of the labels of a version of the model."""
        of_weights = version == spec.weights_version or version in self.weights_versions
        return CacheKey(
            model=spec.name,
            version=version,
            outputs=self.output_spec.outputs,
            top_k=self.output_spec.top_k,
            temperature=self.output_spec.temperature,
            dtype=self.output_spec.dtype,
            dataset=self.dataset,
            service="" if of_weights else self.service,
            inputs=() if spec.inputs else self.inputs,
        )


def open_view(cache: SoftLabelCache, key: CacheKey, own: Collection[str]) -> CacheView:
    """Return the rows of a key. If there are none yet, warn of labels of the same model from another service.

    Args:
        cache: to look in.
        key: of the rows.
        own: the services of the ensemble, whose labels lie side by side as they should.
    """
    there = cache.keys()
    beside = [other for other in there if replace(other, service=key.service) == key and other.service not in own]
    if beside and key not in there:
        logger.warning(
            "soft-label cache %s: labels of model %r version %r that were kept for %s are not used for %r: the same "
            "version of another service may be another model",
            cache.path or "in memory",
            key.model,
            key.version,
            " and ".join(repr(other.service) if other.service else "a service not named" for other in beside),
            key.service,
        )
    return cache.view(key)


def offline_view(cache_config: CacheConfig, output_spec: OutputSpec) -> CacheView:
    """Return the only rows in the cache that fit what is asked, for a student without teachers.

    Without a dtype in `output_spec` any fits; but labels that teachers would be asked for in the same words go first.

    Raises:
        SettingsError: there are none, or labels of several models or versions.
    """
    fitting = [
        key
        for key in cache_config.cache.keys()  # noqa: SIM118 - not a mapping
        if set(output_spec.outputs) == set(key.outputs)
        and (not output_spec.model or key.model == output_spec.model)
        and (not output_spec.version or key.version == output_spec.version)
        and (key.top_k, key.dataset) == (output_spec.top_k, cache_config.dataset)
        and (output_spec.top_k is None or key.temperature == output_spec.temperature)
        and output_spec.dtype in (None, key.dtype)
        and cache_config.cache.store_dtype in (None, key.dtype)
    ]
    dtype = cache_config.cache.store_dtype or output_spec.dtype
    same_words = [key for key in fitting if (key.outputs, key.dtype) == (output_spec.outputs, dtype)]
    for found in (fitting, same_words):
        if len(found) == 1:
            return cache_config.cache.view(found[0])
    there = "; ".join(key.to_json() for key in (fitting or cache_config.cache.keys())) or "nothing"
    wanted = (
        f"outputs {list(output_spec.outputs)}, top_k={output_spec.top_k}, temperature={output_spec.temperature:g}, "
        f"dtype={dtype}, dataset={cache_config.dataset!r}"
        + (f", version={output_spec.version!r}" if output_spec.version else "")
    )
    raise SettingsError(
        f"no teachers are named, and the cache {cache_config.cache.path or 'in memory'} has {len(fitting)} sets of "
        f"labels for {wanted}; it holds: {there}"
    )


def look_up_offline(view: CacheView, chunk: Chunk) -> Found:
    """Return the labels of all rows from the cache alone.

    Args:
        view: of the labels.
        chunk: with sample ids.

    Raises:
        NoTeacherError: some are not there.
        SettingsError: labels are of sequences and the chunk is not, or of other inputs.
    """
    ids = chunk_ids(chunk, chunk.fields, POSITION, view.layout.sequence_inputs if view.layout is not None else None)
    found = view.get(ids)
    if not found.complete:
        samples = ids.ids if isinstance(ids, SequenceIds) else ids
        missing = next(sample for sample, there in zip(samples, found.mask, strict=True) if not there)
        words = ", or is that of another text," if isinstance(ids, SequenceIds) else ""
        raise NoTeacherError(f"the label of sample {missing!r} is not in the cache{words} and no teachers are named")
    return found


def chunk_ids(
    chunk: Chunk, fields: Mapping[str, Array], position: str, inputs: Sequence[str] | None = None
) -> Sequence[Any] | SequenceIds:
    """Return what a chunk's labels are looked up by.

    Args:
        chunk: with sample ids.
        fields: what is sent, [rows, ...] by name.
        position: the name of the input that holds the rows' positions.
        inputs: of sequences, the names that labels were kept for; None for all of `fields`.

    Raises:
        SettingsError: one of `inputs` is not among the fields.
    """
    assert chunk.ids is not None
    if chunk.lengths is None:
        return chunk.ids
    sent = {name: array for name, array in fields.items() if name != position and (inputs is None or name in inputs)}
    missing = sorted({*(inputs or ())} - {*sent})
    if missing:
        raise SettingsError(
            f"the cache's labels are of texts with the inputs {list(inputs or ())}, and {missing[0]!r} is missing "
            "here: name it in `ins` (inputs=)"
        )
    prints = fingerprints_of(sent, chunk.lengths, fields.get(position))
    return SequenceIds(chunk.ids, chunk.lengths, prints, tuple(sorted(sent)))


@dataclass(frozen=True)
class CacheMiss:
    """Rows, or sequences, of a chunk that the cache does not have, to be completed with their answer.

    Attributes:
        found: rows that the cache has.
        view: where they were looked up.
        ids: of those that it does not have.
        cache: of the view.
        labels: key of the labels, but for the version.
        spec: the model for whose version the rows were looked up; labels of another version are kept apart.
    """

    found: Found
    view: CacheView
    ids: Sequence[Any] | SequenceIds
    cache: SoftLabelCache
    labels: CacheKeyTemplate
    spec: ModelSpec

    def key(self, version: str) -> CacheKey:
        """Return the key that an answer of this version is kept under."""
        return self.labels.key(self.spec, version)

    def completed(self, answer: Outputs) -> Outputs:
        """Return the outputs of all rows: those of the cache and the answer's."""
        return dict(self.found.filled(answer)) if self.found.outputs else answer
