"""The Kubernetes cluster that tests run against: bringing it up, asking it past EDL, and pods of this machine's Python.

Fixtures are in `tests/plugins_kubernetes.py`, tests in `tests/kubernetes`.
"""
