"""Commands for jobs and pools on Kubernetes: custom resources, on which the operator (`edl.master.kube`) acts."""

__all__: list[str] = []
