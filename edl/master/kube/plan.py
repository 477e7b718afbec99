"""`Plan`: what a planner wants done. Only the `Reconciler` does it."""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.kube.objects import Object
from edl.kube.resource_types import ResourceType

__all__ = ["EventNote", "Plan", "PodDeletion"]


@dataclass(frozen=True)
class PodDeletion:
    """A pod that is to end.

    Attributes:
        name: of the pod.
        uid: of the pod; another pod of that name is left alone.
        grace_period_s: seconds that it has to end; None for what the pod says itself.
        reason: for the log.
    """

    name: str
    uid: str
    grace_period_s: int | None
    reason: str


@dataclass(frozen=True)
class EventNote:
    """An event to be shown by `kubectl describe`; the same event again is counted, not repeated.

    Attributes:
        type: `Normal` or `Warning`.
        reason: CamelCase, of a fixed set, for programs.
        message: for a person.
        pod: name of the pod that it is about as well; empty for none.
    """

    type: str
    reason: str
    message: str
    pod: str = ""


@dataclass(frozen=True)
class Plan:
    """What is to be done about a resource, in the order of the attributes.

    `status` comes first: the outcome of a pod is recorded before the pod goes, so that an operator that is killed in
    between never forgets why the pod ended, or gives a number again that was used. Events are shown as soon as it is
    written.

    Attributes:
        status: the whole of it; None in a field removes what was there.
        delete: pods that are to end.
        remove: other objects that are to go: type and name.
        apply: other objects as they are to be, by server-side apply.
        create: pods to be made; a pod of the resource that is there by that name is as good.
        scale_target: replicas that the pool's `scaleTargetRef` is to have; None to leave it as it is.
        events: to be shown.
        delete_owner: the resource itself is to go: its time after its end is over.
        requeue_s: seconds after which to look again, whatever happens; None for no such need.
    """

    status: Object
    delete: tuple[PodDeletion, ...] = ()
    remove: tuple[tuple[ResourceType, str], ...] = ()
    apply: tuple[tuple[ResourceType, Object], ...] = ()
    create: tuple[Object, ...] = ()
    scale_target: int | None = None
    events: tuple[EventNote, ...] = field(default=())
    delete_owner: bool = False
    requeue_s: float | None = None
