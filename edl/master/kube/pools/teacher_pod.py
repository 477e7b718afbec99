"""A teacher's pod: `edl serve` in the pool's template, with probes over HTTP on the port of its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from edl.kube.objects import Object
from edl.master.kube.members.pod_template import POD_ADDRESS, MemberLaunch, build_member_pod
from edl.master.kube.members.pods import find_main_container
from edl.master.kube.pools.updating import REVISION_LABEL, hash_revision
from edl.master.kube.resources import TeacherPool

SERVE_PORT: Final = 8001
"""gRPC, as Triton's: https://github.com/triton-inference-server/server/blob/main/docs/protocol/README.md."""
METRICS_PORT: Final = 8002
"""Metrics and probes, as Triton's."""
_METRICS_NAME: Final = "metrics"
"""The port's name, by which the chart's PodMonitor `edl-teachers` finds it in all teachers, whatever other ports they
have. Where the template gives this name to a port of its own, that one is asked."""
_EXIT_MARGIN_S: Final = 2.0
"""Seconds of the grace period for all but draining: the kubelet's SIGTERM, deregistration, closing the model, and the
end of the interpreter. With less, a teacher that drains to its deadline is killed before it has left discovery."""
_LINGER: Final = "100ms"
"""How long a teacher that leaves still takes requests, after discovery shows it as draining: its students' watches hear
of it within some 10 ms. The pod that takes its GPU waits for this as well; later requests are asked elsewhere."""
_LOADING_S: Final = 1800
"""A model may take so long to be loaded and warmed up before the kubelet restarts its container."""
_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/"""
_PROBE_S: Final = 5
"""Between probes, and for an answer: a teacher's own check waits for 4 s."""


def build_teacher_args(pool: TeacherPool) -> list[str]:
    """Return the arguments of `edl` in a teacher's container; what `spec.serve` says comes last, and wins."""
    drain_s = max(pool.grace_period_s / 2, pool.grace_period_s - _EXIT_MARGIN_S)
    args = ["serve", "--service", pool.service]
    if pool.store:
        args += ["--discovery", pool.store]
    args += ["--host", "0.0.0.0", "--port", str(SERVE_PORT), "--advertise", POD_ADDRESS]
    args += ["--metrics-host", "0.0.0.0", "--metrics-port", str(METRICS_PORT)]
    args += ["--drain-timeout", f"{drain_s:g}s", "--linger", _LINGER]
    return [*args, *pool.serve]


def build_teacher_pod(pool: TeacherPool, index: int, try_number: int, excluded_nodes: Sequence[str] = ()) -> Object:
    """Return the pod of a teacher.

    A container that ends is restarted by the kubelet, as a server's: its pod keeps what it borrowed. So a model that
    crashes at each start is seen as `CrashLoopBackOff`, and its pool does not grow until it starts.
    """
    launch = MemberLaunch(
        "teacher",
        index,
        try_number,
        build_teacher_args(pool),
        labels={REVISION_LABEL: hash_revision(pool), **({_QUEUE_LABEL: pool.queue} if pool.queue else {})},
        excluded_nodes=excluded_nodes,
    )
    pod = build_member_pod(pool, launch)
    spec = pod["spec"]
    spec["restartPolicy"] = "Always"
    main: dict[str, Any] = dict(find_main_container(spec))
    spec["containers"] = [main if item.get("name") == main.get("name") else item for item in spec["containers"]]
    if any(arg.startswith("--metrics-port") for arg in pool.serve):
        return pod  # its probes would ask another port
    main.setdefault("startupProbe", _probe("/livez", failures=_LOADING_S // _PROBE_S))
    main.setdefault("livenessProbe", _probe("/livez", failures=6))
    main.setdefault("readinessProbe", {**_probe("/readyz", failures=1), "periodSeconds": 2})
    own = {"name": "grpc", "containerPort": SERVE_PORT, "protocol": "TCP"}
    main["ports"] = list(main.get("ports") or [own])
    if not any(port.get("name") == _METRICS_NAME for item in spec["containers"] for port in _ports_of(item)):
        main["ports"].append({"name": _METRICS_NAME, "containerPort": METRICS_PORT, "protocol": "TCP"})
    return pod


def _ports_of(container: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [port for port in container.get("ports") or [] if isinstance(port, Mapping)]


def _probe(path: str, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": METRICS_PORT},
        "periodSeconds": _PROBE_S,
        "timeoutSeconds": _PROBE_S,
        "failureThreshold": failures,
    }
