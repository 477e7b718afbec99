"""Commands for jobs and pools that an operator runs on Kubernetes.

They read and write custom resources (`ElasticJob`, `TeacherPool`) through `edl.kube`; the operator
(`edl.master.kube`) does the rest. They find the cluster as kubectl does.
"""

__all__: list[str] = []
