"""Every error that EDL raises on purpose, in a tree.

::

    EDLError
    ├── SettingsError              a value that the user gave cannot be used (also a ValueError)
    ├── ClosedError                the object was closed, or inherited through a fork
    ├── TemporaryError             the same call may succeed later
    │   ├── DiscoveryError         the registry or store cannot be reached
    │   ├── KubernetesError        the API server of Kubernetes is unreachable, too slow or overloaded
    │   ├── QuotaExceededError     a quota of the namespace has no room for the object
    │   ├── JournalError           a file that must survive the process cannot be written or read
    │   ├── NoMasterError          no master of a job within `timeout_s` (also a TimeoutError)
    │   ├── NoTeacherError         no live teacher within `teacher_timeout` (also a TimeoutError)
    │   └── OverloadedError        a teacher's queue is full
    └── PermanentError             the same call will fail again
        ├── AccessDeniedError      Kubernetes refuses the credentials, or the request for lack of rights
        ├── ConflictError          another process won a compare-and-set, a lock or a name
        ├── InvalidObjectError     Kubernetes refuses an object, or does not have its kind
        ├── LeaseLostError         a lease expired before it was renewed
        ├── PoisonedShardsError    shards of a data set were given up after repeated failures
        ├── SourceError            the user's data cannot be read, have changed, or cannot be sent
        ├── RejectedError          teachers refuse the request itself
        ├── BadOutputError         teachers answer with outputs that cannot be used
        └── ProtocolError          bytes or messages that break the wire protocol

A caller usually distinguishes only `TemporaryError` and `PermanentError`; the others say what to do.
Errors of libraries (grpc, sqlite3, requests) are translated where EDL calls them, with `raise … from`.
"""

from __future__ import annotations

__all__ = [
    "AccessDeniedError",
    "BadOutputError",
    "ClosedError",
    "ConflictError",
    "DiscoveryError",
    "EDLError",
    "InvalidObjectError",
    "JournalError",
    "KubernetesError",
    "LeaseLostError",
    "NoMasterError",
    "NoTeacherError",
    "OverloadedError",
    "PermanentError",
    "PoisonedShardsError",
    "ProtocolError",
    "QuotaExceededError",
    "RejectedError",
    "SettingsError",
    "SourceError",
    "TemporaryError",
]


class EDLError(Exception):
    """Base of all errors of EDL."""


class SettingsError(EDLError, ValueError):
    """A setting, argument or URL is unusable. The message names the value and what is accepted."""


class ClosedError(EDLError, RuntimeError):
    """The object was closed, or belongs to the process that this process was forked from."""


class TemporaryError(EDLError):
    """The same call may succeed later."""


class DiscoveryError(TemporaryError):
    """The registry or the store did not answer. Never used for "there is nothing"."""


class KubernetesError(TemporaryError):
    """The API server of Kubernetes did not answer: it is unreachable, slow or overloaded. Never used for "none".

    Whether a change was made is not known: a caller that goes on looks first.

    Attributes:
        retry_after_s: seconds after which the server wants to be asked again; 0 where it says nothing.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceededError(TemporaryError):
    """A ResourceQuota of the namespace has no room for the object. Carries the server's words."""


class JournalError(TemporaryError):
    """A journal cannot be written or read: its disk is full, its file or store is away. The message says which.

    Whether what was written last is there is not known: who wrote it ends, and who comes next reads what is.

    Attributes:
        busy: another process holds it, or the store is away: who waits may find it again.
    """

    def __init__(self, message: str, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


class NoMasterError(TemporaryError, TimeoutError):
    """No master of the job answered for as long as the caller waits. The message says what does."""


class NoTeacherError(TemporaryError, TimeoutError):
    """No teacher was live for `teacher_timeout_s`. The message lists the teachers set aside, and why."""


class OverloadedError(TemporaryError):
    """A teacher's queue is full.

    Attributes:
        retry_after_s: seconds after which the teacher expects to have room.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PermanentError(EDLError):
    """The same call will fail again."""


class AccessDeniedError(PermanentError):
    """Kubernetes refuses the credentials, or what they ask for. The message names the missing rule of RBAC."""


class InvalidObjectError(PermanentError):
    """Kubernetes refuses an object (a field, a policy, a namespace that ends), or does not have its kind."""


class ConflictError(PermanentError):
    """Another holder has the key, lock or name."""


class LeaseLostError(PermanentError):
    """The lease expired: what was attached to it is gone, and may be another's by now."""


class PoisonedShardsError(PermanentError):
    """Shards were given up after they failed again and again. `edl status JOB` shows them with their reasons."""


class SourceError(PermanentError):
    """The user's data cannot be read, have changed, or are not what was expected. Names the file, or the field."""


class RejectedError(PermanentError):
    """Teachers refuse a request as invalid. Carries their words."""


class BadOutputError(PermanentError):
    """Several teachers answered the same samples with unusable outputs (NaN, wrong shape or name)."""


class ProtocolError(PermanentError):
    """Bytes or messages that do not follow the wire protocol."""
