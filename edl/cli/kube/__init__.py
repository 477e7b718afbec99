"""Commands for jobs and pools that an operator runs on Kubernetes.

They write and read custom resources (`ElasticJob`, `TeacherPool`) through `edl.kube`, and the operator
(`edl.master.kube`) does the rest. They find the cluster as kubectl does.
"""

__all__: list[str] = []
