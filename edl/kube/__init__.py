"""A general client for the Kubernetes API: objects as plain JSON, with deadlines and EDL's errors.

If the API server cannot answer, calls raise an error; they never report "not found".

The official client handles credentials (kubeconfig, service accounts, exec plugins), TLS and proxies. It is imported
when the first client is created, not with this package.
"""

from __future__ import annotations

__all__: list[str] = []
