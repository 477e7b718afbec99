"""Finds what has failed (workers that end or hang, GPUs, other agents) and decides what to do about it."""
