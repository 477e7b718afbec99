"""Calls to the API of Kubernetes, and nothing of EDL: objects as plain JSON, with deadlines and EDL's errors.

`client` has the verbs, `connection` a request with its credentials and deadline, `responses` what an answer means,
`watch` what is there and how it changes; `resource_types` names the kinds, `quantity` reads amounts. Whatever the API
server cannot tell is an error, never "there is none". Elsewhere: what EDL stores in a cluster, what the
operator decides, and typed models of other people's resources.

The official client gives the credentials (kubeconfig, service accounts, exec plugins), TLS and proxies. It is imported
with the first client, not with this package.
"""

from __future__ import annotations

__all__: list[str] = []
