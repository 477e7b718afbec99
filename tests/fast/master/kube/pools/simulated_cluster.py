"""A cluster in memory: an API server's pods, a scheduler that preempts, kubelets, and a clock. One GPU a pod."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from edl.kube.objects import format_time
from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.members.pods import read_member_pods
from edl.master.kube.observation import EventNote, OwnerObservation, Plan, StoreAnswer
from edl.master.kube.pools import plan_pool
from edl.master.kube.resources import TeacherPool, parse_teacher_pool
from tests.fast.master.kube.capacity.objects import node

GPU = "nvidia.com/gpu"
TEMPLATE = {"spec": {"containers": [{"name": "edl", "image": "edl", "resources": {"limits": {GPU: "1"}}}]}}


class SimulatedCluster:
    """A cluster with a pool. `capacity`: whether the operator may see what is idle."""

    def __init__(self, gpus: list[int], capacity: bool, **spec: Any) -> None:
        self.now_s = 1_800_000_000.0
        self.nodes = {f"n{number}": count for number, count in enumerate(gpus)}
        self.capacity = capacity
        self.wanted: int | None = None
        self.default_store = ""
        self.store_stale = ""
        self.store_refused = ""
        self.store_unreachable = ""
        self.pods: dict[str, dict[str, Any]] = {}
        self.pod_events: dict[str, dict[str, str]] = {}
        self.events: list[EventNote] = []
        self.created = 0
        self._numbers = itertools.count(1)
        self.resource: dict[str, Any] = {
            "metadata": {"name": "digits", "namespace": "ns", "uid": "pool-uid", "generation": 1},
            "spec": {"serve": ["m.py:load"], "store": "edl://s", "maxReplicas": 4, "template": TEMPLATE, **spec},
            "status": {},
        }

    @property
    def pool(self) -> TeacherPool:
        parsed = parse_teacher_pool(self.resource, self.default_store)
        assert isinstance(parsed, TeacherPool), parsed
        return parsed

    def teachers(self) -> list[dict[str, Any]]:
        """Return teachers that were not asked to leave."""
        found = [pod for pod in self.pods.values() if "edl.io/pool" in pod["metadata"]["labels"]]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def edit(self, **spec: Any) -> None:
        self.resource["spec"].update(spec)
        self.resource["metadata"]["generation"] += 1

    def list_serves(self) -> list[str]:
        return sorted({pod["spec"]["containers"][0]["args"][-1] for pod in self.teachers()})

    def placed(self) -> int:
        return sum("nodeName" in pod["spec"] for pod in self.teachers())

    def pending(self) -> int:
        return sum("nodeName" not in pod["spec"] for pod in self.teachers())

    def plan(self) -> Plan:
        members, reasons = read_member_pods(copy.deepcopy(list(self.pods.values())), "pool-uid", self.pod_events)
        assert not reasons
        capacity = None
        if self.capacity:
            capacity = ClusterCapacity.of([node(name, gpus) for name, gpus in self.nodes.items()], self.pods.values())
        observation = OwnerObservation(
            now_s=self.now_s,
            pods=members,
            capacity=capacity,
            store=StoreAnswer(
                self.wanted,
                stale=self.store_stale,
                refused=self.store_refused,
                unreachable=self.store_unreachable,
            ),
        )
        return plan_pool(self.pool, observation)

    def reconcile(self) -> Plan:
        """Carry a plan out, which has at most one teacher wait for a node."""
        plan = self.plan()
        self.resource["status"] = {name: value for name, value in plan.status.items() if value is not None}
        for deletion in plan.delete:
            assert self.pods[deletion.name]["metadata"]["uid"] == deletion.uid
            self.delete(deletion.name)
        for pod in plan.create:
            assert pod["metadata"]["name"] not in self.pods
            self.add(pod, priority=-100)
            self.created += 1
        assert self.pending() <= 1
        assert len(self.teachers()) <= self.pool.max_replicas + 1, "a successor comes before another goes"
        self.events += plan.events
        return plan

    def add(self, pod: dict[str, Any], priority: int) -> None:
        pod = copy.deepcopy(pod)
        pod["metadata"] |= {"uid": f"uid-{next(self._numbers)}", "creationTimestamp": format_time(self.now_s)}
        pod["spec"]["priority"] = priority
        pod["status"] = {"phase": "Pending", "conditions": []}
        self.pods[pod["metadata"]["name"]] = pod

    def add_online(self, name: str) -> None:
        self.add(
            {"metadata": {"name": name, "namespace": "ns", "labels": {}}, "spec": copy.deepcopy(TEMPLATE["spec"])}, 0
        )

    def delete(self, name: str) -> None:
        pod = self.pods[name]
        if "nodeName" in pod["spec"]:
            pod["metadata"].setdefault("deletionTimestamp", format_time(self.now_s + 10))
        else:
            del self.pods[name]

    def free(self) -> dict[str, int]:
        free = dict(self.nodes)
        for pod in self.pods.values():
            if "nodeName" in pod["spec"]:
                free[pod["spec"]["nodeName"]] -= 1
        return free

    def schedule(self) -> None:
        """Give nodes to pods that wait, by priority; what has one of 0 takes a teacher's place."""
        waiting = [pod for pod in self.pods.values() if "nodeName" not in pod["spec"]]
        for pod in sorted(waiting, key=lambda pod: -pod["spec"]["priority"]):
            free = self.free()
            nominated = [
                other["status"]["nominatedNodeName"]
                for other in waiting
                if other is not pod and "nominatedNodeName" in other["status"] and "nodeName" not in other["spec"]
            ]
            room = [
                name
                for name, count in free.items()
                if count - (nominated.count(name) if pod["spec"]["priority"] < 0 else 0) > 0
            ]
            if room:
                pod["spec"]["nodeName"] = pod["status"].pop("nominatedNodeName", None) or room[0]
                if free[pod["spec"]["nodeName"]] <= 0:
                    pod["spec"]["nodeName"] = room[0]
                continue
            refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            pod["status"]["conditions"] = [refused]
            if pod["spec"]["priority"] < 0 or "nominatedNodeName" in pod["status"]:
                continue
            victims = [teacher for teacher in self.teachers() if "nodeName" in teacher["spec"]]
            if victims:
                victim = victims[-1]
                pod["status"]["nominatedNodeName"] = victim["spec"]["nodeName"]
                self.delete(victim["metadata"]["name"])

    def run_kubelets(self) -> None:
        """End what was asked to end before the last call, and have all else ready."""
        for name, pod in list(self.pods.items()):
            if "deletionTimestamp" in pod["metadata"]:
                if pod["status"].get("ending"):
                    del self.pods[name]
                pod["status"]["ending"] = True
            elif "nodeName" in pod["spec"]:
                pod["status"] |= {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}

    def settle(self, rounds: int = 200, step_s: float = 1.0) -> Plan:
        """Let all of it go on until nothing changes but the clock."""
        for _ in range(rounds):
            plan = self.reconcile()
            self.schedule()
            self.run_kubelets()
            self.now_s += step_s
        return plan
