"""Finds what has failed (workers that end or hang, GPUs, other agents) and decides what follows from it."""
