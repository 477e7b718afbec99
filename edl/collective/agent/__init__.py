"""One node's part of a job: `edl run`.

`run` is the command line, torchrun's; `agent` follows the job's record (`membership`, `world`) and runs a `crew` of
`workers`, which a `zygote` forks; `failures` and `watch` say what it means that one ended, or does nothing; `nodecheck`
tests nodes before they join. Decisions, without I/O, are in `world`, `failures`, `restarts`, `pausing`, `watch` and
`nodecheck`.

What does not belong here: what a worker does.
"""
