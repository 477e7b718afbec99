"""Who has failed: workers that end or hang, GPUs, other agents; and what follows from a failure.

Not here: how workers are started and stopped (`edl.collective.agent.processes`), and how a node leaves
(`edl.collective.agent.reconciler`).
"""
