"""The soft-label cache as it was before labels were indexed by SQLite, for `benchmarks/cache.py` to measure against.

It has a format of its own, safetensors files that each process indexes in memory, and is left as it was.
"""
