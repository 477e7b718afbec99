"""Tests of nodes before they join: `gate` gathers those that wait, `runner` has them run `probe`, `pairing` judges.

The work itself is in `workload`. What does not belong here: what an agent does with a faulty node
(`edl.collective.agent.join`).
"""
