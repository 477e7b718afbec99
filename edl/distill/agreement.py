"""What all teachers of a service have in common: inputs, outputs and the shape of a row, as the first one has it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from edl.discovery.registry import Instance
from edl.distill.actions import Failure, FailureKind
from edl.distill.compress import TopK
from edl.distill.request import ModelSpec, Outputs

__all__ = ["Agreement"]

logger = logging.getLogger("edl.distill")


class Agreement:
    """Of the teachers of one service.

    Args:
        service: for messages.
        outputs: that are asked for.

    Attributes:
        spec: what the first teacher's model looks like, None while there was none.
    """

    def __init__(self, service: str, outputs: Sequence[str]) -> None:
        self._service, self._outputs = service, outputs
        self._row_shapes: dict[str, tuple[int, ...]] = {}
        self.spec: ModelSpec | None = None

    def unsuitable(self, instance: Instance, spec: ModelSpec) -> str:
        """Why a teacher with this model cannot be used, empty if it can."""
        missing = [name for name in self._outputs if spec.outputs and name not in spec.outputs]
        if missing:
            return f"its model {spec.name!r} has no output {missing[0]!r}, only {', '.join(spec.outputs)}"
        known = self.spec
        if known is not None and spec.inputs and known.inputs:
            differing = [name for name in known.inputs if spec.inputs.get(name) != known.inputs[name]]
            if differing or len(spec.inputs) != len(known.inputs):
                return f"its model {spec.name!r} takes other inputs than the teachers before it"
        if known is not None and known.version != spec.version:
            logger.warning(
                "labels of two models are mixed: teacher %s of %s has version %r, others have %r. If that is not "
                "meant, give one of them another --service; if the models are the same, both one --version",
                instance.id,
                self._service,
                spec.version,
                known.version,
            )
        return ""

    def misfit(self, teacher: str, outputs: Outputs) -> Failure | None:
        """All teachers of a service must agree on the shape of a row, also where their metadata leaves it open."""
        for name, output in outputs.items():
            shape = tuple(output.ids.shape[1:] if isinstance(output, TopK) else output.shape[1:])
            if self._row_shapes.setdefault(name, shape) != shape:
                return Failure(
                    FailureKind.BAD_OUTPUT,
                    f"{teacher}: output {name!r} has rows of shape {list(shape)}, "
                    f"the teachers before it {list(self._row_shapes[name])}",
                )
        return None
