"""Who gets which GPUs: a pure function from nodes, jobs and where their workers are to where they should be.

What does not belong here: how many workers a job can use at all (`edl.master.scaling.workers`), a clock, Kubernetes'
API, and whatever starts and stops workers.
"""

from edl.master.scaling.arbitration.arbiter import Allocation, arbitrate
from edl.master.scaling.arbitration.requests import ArbitrationSettings, JobRequest

__all__ = ["Allocation", "ArbitrationSettings", "JobRequest", "arbitrate"]
