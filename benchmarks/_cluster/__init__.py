"""A simulated cluster for `benchmarks/cluster_sim`: a day's trace, policies that share it out, and what came of it."""
