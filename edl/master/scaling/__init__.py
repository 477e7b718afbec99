"""How many teachers and workers a job needs, which job gets which GPUs, and what is restarted: pure functions."""

__all__: list[str] = []
