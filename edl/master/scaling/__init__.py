"""How many teachers and workers a job needs, which job gets what, and who is started again: pure functions.

`advisor` alone has a clock and a Store. What does not belong here: Kubernetes' API, and acting on a decision.
"""

__all__: list[str] = []
