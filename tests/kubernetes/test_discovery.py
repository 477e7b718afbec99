"""A pod's own rights and namespace are all that `kubernetes://` needs, and what it makes goes with the pod."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.cluster.api import Cluster
from tests.kubernetes.discovery.test_conformance import documented_role

PROGRAM = """
import time
from edl.discovery import Instance, open_registry, open_store
with open_registry("kubernetes://") as registry, open_store("kubernetes://") as store, store.lease(20.0) as lease:
    registration = registry.register(Instance("digits", "a", "127.0.0.1", 9000), 20.0)
    store.put("of/lease", b"1", lease)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_pod_registers_and_leaves(
    cluster: Cluster, namespace: str, pod_template: Callable[..., dict[str, Any]]
) -> None:
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    cluster.ask(f"{rbac}/roles", "POST", documented_role())
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "edl-discovery"}
    binding = {"metadata": {"name": "edl-discovery"}, "subjects": [subject], "roleRef": reference}
    cluster.ask(f"{rbac}/rolebindings", "POST", binding)

    template = copy.deepcopy(pod_template(["python", "-c", PROGRAM]))
    fields = {"EDL_POD_NAME": "metadata.name", "EDL_POD_UID": "metadata.uid"}
    own = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    container = template["spec"]["containers"][0]
    container["env"] = [*container.get("env", []), *own]
    template["spec"]["automountServiceAccountToken"] = True
    cluster.run_pod(namespace, "teacher", template)

    def objects() -> list[dict[str, Any]]:
        paths = (
            f"/api/v1/namespaces/{namespace}/configmaps",
            f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
        )
        query = {"labelSelector": "app.kubernetes.io/managed-by=edl"}
        return [obj for path in paths for obj in cluster.ask(path, query=query)["items"]]

    def kinds() -> list[str]:
        return sorted(obj["metadata"]["labels"]["edl.io/discovery"] for obj in objects())

    wanted = ["instance", "key", "lease", "lease", "reaper"]
    cluster.wait("the pod's registration and key", lambda: kinds() == wanted, namespace)
    uid = cluster.ask(f"/api/v1/namespaces/{namespace}/pods/teacher")["metadata"]["uid"]
    leases = {obj["metadata"]["uid"] for obj in objects() if obj["metadata"]["labels"]["edl.io/discovery"] == "lease"}
    for obj in objects():
        owners = [owner["uid"] for owner in obj["metadata"].get("ownerReferences") or ()]
        what = obj["metadata"]["labels"]["edl.io/discovery"]
        if what in ("instance", "lease"):
            assert owners == [uid], what
        elif what == "key":
            assert set(owners) <= leases
            assert owners
    # Killed, not ended: nobody of EDL's is left to clear up.
    cluster.ask(f"/api/v1/namespaces/{namespace}/pods/teacher", "DELETE", {"gracePeriodSeconds": 0})
    cluster.wait("nothing of the pod's left", lambda: kinds() in ([], ["reaper"]), namespace, timeout_s=180.0)
