"""The page of all jobs of a Store: its state as one JSON, the server that sends it, and the files that draw it.

What does not belong here: how jobs, teachers and shards are recorded; this package reads these records.
"""

__all__: list[str] = []
