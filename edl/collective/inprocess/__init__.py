"""Going on in the same process when workers come and go: `stay`, the fastest way to recover.

`run_in_process` is the loop; `process_group` can be aborted from another thread (`sockets`); `control_pipe` carries the
next generation; `step_snapshot` undoes a step that failed; `recovery_plan` decides whose state is used.
"""
