"""plan_job against a cluster in which anything happens in any order: what holds always, and what it comes to."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edl.kube.objects import parse_time
from edl.master.kube.jobs import CONDITION_REASONS, EVENT_REASONS
from edl.master.kube.plan import Plan
from tests.unit.master.kube.jobs.simulated_cluster import Reading, SimulatedCluster

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


class FixedRoom:
    """A capacity that says the same of every pod."""

    def __init__(self, room: int) -> None:
        self.room = room

    def count_fitting(self, pod: Any, **_: Any) -> int:
        return self.room


class JobMachine(RuleBasedStateMachine):
    """Pods are scheduled, end, are deleted and lost; operators die, come late, and meet."""

    @initialize(least=st.integers(1, 3), more=st.integers(0, 3), master=st.booleans(), grace=st.integers(1, 90))
    def create_job(self, least: int, more: int, master: bool, grace: int) -> None:
        spec = {"gracePeriodSeconds": grace, "master": {"enabled": master}}
        self.cluster = SimulatedCluster(minReplicas=least, maxReplicas=least + more, **spec)
        self.cluster.nodes = {"node1": 3, "node2": 3}
        self.readings: list[Reading] = []
        self.ends: dict[str, int] = {}
        self.finished = ""

    @rule(rounds=st.integers(1, 8))
    def work(self, rounds: int) -> None:
        """An operator, the scheduler and the kubelets do their work, undisturbed."""
        for _ in range(rounds):
            plan = self.cluster.reconcile()
            self.check(plan)
            self.check_members()
            self.cluster.schedule()
            if self.cluster.list_ending():
                self.cluster.end(self.cluster.list_ending()[0], 143)

    @rule(calls=st.integers(0, 4))
    def operator_is_killed(self, calls: int) -> None:
        self.check(self.cluster.reconcile(calls))

    @rule()
    def operator_reads(self) -> None:
        self.readings = [*self.readings, self.cluster.read()][-2:]

    @precondition(lambda self: self.readings)
    @rule()
    def operator_comes_late(self) -> None:
        self.check(self.cluster.carry_out(self.readings.pop(0)))

    @rule()
    def schedule(self) -> None:
        self.cluster.schedule()

    @rule(seconds=st.sampled_from([1, 15, 70, 400, 2000]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.now_s += seconds

    @rule(data=st.data(), code=st.sampled_from([137, 143, 139, 75]))
    def worker_ends(self, data: st.DataObject, code: int) -> None:
        running = self.cluster.list_running()
        if running:
            reason = data.draw(st.sampled_from(["Error", "OOMKilled"])) if code == 137 else "Error"
            self.cluster.end(data.draw(st.sampled_from(sorted(running))), code, reason)

    @rule(data=st.data(), code=st.sampled_from([0, 1]))
    def worker_ends_the_job(self, data: st.DataObject, code: int) -> None:
        running = self.cluster.list_running()
        if running and data.draw(st.integers(0, 9)) == 9:
            self.cluster.end(data.draw(st.sampled_from(sorted(running))), code)

    @rule(data=st.data())
    def pod_is_deleted(self, data: st.DataObject) -> None:
        if self.cluster.pods:
            self.cluster.ask_to_end(data.draw(st.sampled_from(sorted(self.cluster.pods))))

    @rule(data=st.data())
    def pod_is_gone(self, data: st.DataObject) -> None:
        if self.cluster.pods:
            self.cluster.remove(data.draw(st.sampled_from(sorted(self.cluster.pods))))

    @rule(data=st.data(), code=st.sampled_from([0, 143, 137]))
    def asked_pod_ends(self, data: st.DataObject, code: int) -> None:
        ending = self.cluster.list_ending()
        if ending:
            self.cluster.end(data.draw(st.sampled_from(sorted(ending))), code)

    @rule()
    def node_is_lost_or_back(self) -> None:
        if "node2" in self.cluster.dead:
            self.cluster.return_node("node2")
        else:
            self.cluster.lose_node("node2")

    @rule(lasts=st.booleans(), calls=st.integers(0, 9))
    def user_suspends(self, lasts: bool, calls: int) -> None:
        """For a while, or for as long as an operator takes to do something of it."""
        self.cluster.set_spec(suspend=True)
        self.cluster.reconcile(calls)
        if not lasts:
            self.cluster.set_spec(suspend=False)

    @rule(most=st.integers(3, 6), external=st.booleans(), replicas=st.integers(0, 9))
    def user_scales(self, most: int, external: bool, replicas: int) -> None:
        scaling = "external" if external else "auto"
        self.cluster.set_spec(maxReplicas=most, scaling=scaling, replicas=replicas)

    @rule(wanted=st.none() | st.integers(0, 7), stale=st.sampled_from(["", "away"]))
    def store_says(self, wanted: int | None, stale: str) -> None:
        self.cluster.wanted, self.cluster.stale = wanted, stale

    @rule(allocation=st.none() | st.integers(0, 7))
    def arbiter_says(self, allocation: int | None) -> None:
        self.cluster.allocation = allocation

    @rule(room=st.none() | st.integers(0, 5))
    def capacity_says(self, room: int | None) -> None:
        """Also what is long untrue."""
        self.cluster.capacity = None if room is None else FixedRoom(room)

    def check(self, plan: Plan) -> None:
        """Check what a plan and the status say."""
        names = [pod["metadata"]["name"] for pod in plan.create]
        assert len(set(names)) == len(names)
        assert all(len(name) <= 63 and LABEL.fullmatch(name) for name in names)
        assert all(note.reason in EVENT_REASONS for note in plan.events)
        for condition in plan.status["conditions"]:
            assert condition["reason"] in CONDITION_REASONS[condition["type"]], condition
            assert condition["message"]
        if plan.status["phase"] in ("Succeeded", "Failed", "Suspended"):
            assert plan.create == ()
        assert plan.requeue_s is None or plan.requeue_s > 0

    def check_members(self) -> None:
        """Check the pods that a whole plan leaves."""
        spec, phase = self.cluster.resource["spec"], self.cluster.status["phase"]
        live = self.cluster.list_live() + self.cluster.list_live("master")
        members = [name.rsplit("-", 1)[0] for name in live]
        assert len(set(members)) == len(members), "two live pods of a member"
        assert len(self.cluster.list_live()) <= spec["maxReplicas"]
        if phase in ("Succeeded", "Failed", "Suspended"):
            assert live == []
        elif self.cluster.find_condition("Running")["reason"] != "Ending":
            waiting = [
                key
                for key, record in self.cluster.status["members"].items()
                if "notBefore" in record and parse_time(record["notBefore"]) > self.cluster.now_s
            ]
            assert len(self.cluster.list_live()) + len(waiting) >= spec["minReplicas"], "the minimum is made at once"
        assert self.cluster.status["replicas"] == len(self.cluster.list_live())

    @invariant()
    def what_ended_stays_ended(self) -> None:
        phase = self.cluster.status.get("phase", "")
        if self.finished:
            assert phase == self.finished
        if phase in ("Succeeded", "Failed"):
            self.finished = phase

    @invariant()
    def ends_are_counted_once(self) -> None:
        """A member's last end is always of a later try than the end before it."""
        for key, record in self.cluster.status.get("members", {}).items():
            end = record.get("lastEnd", {"try": -1})
            assert end["try"] >= self.ends.get(key, -1)
            assert record["try"] >= end["try"]
            assert sum(record.get("failures", {}).values()) <= 2 * (record["try"] + 1)
            self.ends[key] = end["try"]

    def teardown(self) -> None:
        """Let all trouble end: the job then has what it wants, or is over, and nothing is written any more."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        for node in ("node1", "node2"):
            cluster.return_node(node)
        cluster.nodes = {"node1": 20, "node2": 20}
        cluster.capacity, cluster.allocation, cluster.wanted, cluster.stale = None, None, None, ""
        cluster.set_spec(suspend=False, scaling="auto")
        for _ in range(6):
            cluster.now_s += 400
            cluster.settle()
        phase = cluster.status["phase"]
        assert phase in ("Running", "Succeeded", "Failed")
        if phase == "Running":
            assert len(cluster.list_running()) == cluster.resource["spec"]["maxReplicas"], cluster.status
        else:
            assert cluster.list_live() == []
            assert cluster.list_live("master") == []
        writes, made = cluster.status_writes, cluster.made
        for _ in range(3):
            cluster.now_s += 100
            plan = cluster.reconcile()
            assert plan.create == plan.delete == plan.events == ()
        assert (cluster.status_writes, cluster.made) == (writes, made), "nothing changes, nothing is written"


JobMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestJobMachine = JobMachine.TestCase
