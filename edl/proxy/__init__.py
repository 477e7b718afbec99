"""A server that speaks the scoring part of vLLM's HTTP protocol, with the teachers of a service behind it.

A trainer that uses a single teacher's URL gets elastic teachers if this URL is replaced by the proxy's URL. Imports
aiohttp (the extra `proxy`).
"""

__all__: list[str] = []
