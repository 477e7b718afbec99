"""Decides whether a teacher, and each of its answers, can be used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np

from edl.discovery import Instance
from edl.distill.compress import TopK
from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec, Reply, TensorMetadata, shapes_match
from edl.errors import SettingsError
from edl.protocol import names
from edl.protocol.tensors import Array
from edl.quoting import did_you_mean, listed

logger = logging.getLogger("edl.distill")

InputTensors: TypeAlias = Sequence[tuple[str, str, tuple[int, ...]]]  # name, datatype and shape with rows, of each

_MOST_REMEMBERED = 1024  # input shapes whose output shape is remembered: more than padded texts have, but bounded


class TeacherCompatibility:
    """Remembers the properties that all teachers of a service must share with the first one.

    The first teacher's metadata says which dimensions of a row are fixed; other dimensions, such as the length of a
    text, may differ.
    """

    def __init__(
        self, service: str, output_spec: OutputSpec, mixed_versions: Literal["warn", "refuse"] = "warn"
    ) -> None:
        # The first teacher's model, until `select_version` changes its version; None before the first teacher. All
        # teachers must have a model of this name.
        self.spec: ModelSpec | None = None
        self.tokenizer = ""  # hash of the teachers' tokenizer, from the first teacher that reports it
        self.selecting_version = False  # whether `select_version` runs next, which warns of several versions
        self.is_unversioned = False  # whether neither an answer nor the metadata named a version
        self.weights_versions: set[str] = set()  # versions declared to be hashes of the weights; only grows
        self._service = service
        self._output_spec = output_spec
        self._refuses = mixed_versions == "refuse"
        self._has_several = False  # whether more than one connection was accepted
        self._answered_version = ""  # the version in `spec` that is known only from answers
        self._mixed_versions: frozenset[str] = frozenset()
        # Versions already warned of, besides that of `spec`; the empty one also when `spec` has an unknown version.
        self._reported_versions: set[str] = set()
        self._row_types: dict[str, tuple[np.dtype[Any], int]] = {}  # dtype and number of dimensions of output rows
        self._row_shapes: dict[tuple[str, tuple[tuple[int, ...], ...]], tuple[int, ...]] = {}
        self._kept_shapes: dict[str, tuple[int, ...]] = {}
        self._confirmed_by: set[str] = set()  # connected teachers whose answers had these types and shapes
        self._has_delivered = False  # whether there was such an answer in this epoch

    # Models

    def lacking(self, instance: Instance, spec: ModelSpec) -> str:
        """Return what this model lacks to serve the request, apart from the version; empty if nothing."""
        asked = self._output_spec
        missing = [name for name in asked.outputs if spec.outputs and name not in spec.outputs]
        if missing:
            near = did_you_mean(missing[0], spec.outputs)
            return f"its model {spec.name!r} has no output {missing[0]!r}, only {listed(spec.outputs)}{near}"
        if spec.max_top_k and names.LOGPROBS in asked.outputs and not (asked.top_k and asked.top_k <= spec.max_top_k):
            wanted = "whole outputs are requested" if asked.top_k is None else f"top_k={asked.top_k} is requested"
            return (
                f"its model {spec.name!r} returns at most the {spec.max_top_k} largest log-probabilities per "
                f"row, but {wanted}: set top_k={spec.max_top_k} or less, or serve it with a larger --top-k"
            )
        tokenizer = _tokenizer_of(instance, spec)
        if asked.tokenizer not in ("", tokenizer):
            has = f"has tokenizer {tokenizer!r}" if tokenizer else "does not report its tokenizer"
            return (
                f"its model {spec.name!r} {has}, but the student's is {asked.tokenizer!r}: their token ids "
                "mean different texts. Use a teacher with the student's tokenizer, or omit tokenizer= if the ids agree"
            )
        return ""

    def incompatibility(self, instance: Instance, spec: ModelSpec) -> str:
        """Return why a teacher with this model cannot be used; empty if it can."""
        lacking = self.lacking(instance, spec)
        if lacking:
            return lacking
        spec = replace(spec, tokenizer=_tokenizer_of(instance, spec))
        known = self.spec or spec  # the first teacher agrees with itself
        known = replace(known, tokenizer=self.tokenizer or known.tokenizer)
        difference = _model_difference(spec, known, self._output_spec)
        if difference:
            return difference
        if self._refuses and not spec.version:
            return self._version_refusal("")
        # If the metadata name no version, answers do (`_check_version`).
        if spec.version and known.version != spec.version and not self.selecting_version:
            if self._refuses:
                return self._version_refusal(spec.version)
            self._warn_mixed(instance.id, spec.version, known.version)
        self._has_several = self._has_several or self.spec is not None
        self.tokenizer = known.tokenizer or spec.tokenizer
        if spec.weights_version:
            self.weights_versions.add(spec.weights_version)
        return ""

    # Versions

    def refuses_version(self, version: str) -> bool:
        """Return whether labels of this version must not be mixed with the other labels of the epoch."""
        return self._refuses and self.spec is not None and (not version or version != self.spec.version)

    def _version_refusal(self, version: str) -> str:
        if not version:  # two unknown versions may differ
            return (
                "the version of its model is unknown, but mixed_versions='refuse': give the model a version (edl "
                "serve --model-version), or name its version with version="
            )
        known = self.spec.version if self.spec is not None else ""
        return (
            f"it has version {version!r} of its model, but this epoch's labels are of {known!r} and "
            "mixed_versions='refuse': name a version with version=, or wait for the next epoch (a Scorer's next call)"
        )

    def _check_version(self, teacher: str, version: str) -> str:
        """Return why an answer of this version cannot be used; empty if it can. Warns once for each version."""
        known = self.spec
        if known is None or (version and version == known.version):
            return ""
        if version and not known.version and not self.is_unversioned:
            if self._answered_version in ("", version):  # the first answer that names one
                self.spec = replace(known, version=version)
            else:
                self._follow(replace(known, version=version), self._answered_version)
            self._answered_version = version
            return ""
        if self.refuses_version(version):
            return self._version_refusal(version)
        if version or known.version:
            if version not in self._reported_versions:
                self._warn_mixed(teacher, version, known.version)
            return ""
        self.is_unversioned = True
        if self._has_several and "" not in self._reported_versions:
            self._reported_versions.add("")
            logger.warning(
                "labels of several models may be mixed: neither the metadata nor the answers of teacher %s of %s "
                "report its model's version, and the service has had more than one connection or teacher. Give the "
                "models versions (edl serve --model-version), or name their common version with version=",
                teacher,
                self._service,
            )
        return ""

    def _warn_mixed(self, teacher: str, version: str, known: str) -> None:
        self._reported_versions.add(version)
        logger.warning(
            "labels of two models are mixed: teacher %s of %s has version %r, others have %r. To use only one, name "
            "it with version=, or set mixed_versions='refuse'; if the models are the same, give both the "
            "same --model-version",
            teacher,
            self._service,
            version,
            known,
        )

    def _follow(self, spec: ModelSpec, before: str) -> None:
        logger.warning(
            "the teachers of %s now have version %r of their model instead of %r: from this epoch on, only labels "
            "of %r are looked up and stored",
            self._service,
            spec.version,
            before,
            spec.version,
        )
        self.spec = spec
        self._reset_shapes()
        self._kept_shapes.clear()
        self._reported_versions.clear()

    def select_version(self, live: Sequence[ModelSpec]) -> None:
        """Select the version for cached labels before an epoch. Keep the current version while a live teacher has it.

        `live`: the models of all teachers in use. The model's name never changes.
        """
        known = self.spec
        live = [spec for spec in live if known is not None and spec.name == known.name]
        if known is None or not live:
            return
        if self._answered_version:
            # Such teachers may have been replaced unnoticed, so each epoch waits for an answer that names the version.
            live = [spec if spec.versions else replace(spec, version="") for spec in live]
            if known.version == self._answered_version:
                self.spec = known = replace(known, version="")
        count = Counter(spec.version for spec in live)
        if known.version not in count:
            version = max(sorted(count), key=lambda version: count[version])
            self._follow(next(spec for spec in live if spec.version == version), known.version)
        mixed = frozenset(count) if len(count) > 1 else frozenset()
        if mixed and mixed != self._mixed_versions:
            logger.warning(
                "the teachers of %s have versions %s of their model: labels of %r are looked up until no teacher "
                "has that version",
                self._service,
                ", ".join(map(repr, sorted(mixed))),
                self.spec.version if self.spec is not None else "",
            )
        self._mixed_versions = mixed
        self._reported_versions |= mixed

    # Answers

    def begin_epoch(self) -> None:
        """Start an epoch. Once the teachers that answered earlier have left, answers may have different shapes."""
        self._has_delivered = False

    def forget_teacher(self, teacher: str) -> None:
        """Forget a teacher whose connection has ended. A different teacher may appear under the same name."""
        self._confirmed_by.discard(teacher)

    def check_reply(self, teacher: str, inputs: InputTensors, reply: Reply) -> RequestFailure | None:
        """Return why an answer does not match earlier ones; None if it can be used."""
        why = self._check_version(teacher, reply.version)
        if not why:
            why = self._difference(inputs, reply.outputs)
            if why and not self._has_delivered and self._confirmed_by <= {teacher}:
                self._reset_shapes()  # no teacher of earlier answers is left
                why = self._difference(inputs, reply.outputs)
        if why:
            return RequestFailure(FailureKind.BAD_OUTPUT, f"{teacher}: {why}")
        self._confirmed_by.add(teacher)
        self._has_delivered = True
        return None

    def _reset_shapes(self) -> None:
        self._row_types.clear()
        self._row_shapes.clear()
        self._confirmed_by.clear()

    def _difference(self, inputs: InputTensors, outputs: Outputs) -> str:
        for name, output in outputs.items():
            array = output.values if isinstance(output, TopK) else output
            spec = self._output_metadata(name)
            shape = tuple(array.shape[1:])
            kind = (array.dtype, len(shape))
            agreed = self._row_types.setdefault(name, kind)
            if agreed != kind:
                return (
                    f"output {name!r} has rows of {kind[0]} with {kind[1]} dimensions, earlier teachers' rows are "
                    f"{agreed[0]} with {agreed[1]}: set dtype=, or give this teacher its own --service"
                )
            if spec is None:
                # Compare with earlier answers: inputs of equal shape should give outputs of equal shape.
                if len(self._row_shapes) >= _MOST_REMEMBERED:
                    self._row_shapes.clear()
                want = self._row_shapes.setdefault((name, tuple(of[1:] for _, _, of in inputs)), shape)
            elif isinstance(output, TopK) and self._output_spec.top_k is not None and spec.shape:
                classes = spec.shape[-1]
                want = (*spec.shape[:-1], min(self._output_spec.top_k, classes) if classes > 0 else -1)
            else:
                want = spec.shape
            if not shapes_match(shape, want):
                return f"output {name!r} has rows of shape {list(shape)}, earlier teachers' rows {list(want)}"
        return ""

    def _output_metadata(self, name: str) -> TensorMetadata | None:
        return self.spec.outputs.get(name) if self.spec is not None else None

    def check_cacheable(self, fields: Mapping[str, Array]) -> None:
        """Raise `SettingsError` if inputs differ in shape from earlier inputs and outputs have variable dimensions.

        A sample that is now padded to a different length would get a cached label of the wrong length. Not thread-safe.
        """
        varying = None
        for name in self._output_spec.outputs:
            spec = self._output_metadata(name)
            if spec is not None and -1 in (spec.shape if self._output_spec.top_k is None else spec.shape[:-1]):
                varying = spec
        if varying is None or self.spec is None:
            return
        for name, array in fields.items():
            if self.spec.inputs and name not in self.spec.inputs:
                continue
            shape = tuple(array.shape[1:])
            before = self._kept_shapes.setdefault(name, shape)
            if before != shape:
                raise SettingsError(
                    f"input {name!r} has rows of shape {list(shape)}, but earlier rows had {list(before)}, and output "
                    f"{varying.name!r} {list(varying.shape)} (-1 is any size) may depend on the shape: cached labels "
                    "would not match. Pad all batches to one length, or use no cache"
                )


def _tokenizer_of(instance: Instance, spec: ModelSpec) -> str:
    return spec.tokenizer or instance.meta.get(names.TOKENIZER_META, "")


def _model_difference(spec: ModelSpec, known: ModelSpec, output_spec: OutputSpec) -> str:
    others = "earlier teachers"
    if spec.name != known.name:  # equal versions prove nothing: most models start with "1"
        return (
            f"it serves model {spec.name!r}, but {others} serve {known.name!r}, and labels of two models "
            "are never mixed: name one of them with model=, or give each model its own --service"
        )
    what = f"its model {spec.name!r}"
    if spec.inputs and known.inputs and dict(spec.inputs) != dict(known.inputs):
        return f"{what} takes different inputs from {others}"
    if spec.batch_rows not in (0, known.batch_rows):
        return (
            f"{what} takes exactly {spec.batch_rows} rows per request, {others} "
            f"{known.batch_rows or 'any number'}: give it its own --service"
        )
    if spec.sequences != known.sequences:  # requests are filled for one kind only
        of = {
            of: f"rows that belong to sequences by input {of!r}" if of else "independent rows"
            for of in (spec.sequences, known.sequences)
        }
        return (
            f"{what} has {of[spec.sequences]}, {others} {of[known.sequences]}: serve all with the same "
            f"sequence_input ({names.SEQUENCES})"
        )
    difference = _output_difference(spec, known, output_spec)
    return f"{what} {difference[0]}, {others} {difference[1]}" if difference else ""


def _output_difference(spec: ModelSpec, known: ModelSpec, output_spec: OutputSpec) -> tuple[str, str] | None:
    """Return how the outputs of two models differ, as one phrase for each model; None if they agree."""
    if spec.tokenizer and known.tokenizer and spec.tokenizer != known.tokenizer:
        return f"has tokenizer {spec.tokenizer!r}", f"{known.tokenizer!r}: their token ids mean different texts"
    for name in output_spec.outputs:
        have, want = spec.outputs.get(name), known.outputs.get(name)
        if have is not None and want is not None and not shapes_match(have.shape, want.shape):
            return f"gives output {name!r} with rows of shape {list(have.shape)}", f"{list(want.shape)}"
    return None


def outputs_disagreement(spec: ModelSpec, known: ModelSpec, output_spec: OutputSpec) -> str:
    """Return how two services' outputs differ, if one batch may hold labels of both; empty if they agree."""
    difference = _output_difference(spec, known, output_spec)
    if difference:
        return f"model {spec.name!r} {difference[0]}, model {known.name!r} {difference[1]}"
    for name in output_spec.outputs:
        have, want = spec.outputs.get(name), known.outputs.get(name)
        if have is not None and want is not None and have.datatype != want.datatype and output_spec.dtype is None:
            return (
                f"model {spec.name!r} gives output {name!r} as {have.datatype}, model {known.name!r} as "
                f"{want.datatype}: set dtype='float32'"
            )
    return ""
