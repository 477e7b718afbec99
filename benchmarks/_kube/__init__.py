"""What benchmarks on a Kubernetes cluster share: the cluster of `tests/cluster`, and pictures."""
