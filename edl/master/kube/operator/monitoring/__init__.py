"""How an operator is: metrics, whether it lives, and whether it is ready.

What does not belong here: how jobs and pools are, which their own status says.
"""

from edl.master.kube.operator.monitoring.health import OperatorHealth
from edl.master.kube.operator.monitoring.metrics import OperatorMetrics

__all__ = ["OperatorHealth", "OperatorMetrics"]
