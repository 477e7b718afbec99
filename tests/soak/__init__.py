"""A soak test: `make soak` has teachers, registries, a cache's disk and students fail at random for half an hour.

`student` is a training loop that checks each row and writes what it saw into a journal; `fleet` keeps teachers and
students running, and does to them what fails; `verdict` counts what was wrong, and puts it into docs/reliability.md.
"""
