"""ElasticJobs: which workers come and go, what their pods run, and what a job's status says. Pure functions.

A job starts with its minimum at once and grows by the room that appears; it ends when a worker has done all there is to
do, or with an error that does not pass by itself. Elsewhere: how many workers are useful
(`edl.master.scaling`), what is idle (`edl.master.kube.capacity`), and calls of the API (`edl.master.kube.operator`).
"""

from edl.master.kube.jobs.launches import shares_cluster
from edl.master.kube.jobs.planner import plan_job
from edl.master.kube.jobs.status import find_final_phase, find_waiting_since_s

__all__ = ["find_final_phase", "find_waiting_since_s", "plan_job", "shares_cluster"]
