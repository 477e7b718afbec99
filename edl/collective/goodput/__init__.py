"""Where a job's time went: exclusive categories that add up to it, goodput, and what happened.

`ledger` counts a node's time, `summary` combines the nodes into one summary of the job, and `report` draws it. Nothing
here acts on what it sees. Goodput is train / elapsed: the share of the wall-clock time since the job began that went
into steps which were finished once and never lost. Availability, which is often published instead, is the share of the
time in which the job was up; a job that keeps restarting, or repeats lost work, is available all the time.
"""
