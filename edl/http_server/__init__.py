"""Serves an application of aiohttp over HTTP or HTTPS: a thread with an event loop, who is let in, and bounds.

Imports aiohttp (the extras `dashboard` and `proxy`): import this where a server is asked for, and nowhere else.

What does not belong here: what is answered (`edl.dashboard`, `edl.proxy`).
"""

__all__: list[str] = []
