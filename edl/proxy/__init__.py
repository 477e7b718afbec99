"""A server that speaks the scoring part of vLLM's HTTP protocol, with the teachers of a service behind it.

A trainer that knows a single teacher's URL gets elastic teachers by changing it: what is live, full, slow or lost is
the business of `Scorer`, which this asks. Imports aiohttp (the extra `proxy`).

What does not belong here: asking teachers (`edl.distill.scoring`), listening (`edl.http_server`), and generation.
"""

__all__: list[str] = []
