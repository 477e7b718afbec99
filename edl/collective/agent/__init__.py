"""Runs one node's part of a job: `edl run`.

`command_line` turns options into a `launch_spec`. `agent` joins the job, follows the job's records (`node_records`,
`reconciler`) and runs the node's workers (`worker_group`). A zygote forks the workers' processes (`processes`).
`health` finds out what has failed. Code that decides without doing I/O is in `rendezvous` and `health.failures`, and in
the part of `health.hangs` that computes limits.
"""
