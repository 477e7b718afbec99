"""A server that speaks the scoring part of vLLM's HTTP protocol, with the teachers of a service behind it.

If you replace the URL of a trainer's single teacher with the proxy's URL, the trainer gets elastic teachers. This
package imports aiohttp (the extra `proxy`).
"""

__all__: list[str] = []
