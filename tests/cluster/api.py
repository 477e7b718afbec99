"""The cluster's API, asked past EDL."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import kubernetes.client
import kubernetes.config

from tests.cluster.machine import ROOT, KubeMachine

T = TypeVar("T")
WAIT_S = 150.0
"""A kubelet of 1.20 that is busy when a container ends removes it, and so the pod, with its next garbage collection
alone: once a minute."""
ASK_S = 30.0
MERGE = "application/merge-patch+json"


class Cluster:
    """A cluster and its administrator."""

    def __init__(self, kubeconfig: Path, machine: KubeMachine | None = None, image: str = "") -> None:
        self.kubeconfig = kubeconfig
        self.machine = machine
        self.image = image
        self._api = kubernetes.config.new_client_from_config(str(kubeconfig))

    @functools.cached_property
    def client(self) -> Any:
        """An `edl.kube.KubeClient` of the administrator."""
        from edl.kube.client import KubeClient
        from edl.kube.settings import KubeSettings

        return KubeClient(KubeSettings(kubeconfig=str(self.kubeconfig), namespace="default"))

    def close(self) -> None:
        """Close the connections."""
        if "client" in self.__dict__:
            self.client.close()
        self._api.close()

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        """Ask the API server; None where there is nothing at this path."""
        try:
            answer = self._api.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=(5.0, ASK_S),
            )
        except kubernetes.client.ApiException as error:
            if error.status == 404:
                return None
            raise RuntimeError(f"{method} {path}: {error.status} {error.body}") from error
        data = answer.data
        try:
            return json.loads(data)
        except ValueError:
            return data.decode(errors="replace")

    def list_pods(self, namespace: str, selector: str = "") -> list[Any]:
        """Pods of a namespace."""
        query = {"labelSelector": selector} if selector else {}
        return list(self.ask(f"/api/v1/namespaces/{namespace}/pods", query=query)["items"])

    def get(self, plural: str, name: str, namespace: str) -> Any:
        """A resource of EDL's, or None."""
        return self.ask(f"/apis/edl.io/v1alpha1/namespaces/{namespace}/{plural}/{name}")

    def apply(self, *objects: Any, namespace: str = "") -> None:
        """Apply objects as `kubectl apply` does."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})  # kubectl 1.20 reads one JSON alone
        self.kubectl(*(["-n", namespace] if namespace else []), "apply", "-f", "-", text=text)

    def run_pod(self, namespace: str, name: str, template: Mapping[str, Any]) -> None:
        """Make a pod of a PodTemplateSpec."""
        metadata, spec = template.get("metadata", {}), template["spec"]
        body = {"metadata": {**metadata, "name": name}, "spec": {"restartPolicy": "Never", **spec}}
        self.ask(f"/api/v1/namespaces/{namespace}/pods", "POST", {"apiVersion": "v1", "kind": "Pod", **body})

    def reasons(self, namespace: str) -> set[str]:
        """Reasons of a namespace's events."""
        return {event["reason"] for event in self.ask(f"/api/v1/namespaces/{namespace}/events")["items"]}

    def scale(self, namespace: str, deployment: str, count: int) -> None:
        """Set the replicas of a Deployment."""
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{deployment}/scale"
        self.ask(path, "PATCH", {"spec": {"replicas": count}}, content_type=MERGE)

    def bind(self, namespace: str, account: str, role: str, kind: str = "Role") -> None:
        """Give a service account the rights of a role in its namespace."""
        binding = {
            "metadata": {"name": f"{account}-{role}"},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        }
        self.ask(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings", "POST", binding)

    def make_token(self, namespace: str, account: str) -> str:
        """A token of a service account."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        return str(self.ask(path, "POST", {**kind, "spec": {"expirationSeconds": 7200}})["status"]["token"])

    def kubectl(self, *arguments: str, text: str = "", timeout_s: float = WAIT_S, program: str = "") -> str:
        """Run kubectl as the administrator and return what it prints; RuntimeError with its words if it fails."""
        options = ["--kubeconfig", str(self.kubeconfig), "--cache-dir", str(self.kubeconfig.parent / "kubectl")]
        return run_program([program or kubectl_program(), *options, *arguments], text, timeout_s)

    def wait(self, what: str, condition: Callable[[], T], namespace: str = "", timeout_s: float = WAIT_S) -> T:
        """Ask until the answer is true, and return it; at the deadline, AssertionError with the namespace's state."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = condition()
            if answer:
                return answer
            if time.monotonic() > deadline:
                state = self.describe(namespace) if namespace else ""
                raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{state}")
            time.sleep(0.2)

    def describe(self, namespace: str) -> str:
        """What a person would look at first: resources, pods, events and the ends of the logs."""
        status = '{range .items[*]}{.metadata.name} {.status}{"\\n"}{end}'
        parts = [
            self._try("-n", namespace, "get", "elasticjobs,teacherpools", "-o", "wide"),
            self._try("-n", namespace, "get", "elasticjobs,teacherpools", "-o", f"jsonpath={status}"),
            self._try("-n", namespace, "get", "pods,poddisruptionbudgets,services", "-o", "wide"),
            self._try("-n", namespace, "get", "events", "--sort-by", ".lastTimestamp"),
        ]
        for pod in self.list_pods(namespace):
            name, status = pod["metadata"]["name"], pod.get("status", {})
            parts.append(f"--- {name}: {json.dumps(status.get('containerStatuses', status))}")
            parts.append(self._try("-n", namespace, "logs", name, "--all-containers", "--tail", "60"))
        return "\n".join(part[-6000:] for part in parts)

    def _try(self, *arguments: str) -> str:
        try:
            return self.kubectl(*arguments)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return str(error)

    def write_account_kubeconfig(self, namespace: str, account: str, path: Path) -> None:
        """Write a kubeconfig with a token of a service account."""
        config = json.loads(self.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
        config["users"] = [{"name": account, "user": {"token": self.make_token(namespace, account)}}]
        context = {"cluster": config["clusters"][0]["name"], "user": account, "namespace": namespace}
        config["contexts"] = [{"name": account, "context": context}]
        config["current-context"] = account
        path.write_text(json.dumps(config))

    def may(self, user: str, verb: str, resource: str, namespace: str = "", group: str = "") -> bool:
        """Whether a user may do so, in a namespace or in all of them."""
        attributes = {"verb": verb, "resource": resource, "namespace": namespace, "group": group}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": attributes},
        }
        found = self.ask("/apis/authorization.k8s.io/v1/subjectaccessreviews", "POST", review)
        return bool(found["status"]["allowed"])

    def nodes(self) -> list[str]:
        """Names of the nodes that are ready."""
        return [
            node["metadata"]["name"]
            for node in self.ask("/api/v1/nodes")["items"]
            if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])
        ]


def kubectl_program(new: bool = False) -> str:
    """The kubectl to use: the one of Helm's package, or the one on PATH; "" without any."""
    fetched = ROOT / ".tools/helm" / ("kubectl-new" if new else "kubectl")
    return str(fetched) if fetched.exists() else shutil.which("kubectl") or ""


def helm_program(version: int = 3) -> str:
    """The helm to use; "" without any."""
    fetched = ROOT / f".tools/helm/helm{version}"
    return str(fetched) if fetched.exists() else shutil.which("helm") or ""


def in_namespace(words: list[str], namespace: str) -> list[str]:
    """A command of a page, with another namespace in the place of the page's."""
    return [namespace if before == "--namespace" else word for before, word in itertools.pairwise(["", *words])]


def run_program(command: list[str], text: str = "", timeout_s: float = WAIT_S) -> str:
    """Run a program and return what it prints; RuntimeError with its words if it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:10])} …: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout
