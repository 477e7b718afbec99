"""What makes an operator: watches that say when to look, a work queue, the reconciler, events, metrics and health.

Elsewhere: decisions about jobs and pools (`edl.master.kube.jobs`, `edl.master.kube.pools`).
"""

from edl.master.kube.operator.operator import Operator
from edl.master.kube.operator.settings import ALL_NAMESPACES, OperatorSettings

__all__ = ["ALL_NAMESPACES", "Operator", "OperatorSettings"]
