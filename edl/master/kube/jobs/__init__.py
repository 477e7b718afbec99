"""ElasticJobs: which workers to add and remove, what their pods run, and a job's status. Pure functions."""

from edl.master.kube.jobs.launches import shares_cluster
from edl.master.kube.jobs.planner import plan_job
from edl.master.kube.jobs.status import find_final_phase, find_waiting_since_s

__all__ = ["find_final_phase", "find_waiting_since_s", "plan_job", "shares_cluster"]
