"""States for the page: an empty one, one with everything in it, a huge one, and one with hostile names."""

from __future__ import annotations

import math
from typing import Any

NOW = 1_795_392_000.0  # Monday, 23 November 2026, 00:00 UTC
CHECKSUM = "OSError: part-0117.parquet: page 4 has a wrong checksum"
EXPIRED = "lease of node-a.cluster.example/0 expired"
DEMAND = "students ask for 1,950 rows/s, and 3 ready teachers give 1,230"
GAIN = "a fourth worker gains 24% for the 41 min that remain"
NAMELESS = "run-" + 2 * "0123456789abcdef"
CATEGORIES = ("train", "save", "load", "rollback", "rendezvous", "idle", "down")
HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\u202egnp.exe\u202e",
    "وظيفة التدريب",
    "🚀🧑‍🚀 job",
    "__proto__",
    "constructor",
    "x" * 300,
    "",
    "a\nb\tc\x00d",
    "javascript:alert(1)",
]

EMPTY: dict[str, Any] = {
    "time": NOW, "store": "sqlite:///srv/ada/.cache/edl/discovery.sqlite", "stale": "", "job": None, "jobs": [],
    "services": [], "events": [],
}  # fmt: skip


def history(points: int = 300, step_s: float = 2.0, now: float = NOW) -> list[dict[str, Any]]:
    """A job that loads, trains, loses a node in the middle, and trains on."""
    spent = dict.fromkeys(CATEGORIES, 0.0)
    found = []
    for index in range(points):
        part = index / points
        if part < 0.06 or 0.5 <= part < 0.53:
            share = {"load": 0.4, "rollback": 0.2, "rendezvous": 0.4}
        elif 0.7 <= part < 0.72:
            share = {"down": 1.0}
        else:
            share = {"train": 0.94, "save": 0.04, "idle": 0.02}
        for name, amount in share.items():
            spent[name] += amount * step_s
        workers, moving = 4 if part < 0.5 else 3, "train" in share
        found.append({
            "t": now - (points - 1 - index) * step_s, "seconds": dict(spent), "world_size": workers,
            "samples_per_s": workers * 310 * (1 + 0.04 * math.sin(index)) if moving else 0.0,
            "steps_per_s": 4.8 if moving else 0.0, "goodput": spent["train"] / sum(spent.values()),
        })  # fmt: skip
    return found


def job(name: str = "resnet50-imagenet", points: int = 300, now: float = NOW) -> dict[str, Any]:
    """A job that runs, with a master that has poisoned shards."""
    past = history(points, now=now)
    nodes = [
        {
            "node": f"node-{letter}.cluster.example", "ranks": ranks, "workers": 1, "state": state, "silent_s": 0.4,
            "began": now - 600, "generation": 3, "step": 2871, "steps_per_s": 4.8,
            "samples_per_s": 310.0 if ranks else 0.0, "goodput": 0.87, "replica_age_s": 0.4,
        }
        for letter, ranks, state in (("a", [0], "train"), ("b", [1], "train"), ("c", [2], "save"), ("d", None, "lost"))
    ]  # fmt: skip
    return {
        "job": name, "state": "running", "message": "", "generation": 3, "world_size": 3, "step": 2871,
        "steps_per_s": 4.83, "samples_per_s": 927.4, "goodput": past[-1]["goodput"], "began": now - 2 * points,
        "elapsed_s": 2.0 * points, "seconds": past[-1]["seconds"], "nodes": nodes, "left_out": [], "events": [
            {"time": now - points, "kind": "kill", "node": "node-d.cluster.example", "text": "rank 3",
             "cause": "signal 9 from outside"},
            {"time": now - points + 2, "kind": "generation", "node": "node-a.cluster.example",
             "text": "3 of 3 ranks", "cause": "node-d.cluster.example was lost"},
        ],
        "history": past,
        "master": {
            "endpoint": "10.0.0.7:31999", "term": 2, "age_s": 0.6, "datasets": [
                {"name": "imagenet-train", "kind": "parquet", "epoch": 0, "epochs": 2, "units": 1281167,
                 "shards": {"todo": 611, "doing": 8, "done": 380, "poisoned": 2}, "units_per_s": 915.2, "eta_s": 1702.0,
                 "poisoned": [
                     {"shard": 117, "start": 149760, "stop": 151040, "failures": [
                         {"holder": "node-d.cluster.example/3", "reason": CHECKSUM, "time": now - 300},
                         {"holder": "node-a.cluster.example/0", "reason": EXPIRED, "time": now - 200},
                         {"holder": "node-b.cluster.example/1", "reason": CHECKSUM, "time": now - 90}]},
                     {"shard": 118, "start": 151040, "stop": 152320, "failures": [
                         {"holder": "node-b.cluster.example/1", "reason": "ValueError: label 1000", "time": now - 60}]},
                 ],
                 "holders": [
                     {"holder": f"node-{letter}.cluster.example/{rank}", "leases": 2, "units_done": 160000 - 900 * rank,
                      "units_per_s": 305.1, "seen_s": 0.7} for letter, rank in (("a", 0), ("b", 1), ("c", 2))]},
                {"name": "validation", "kind": "lines", "epoch": 0, "epochs": 1, "units": 50000,
                 "shards": {"todo": 40, "doing": 2, "done": 8, "poisoned": 0}, "units_per_s": 12.0, "eta_s": 3400.0,
                 "poisoned": [], "holders": []},
            ],
        },
        "wanted_workers": {"count": 4, "now": 3, "since": now - 120,
                           "reason": f"{GAIN}, and a restart costs 6 s"},
    }  # fmt: skip


def service(name: str = "digits", teachers: int = 4, students: int = 2, now: float = NOW) -> dict[str, Any]:
    """A service with a teacher that drains."""
    states = ["ready"] * (teachers - 1) + ["draining"]
    asked = [f"student-{number}" for number in range(1, students + 1)]
    ids = [f"teacher-{number}" for number in range(1, teachers + 1)]
    return {
        "service": name, "teachers": [
            {"id": name_, "endpoint": f"10.0.1.{index}:8500", "model": "resnet152", "version": "sha256:4be1b7c2",
             "state": state, "rows_per_s": 410.5 - index, "queue_rows": 32 * index, "compute_share": 0.93,
             "students": asked[index % 2:]} for index, (name_, state) in enumerate(zip(ids, states, strict=True))],
        "students": [
            {"id": student, "job": NAMELESS, "rows_per_s": 800.0, "wait_share": 0.31, "teachers": ids[:-1]}
            for student in asked],
        "wanted": {"count": 5, "now": teachers, "since": now - 45,
                   "reason": f"{DEMAND}: demand is above 90% for 15 s",
                   "decisions": [{"time": now - 45, "count": 5, "reason": "demand above 90%"}]},
        "history": [{"t": now - 600 + 2 * index, "rows_per_s": 1200 + 60 * math.sin(index / 9),
                     "teachers": 3 if index < 200 else 4, "wanted": 3 if index < 150 else 5,
                     "wait_share": 0.3} for index in range(300)],
    }  # fmt: skip


def rich(now: float = NOW) -> dict[str, Any]:
    """Everything that the page can show."""
    done = job("digits-student", 120, now)
    done |= {"state": "done", "master": None, "wanted_workers": None, "nodes": [], "events": []}
    down = job("bert-large", 200, now - 30)
    down |= {
        "state": "down", "message": "no sign of life for 30 s", "master": None, "wanted_workers": None, "events": [],
        "left_out": [{"node": "node-e", "reason": "Xid 79: GPU has fallen off the bus", "clear": "reboot"}],
    }  # fmt: skip
    return EMPTY | {
        "time": now, "jobs": [job(now=now), down, done], "services": [service(now=now)], "events": [
            event(now - 300, "kill", "rank 3", "signal 9 from outside", node="node-d.cluster.example"),
            event(now - 298, "generation", "3 ranks on 3 nodes", "node-d was lost", node="node-a.cluster.example"),
            event(now - 120, "wanted", "4 workers wanted, 3 there", GAIN, decision=True),
            event(now - 90, "poisoned", "shard 117 of imagenet-train after 3 failures", CHECKSUM, decision=True),
            event(now - 45, "wanted", "5 teachers wanted, 4 there", DEMAND, job=None, service="digits", decision=True),
            event(now - 3600 * 30, "join", "", "", job="digits-student", node="node-a"),
        ],
    }  # fmt: skip


def event(time: float, kind: str, text: str, cause: str, **fields: Any) -> dict[str, Any]:
    """What happened, by default to the first job."""
    of = {"job": "resnet50-imagenet", "service": None, "node": None, "decision": False}
    return {"time": time, "kind": kind, "text": text, "cause": cause, **of, **fields}


def huge(now: float = NOW) -> dict[str, Any]:
    """As much as a hostile store may have: more than anybody reads of everything."""
    jobs = [job(f"job-{number:02}", now=now) for number in range(25)]
    dataset = jobs[0]["master"]["datasets"][0]
    dataset["poisoned"][0]["failures"] *= 300
    jobs[0]["master"]["datasets"] = [dataset | {"name": f"dataset {number}"} for number in range(60)]
    services = [service("big", 200, 40, now), *(service(f"service {number}", now=now) for number in range(30))]
    events = [event(now - number, "join", f"event {number}", "") for number in range(1000)]
    return EMPTY | {"time": now, "jobs": jobs, "services": services, "events": events}


def renamed(value: Any, name: str) -> Any:
    """Return a part of a state with each of its texts replaced."""
    if isinstance(value, dict):
        return {key: renamed(each, name) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, name) for each in value]
    return name if isinstance(value, str) else value


def hostile(now: float = NOW) -> dict[str, Any]:
    """Names that are more than names, in every place that has one."""
    parts: dict[str, Any] = {"jobs": job(now=now), "services": service(now=now), "events": event(now, "", "", "")}
    state = EMPTY | {name: [renamed(part, text) for text in HOSTILE] for name, part in parts.items()}
    conditions = [condition("Accepted", "Valid", "", now - 620.0), condition("Failed", "", "", 1e300)]
    template = workload("first", members=[member("worker-0")], conditions=conditions)
    cluster = kubernetes(now)["kubernetes"]
    for text in HOSTILE:
        bad = renamed(template, text)
        bad["members"][0]["failures"] = {text: 1}
        cluster["jobs"].append(bad)
    cluster["pools"] += [None, 5, {"members": [None], "conditions": {}}]
    return state | {"time": now, "store": HOSTILE[0], "stale": HOSTILE[1], "kubernetes": cluster}


def workload(
    name: str, phase: str = "Running", *, kind: str = "job", now: float = NOW, **fields: Any
) -> dict[str, Any]:
    """A job or pool of a cluster, as the server sends it."""
    accepted, met = condition("Accepted", "Valid", "", now - 620.0), condition(phase, phase, "", now - 600.0)
    return {
        "kind": kind, "namespace": "research", "name": name, "phase": phase, "job_id": f"{name}-1f3a5c7e",
        "store": "edl://store.edl:29400", "ready": 3, "replicas": 4, "wanted": 4, "min_replicas": 1, "max_replicas": 8,
        "scaling": "auto", "suspended": False, "progress": 62 if kind == "job" else None, "remaining_s": 754.0,
        "created": now - 620.0, "started": now - 610.0, "ended": None, "message": "", "borrowed": 2, "queue": "",
        "conditions": [accepted, met], "members": [], **fields,
    }  # fmt: skip


def condition(kind: str, reason: str, message: str, since: float, status: str = "True") -> dict[str, Any]:
    """What an operator says of a job or pool of a cluster."""
    return {"type": kind, "status": status, "reason": reason, "message": message, "since": since}


def member(name: str, state: str = "ready", **fields: Any) -> dict[str, Any]:
    """A member of a job or pool of a cluster."""
    return {
        "name": name, "pod": f"first-{name}-0", "state": state, "detail": "", "node": "node1.cluster.example",
        "attempt": 0, "failures": {}, "memory_factor": 1.0, "not_before": None, "last_end": None, **fields,
    }  # fmt: skip


def kubernetes(now: float = NOW) -> dict[str, Any]:
    """A cluster with a job that recovers, one that failed, one that was refused, one that is new, and two pools."""
    killed = {"cause": "out_of_memory", "exit_code": 137, "message": "Killed", "time": now - 40.0, "node": "node2"}
    members = [
        member("worker-0"),
        member("worker-1", attempt=2, failures={"out_of_memory": 2}, memory_factor=2.25, last_end=killed),
        member("worker-2", "unscheduled", detail="0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", node=""),
        member("worker-3", "waiting", not_before=now + 25.0, node="", last_end=killed | {"cause": "node_lost"}),
    ]
    trace = 'Traceback (most recent call last):\n  File "/edl/script/train.py", line 31, in <module>\n' + TRACE_END
    failed = condition("Failed", "UserError", trace, now - 3.0)
    refused = condition("Accepted", "MinAboveMax", MIN_ABOVE_MAX, now - 9.0, "False")
    growing = condition("Growing", "NoIdleCapacity", NO_GPU, now - 100.0, "False")
    answers = condition("Ready", "Ready", "2 teachers answer", now - 300.0)
    unknown: dict[str, Any] = dict.fromkeys(("ready", "replicas", "wanted", "progress", "started"))
    jobs = [
        workload("first", now=now, members=members, message="3 of 4 workers are ready"),
        workload("new", "", now=now, conditions=[], **unknown),
        workload("refused", "Rejected", now=now, ready=0, conditions=[refused], message=MIN_ABOVE_MAX, progress=None),
        workload("broken", "Failed", now=now, ready=0, conditions=[failed], ended=now - 3.0, message="UserError"),
    ]
    pools = [
        workload("digits", kind="pool", now=now, ready=2, min_replicas=0, conditions=[answers, growing]),
        workload("vision", "Suspended", kind="pool", now=now, wanted=0, ready=0, scaling="external", borrowed=0),
    ]
    cluster = {"namespaces": ["research"], "stale": "", "looked": now, "jobs": jobs, "pools": pools, "more_jobs": 3}
    return EMPTY | {"time": now, "kubernetes": cluster}


TRACE_END = "ValueError: column 'label' is not in part-0007.parquet"
MIN_ABOVE_MAX = "spec.minReplicas is 9: above spec.maxReplicas (4): lower this field, or raise spec.maxReplicas"
NO_GPU = "no node has an idle nvidia.com/gpu"
