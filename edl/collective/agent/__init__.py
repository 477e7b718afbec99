"""One node's part of a job: `edl run`.

`command_line` turns options into a `launch_spec`. `agent` joins the job (`join`), follows its records in the Store
(`membership`, `reconciler`) and runs `workers`, whose `processes` are forked by a zygote. `health` finds who has
failed and what follows from it. Decisions without I/O are in `membership.rendezvous`, `membership.pause`,
`health.failures`, `health.restart_policy`, `health.hang_limits` and `health.node_check.pairing`.

What does not belong here: what a worker does.
"""
