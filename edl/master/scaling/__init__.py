"""How many teachers and workers a job needs, which job gets what, and who is started again: pure functions.

`advisor` alone has a clock and a Store: it reads what is published, asks the functions, and writes what is wanted.
What does not belong here: Kubernetes' API, and whatever acts on a decision.
"""

__all__: list[str] = []
