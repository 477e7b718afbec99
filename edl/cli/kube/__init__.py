"""Commands for jobs and pools on Kubernetes, which are custom resources of the operator (`edl.master.kube`)."""

__all__: list[str] = []
