"""Where a job's time went: exclusive categories that sum to it, goodput, and what happened.

`ledger` counts a node's time, `summary` joins the nodes to one summary of the job, and `report` draws it. Nothing here
acts on what it sees. Goodput is train / elapsed: the part of the wall-clock time since the job began that went into
steps which were finished once and never lost. Availability, which is often published in its place, is the part of the
time in which the job was up; a job that starts again and again, or repeats what it lost, is available all the time.
"""
