"""The page of all jobs of a Store: its state as one JSON, the server that sends it, and the files that draw it.

`state` reads the records, `metrics` shows them to Prometheus, `server` sends both, and `static` has the page itself.
`server` imports aiohttp, so that package is imported where a page is asked for, and nowhere else.

What does not belong here: how jobs, teachers and shards are recorded; this package reads these records.
"""

__all__: list[str] = []
