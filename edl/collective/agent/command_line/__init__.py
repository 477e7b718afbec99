"""Turns the command line of `edl run` (torchrun's options and ours, endpoint, Slurm step) into a launch spec.

What happens once the job is known belongs in `edl.collective.agent.agent`.
"""
