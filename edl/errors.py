"""All error classes of EDL.

Callers usually distinguish only `TemporaryError` and `PermanentError`; the subclasses name the cause. Errors of
libraries (grpc, sqlite3, requests) are translated where EDL calls the library, with `raise … from`.
"""

from __future__ import annotations


class EDLError(Exception):
    """Base class of all EDL errors."""


class SettingsError(EDLError, ValueError):
    """A setting, argument or URL is unusable. The message names the value and what is accepted."""


class ClosedError(EDLError, RuntimeError):
    """The object was closed, or belongs to the process that this process was forked from."""


class TemporaryError(EDLError):
    """The same call may succeed later."""


class DiscoveryError(TemporaryError):
    """The registry or the store did not respond. Never raised because nothing was found."""


class KubernetesError(TemporaryError):
    """The Kubernetes API server did not respond: it is unreachable, slow or overloaded. Never raised for "none".

    A requested change may or may not have been made: check before continuing.

    Attributes:
        retry_after_s: seconds to wait before a retry, as the server asks; 0 if it does not say.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceededError(TemporaryError):
    """A ResourceQuota of the namespace leaves no room for the object. Contains the server's message."""


class JournalError(TemporaryError):
    """A journal cannot be written or read: the disk is full, or the file or store unreachable. The message says which.

    The last write may or may not have succeeded: the writer stops, and the next process reads what was written.

    Attributes:
        busy: another process holds it, or the store is down: a retry may succeed.
    """

    def __init__(self, message: str, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


class NoMasterError(TemporaryError, TimeoutError):
    """No master of the job responded within the timeout."""


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
    """Kubernetes refuses the credentials or the request. The message names the missing RBAC rule."""


class InvalidObjectError(PermanentError):
    """Kubernetes refuses an object (a field, a policy, a terminating namespace), or does not know its kind."""


class ConflictError(PermanentError):
    """Another holder has the key, lock or name."""


class LeaseLostError(PermanentError):
    """The lease expired: its keys or shards are gone, and may belong to another process by now."""


class PoisonedShardsError(PermanentError):
    """Shards were given up after repeated failures. `edl status JOB` shows them with their reasons."""


class SourceError(PermanentError):
    """The user's data cannot be read, have changed, or are not as expected. The message names the file or field."""


class RejectedError(PermanentError):
    """Teachers refuse a request as invalid. Contains their message."""


class BadOutputError(PermanentError):
    """Several teachers answered the same samples with unusable outputs (NaN, wrong shape or name)."""


class ProtocolError(PermanentError):
    """Bytes or messages that do not follow the wire protocol."""
