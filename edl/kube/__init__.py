"""Calls to the Kubernetes API: objects as plain JSON, with deadlines and EDL's errors. Nothing here is about EDL.

`client` has the verbs, `connection` makes requests with credentials and deadlines, `responses` reads answers, `watch`
follows changes; `resource_types` names the kinds, `quantity` reads amounts. If the API server cannot answer, that is an
error, never "there is none".

The official client gives the credentials (kubeconfig, service accounts, exec plugins), TLS and proxies. It is imported
with the first client, not with this package.
"""

from __future__ import annotations

__all__: list[str] = []
