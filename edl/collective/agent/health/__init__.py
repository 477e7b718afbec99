"""Finds what has failed (workers that end or hang, GPUs, other agents) and decides what follows from it.

How workers are started and stopped is in `edl.collective.agent.processes`, and how a node leaves in
`edl.collective.agent.reconciler`.
"""
