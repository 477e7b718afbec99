"""Runs the processes of a node's workers: forks them once torch is imported, handles their output, stacks and exits."""
