"""Parts of the operator: watches that trigger reconciliations, work queue, reconciler, events, metrics and health."""

from edl.master.kube.operator.operator import Operator
from edl.master.kube.operator.settings import ALL_NAMESPACES, OperatorSettings

__all__ = ["ALL_NAMESPACES", "Operator", "OperatorSettings"]
