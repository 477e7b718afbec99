"""The work queue: which resource is looked at when, each by a single worker at a time.

What does not belong here: what a look does (`edl.master.kube.operator.reconciling.reconciler`).
"""

from edl.master.kube.operator.queue.key_schedule import KeySchedule
from edl.master.kube.operator.queue.work_queue import WorkQueue

__all__ = ["KeySchedule", "WorkQueue"]
