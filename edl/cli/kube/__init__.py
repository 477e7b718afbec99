"""Commands for jobs and pools that an operator runs on Kubernetes: a module `cmd_NAME` for a command, as in `edl.cli`.

They write and read custom resources (`ElasticJob`, `TeacherPool`), and the operator does the rest; they find the
cluster as kubectl does.

What does not belong here: what the operator makes of resources (`edl.master.kube`), and calls to the API (`edl.kube`).
"""

__all__: list[str] = []
