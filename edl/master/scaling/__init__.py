"""How many teachers and workers a job needs, which job gets which GPUs, and what is restarted: pure functions.

Only `advisor` has a clock and a Store. What does not belong here: Kubernetes' API, and carrying out decisions.
"""

__all__: list[str] = []
