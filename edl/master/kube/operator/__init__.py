"""Parts of the operator: watches that trigger reconciliations, work queue, reconciler, events, metrics and health."""

from edl.master.kube.operator.looks import ALL_NAMESPACES
from edl.master.kube.operator.operator import Operator, OperatorSettings

__all__ = ["ALL_NAMESPACES", "Operator", "OperatorSettings"]
