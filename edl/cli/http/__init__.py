"""Commands that answer over HTTP until a signal.

What does not belong here: the servers (`edl.dashboard`, `edl.proxy`).
"""

__all__: list[str] = []
