"""Who has failed: workers that end or hang, GPUs, other agents, slow ranks; and what follows from a failure."""
