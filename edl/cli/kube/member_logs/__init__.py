"""Logs of the members of a job or pool: from which pods, which lines are new, and how they are shown.

`selection` (pure) chooses pods, `lines` (pure) cuts pieces into new lines, `pod_log` reads the log of a pod to its end
whatever breaks meanwhile, and `follower` does so for all members at once.
"""

__all__: list[str] = []
