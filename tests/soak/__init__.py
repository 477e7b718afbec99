"""A soak test: `make soak` has teachers, registries, a cache's disk and students fail at random for half an hour.

`student` is a training loop that checks each row and writes what it saw into a journal; `fleet` keeps teachers and
students running; `faults` is what is done to them; `verdict` counts, from the journals, what was lost, repeated,
mislabelled or hung, and how memory and descriptors grew, and puts that into docs/reliability.md.

`tests/fast/test_soak.py` tests the counting, `tests/services/test_soak.py` runs it for some seconds.
"""
