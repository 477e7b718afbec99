"""One node's part of a job: `edl run`.

`command_line` turns options into a `launch_spec`. `agent` joins the job, follows its records (`node_records`,
`reconciler`) and runs its workers (`worker_group`), whose `processes` a zygote forks. `health` finds out what has
failed. Decisions without I/O are in `rendezvous`, `health.failures` and the limits of `health.hangs`.
"""
