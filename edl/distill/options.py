"""`Options` and `Policy`: deadlines, memory, retries and hedging of a reader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edl.errors import SettingsError
from edl.settings import Credentials, is_above_zero


@dataclass(frozen=True)
class Policy:
    """Limits and deadlines of the dispatcher. Durations are in seconds.

    Attributes:
        window: Largest number of requests in flight at each teacher.
        hedge_after: A request that has been pending for more than this many median latencies of its teacher is sent to
            a second teacher.
        hedge_budget: Extra requests from hedging as a share of all requests; 0 turns hedging off. A request that blocks
            the training loop may exceed this after four times the delay for hedging, but no sooner than after one
            second.
        hedge_min_s: Requests pending for less time than this are never hedged.
        request_timeout_s: A request unanswered after this time is sent to a different teacher.
        failures_to_open: Number of failures in a row after which a teacher is paused.
        open_min_s: Length of a teacher's first pause, and of the first pause before a task that failed on all live
            teachers is sent to one of them again.
        open_max_s: Longest pause; each pause is twice as long as the one before, until a valid answer arrives.
        coming_s: How long after its first failure a task waits for teachers that are still connecting. After that, it
            is sent again to a teacher on which it failed, or is given up.
        aside_s: How long to set a teacher aside after it gave an unusable answer, or rejected a request that another
            teacher accepted.
        task_failures: A task that failed this often, on any teachers, is given up.
        task_losses: A task whose teacher was lost more often than this is given up, because the task itself may be
            crashing the teachers.
    """

    window: int = 32
    hedge_after: float = 2.0
    hedge_budget: float = 0.05
    hedge_min_s: float = 0.02
    request_timeout_s: float = 60.0
    failures_to_open: int = 3
    open_min_s: float = 0.5
    open_max_s: float = 30.0
    coming_s: float = 5.0
    aside_s: float = 30.0
    task_failures: int = 3
    task_losses: int = 20


@dataclass(frozen=True)
class Options:
    """Deadlines, memory and retries of a reader. Durations are in seconds.

    Attributes:
        teacher_timeout_s: How long to wait without a live teacher before `NoTeacherError` is raised.
        memory_bytes: Largest size of the items and answers held ahead of the training loop; the size of pending answers
            is estimated from earlier answers. If answers turn out larger, so that more than twice this size is needed,
            pending requests are cancelled and sent again later. Two requests, and the batch that the training loop
            waits for, are sent whatever their size.
        cache_queue_bytes: Largest size of labels queued for the cache. If the disk cannot keep up, further labels are
            not cached (`stats().rows_not_cached`) and are requested again later.
        linger_s: A partly filled request of samples is sent when the training loop waits for it and the source has
            yielded nothing for this long.
        source_timeout_s: How long a new epoch waits for a source that is still busy with the previous epoch, before
            `TemporaryError` is raised.
        max_request_bytes: Largest size of the inputs in a request, unless a teacher's limit is lower; larger batches
            are split.
        max_answer_bytes: Largest size of an answer.
        shared_memory: Whether to use shared memory for teachers on this host.
        mixed_versions: "warn" accepts labels of several model versions in an epoch and logs a warning; "refuse" accepts
            only labels of the first teacher's version, or of `version=`. See docs/students.md.
        progress_s: Interval between progress log lines (logger `edl.distill`, level INFO).
        publish_load: Whether to publish, through discovery, the load on a service and how long training waits for the
            service, so that EDL can compute how many teachers are needed (docs/scaling.md). None for the value of
            `EDL_PUBLISH_LOAD`, or True if that is not set. Nothing is published with fixed endpoints.
        policy: Settings for windows, hedging and retries.
        credentials: TLS and tokens; None for `EDL_TLS_CA`, `EDL_TOKEN_FILE` and the related variables.

    Raises:
        SettingsError: A value is invalid.
    """

    teacher_timeout_s: float = 60.0
    memory_bytes: int = 512 << 20
    cache_queue_bytes: int = 256 << 20
    linger_s: float = 0.02  # longer than decoding a sample takes, so that a slow source still fills its requests
    source_timeout_s: float = 60.0
    max_request_bytes: int = 1 << 30
    max_answer_bytes: int = 1 << 30
    shared_memory: bool = True
    mixed_versions: Literal["warn", "refuse"] = "warn"
    progress_s: float = 30.0
    publish_load: bool | None = None
    policy: Policy = field(default_factory=Policy)
    credentials: Credentials | None = None

    def __post_init__(self) -> None:
        for name in ("teacher_timeout_s", "source_timeout_s", "progress_s"):
            value = getattr(self, name)
            if not is_above_zero(value):
                raise SettingsError(f"{name}={value!r}: must be a number of seconds above 0")
        if self.linger_s != 0 and not is_above_zero(self.linger_s):
            raise SettingsError(f"linger_s={self.linger_s!r}: must be a number of seconds, 0 or above")
        for name in ("memory_bytes", "cache_queue_bytes", "max_request_bytes", "max_answer_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 << 20:
                raise SettingsError(f"{name}={value!r}: must be a whole number of bytes, at least one MiB ({1 << 20})")
        if self.mixed_versions not in ("warn", "refuse"):
            raise SettingsError(f"mixed_versions={self.mixed_versions!r}: must be 'warn' or 'refuse'")
