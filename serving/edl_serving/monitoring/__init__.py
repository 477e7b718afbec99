"""What an operator sees of the server: Prometheus metrics over HTTP, and log lines at a limited rate."""
