"""Recovery in the same process: survivors of a lost worker keep their process and state, and lose no step.

`run_in_process` is the loop; `process_group` can be aborted from another thread (`sockets`); `control_pipe` carries the
next generation; `step_snapshot` undoes a step that failed; `recovery_plan` decides from which rank's state to go on.
What does not belong here: workers that are forked anew (`agent`), and states on disk (`checkpoint`).
"""
