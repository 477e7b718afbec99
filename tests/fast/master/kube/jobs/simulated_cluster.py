"""A cluster in memory, with what an API server, a scheduler and kubelets do to the pods of a job.

An operator is a call of `reconcile`.
"""

from __future__ import annotations

import copy
from typing import Any

from edl.kube.objects import Object, format_time
from edl.master.kube.jobs import plan_job
from edl.master.kube.members.pods import read_member_pods
from edl.master.kube.observation import OwnerObservation, Plan, StoreAnswer, WorkProgress
from edl.master.kube.resources import ElasticJob, parse_elastic_job

START = 1_772_366_400.0


class SimulatedCluster:
    """A job, its pods, and nodes with room for so many pods each."""

    def __init__(self, **spec: Any) -> None:
        self.now_s = START
        self.version = 1
        self.nodes: dict[str, int] = {"node1": 2, "node2": 2}
        self.pods: dict[str, Object] = {}
        self.made = 0
        self.wanted: int | None = None
        self.allocation: int | None = None
        self.starts_after = ""
        self.progress: WorkProgress | None = None
        self.stale = ""
        self.unreachable = ""
        self.refused = ""
        self.capacity: Any = None
        self.events: list[str] = []
        self.status_writes = 0
        template = {"spec": {"containers": [{"name": "w", "image": "i", "resources": {"limits": {"memory": "1Gi"}}}]}}
        spec = {"run": ["train.py"], "store": "consul://c:8500", "template": template, **spec}
        metadata = {"name": "job", "namespace": "ns", "uid": "0123456789ab", "generation": 1}
        metadata["creationTimestamp"] = format_time(START)
        self.resource: Object = {"metadata": metadata, "spec": spec, "status": {}}

    @property
    def status(self) -> Object:
        return self.resource["status"]

    def set_spec(self, **fields: Any) -> None:
        self.resource["spec"].update(fields)
        self.resource["metadata"]["generation"] += 1
        self.version += 1

    def plan(self) -> Plan:
        job = parse_elastic_job(copy.deepcopy(self.resource))
        assert isinstance(job, ElasticJob), job
        pods, strangers = read_member_pods(copy.deepcopy(list(self.pods.values())), job.uid)
        assert not strangers
        observation = OwnerObservation(
            now_s=self.now_s,
            pods=pods,
            capacity=self.capacity,
            store=StoreAnswer(self.wanted, self.progress, self.stale, self.refused, self.unreachable),
            allocation=self.allocation,
            starts_after=self.starts_after,
        )
        plan = plan_job(job, observation)
        assert plan_job(job, observation) == plan, "the same from the same"
        return plan

    def reconcile(self) -> Plan:
        """Do what a plan says, in the order of the Reconciler."""
        plan = self.plan()
        if plan.status != self.status:
            self.resource["status"] = {key: value for key, value in plan.status.items() if value is not None}
            self.version += 1
            self.status_writes += 1
        for deletion in plan.delete:
            pod = self.pods.get(deletion.name)
            if pod is not None and pod["metadata"]["uid"] == deletion.uid:
                self.ask_to_end(deletion.name)
        for obj in plan.create:
            name = obj["metadata"]["name"]
            if name not in self.pods:
                self.made += 1
                pod = copy.deepcopy(obj)
                pod["metadata"] |= {"uid": f"uid-{self.made}", "creationTimestamp": format_time(self.now_s)}
                pod["status"] = {"phase": "Pending"}
                self.pods[name] = pod
        self.events += [note.reason for note in plan.events]
        return plan

    def ask_to_end(self, name: str) -> None:
        """Set the time by which a pod has to end; without a node it goes at once, as the API server does it."""
        pod = self.pods[name]
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        pod["metadata"].setdefault("deletionTimestamp", format_time(self.now_s + grace_s))
        if "nodeName" not in pod["spec"] or pod["status"]["phase"] in ("Succeeded", "Failed"):
            del self.pods[name]

    def schedule(self) -> None:
        for pod in self.pods.values():
            spec, status = pod["spec"], pod["status"]
            if "nodeName" in spec or "deletionTimestamp" in pod["metadata"]:
                continue
            left_out = str(spec.get("affinity", ""))
            room = [
                node
                for node, slots in self.nodes.items()
                if self.count_on(node) < slots and f"'{node}'" not in left_out
            ]
            if room:
                spec["nodeName"] = room[0]
                self.start(pod)
            else:
                words = {"reason": "Unschedulable", "message": "0/2 nodes are available"}
                status["conditions"] = [{"type": "PodScheduled", "status": "False", **words}]

    def start(self, pod: Object) -> None:
        status = pod["status"]
        ready = [{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}]
        status |= {"phase": "Running", "conditions": ready}
        self._set_state(pod, {"running": {"startedAt": format_time(self.now_s)}})

    def end(self, name: str, code: int, reason: str = "Error", message: str = "", started: str = "") -> None:
        pod = self.pods[name]
        times = {"startedAt": started or format_time(self.now_s - 5), "finishedAt": format_time(self.now_s)}
        self._set_state(pod, {"terminated": {"exitCode": code, "reason": reason, "message": message, **times}})
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        pod["status"]["conditions"] = []
        if "deletionTimestamp" in pod["metadata"]:
            del self.pods[name]

    def list_on(self, node: str) -> list[str]:
        return [name for name, pod in self.pods.items() if pod["spec"].get("nodeName") == node]

    def count_on(self, node: str) -> int:
        return sum(self.pods[name]["status"]["phase"] == "Running" for name in self.list_on(node))

    def list_live(self, role: str = "worker") -> list[str]:
        return [
            name
            for name, pod in self.pods.items()
            if pod["metadata"]["labels"]["edl.io/role"] == role
            and "deletionTimestamp" not in pod["metadata"]
            and pod["status"]["phase"] in ("Pending", "Running")
        ]

    def list_running(self) -> list[str]:
        return [name for name in self.list_live() if self.pods[name]["status"]["phase"] == "Running"]

    def list_ending(self) -> list[str]:
        """Return the names of pods that were asked to end."""
        return [name for name, pod in self.pods.items() if "deletionTimestamp" in pod["metadata"]]

    def find_condition(self, kind: str) -> Object:
        return next(item for item in self.status["conditions"] if item["type"] == kind)

    def settle(self, rounds: int = 60) -> None:
        quiet = 0
        for _ in range(rounds):
            for name in self.list_ending():
                self.end(name, 143)
            plan = self.reconcile()
            before = self.version, sorted(self.pods)
            self.schedule()
            self.now_s += min(400.0, plan.requeue_s or 1.0)
            plan = self.reconcile()
            quiet = quiet + 1 if (self.version, sorted(self.pods)) == before else 0
            if quiet >= 3 and plan.requeue_s is None:
                return

    def _set_state(self, pod: Object, state: Object) -> None:
        name = pod["spec"]["containers"][0]["name"]
        pod["status"]["containerStatuses"] = [{"name": name, "state": state}]
