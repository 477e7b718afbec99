"""What `edl run` is asked to do: its options, torchrun's and ours, the endpoint or the Slurm step, the specification.

Not here: what happens once the job is known (`edl.collective.agent.agent`).
"""
