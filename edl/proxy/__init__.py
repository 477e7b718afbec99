"""A server that speaks the scoring part of vLLM's HTTP protocol, with the teachers of a service behind it.

A trainer that knows a single teacher's URL gets elastic teachers by changing it. Imports aiohttp (the extra `proxy`).
"""

__all__: list[str] = []
