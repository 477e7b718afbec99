"""A simulated cluster for `benchmarks/cluster_sim`: a day's trace, policies that share the GPUs, and their results."""
