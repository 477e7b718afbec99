"""How many teachers and workers a job needs, which job gets what, and who is started again: pure functions.

What does not belong here: anything that reads a clock, a Store or Kubernetes' API, and whatever acts on a decision.
"""

__all__: list[str] = []
