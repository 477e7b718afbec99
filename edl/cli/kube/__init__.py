"""Commands for jobs and pools on Kubernetes, custom resources that the operator (`edl.master.kube`) handles."""

__all__: list[str] = []
