"""Turns the command line of `edl run` (torchrun's options and ours, endpoint, Slurm step) into a launch spec."""
