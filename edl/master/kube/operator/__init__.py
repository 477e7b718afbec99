"""Parts of the operator: watches that trigger reconciliations, a work queue, the reconciler, events, metrics, health.

Elsewhere: decisions about jobs and pools (`edl.master.kube.jobs`, `edl.master.kube.pools`).
"""

from edl.master.kube.operator.operator import Operator
from edl.master.kube.operator.settings import ALL_NAMESPACES, OperatorSettings

__all__ = ["ALL_NAMESPACES", "Operator", "OperatorSettings"]
