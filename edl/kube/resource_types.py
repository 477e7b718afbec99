"""Defines kinds of objects, with the names that the API's URLs use."""

from __future__ import annotations

from typing import Final, NamedTuple


class ResourceType(NamedTuple):
    """A kind of objects. An empty `group` is the core group; an empty `version` is the server's preferred version."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` of objects of this kind."""
        return f"{self.group}/{self.version}" if self.group else self.version


PODS: Final = ResourceType("", "v1", "pods", "Pod")
NODES: Final = ResourceType("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES: Final = ResourceType("", "v1", "namespaces", "Namespace", namespaced=False)
EVENTS: Final = ResourceType("", "v1", "events", "Event")
SECRETS: Final = ResourceType("", "v1", "secrets", "Secret")
CONFIG_MAPS: Final = ResourceType("", "v1", "configmaps", "ConfigMap")
DEPLOYMENTS: Final = ResourceType("apps", "v1", "deployments", "Deployment")
POD_DISRUPTION_BUDGETS: Final = ResourceType("policy", "", "poddisruptionbudgets", "PodDisruptionBudget")
"""The version is v1beta1 up to Kubernetes 1.20, and v1 from 1.21 on."""
CUSTOM_RESOURCE_DEFINITIONS: Final = ResourceType(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
ELASTIC_JOBS: Final = ResourceType("edl.io", "v1alpha1", "elasticjobs", "ElasticJob")
TEACHER_POOLS: Final = ResourceType("edl.io", "v1alpha1", "teacherpools", "TeacherPool")
