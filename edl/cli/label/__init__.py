"""Parts of the command `edl label`.

`arguments`: the command line; `screen`: progress while it runs; `conclusion`: what is said at its end. With `--job`
several processes share a run: `job_spec` is what they must have in common (pure), `shards` joins the shards of a job's
master to the labeller, `job` is a worker from its start to its end.

What does not belong here: labelling (`edl.distill.labelling`) and masters (`edl.master`), which know nothing of each
other and meet here.
"""
