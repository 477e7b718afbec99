"""Defines all error classes of EDL.

Callers usually distinguish only `TemporaryError` and `PermanentError`; the subclasses name the cause. Errors from
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
    """The registry or the store did not respond. Never raised if it responded but nothing was found."""


class KubernetesError(TemporaryError):
    """The Kubernetes API server is unreachable, slow or overloaded. Never raised if it answers that nothing exists.

    A requested change may or may not have been made: check before continuing.

    Attributes:
        retry_after_s: seconds to wait before a retry, as the server asks; 0 if the server does not ask for a wait.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceededError(TemporaryError):
    """A ResourceQuota of the namespace leaves no room for the object. The error contains the server's message."""


class JournalError(TemporaryError):
    """A journal cannot be written or read: the disk is full, or the file or store is unreachable, as the message says.

    The last write may or may not have succeeded. The writer stops, and the next process reads what was written.

    Attributes:
        busy: another process holds the journal, or the store is down: a retry may succeed.
    """

    def __init__(self, message: str, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


class NoMasterError(TemporaryError, TimeoutError):
    """No master of the job responded within the timeout."""


class NoTeacherError(TemporaryError, TimeoutError):
    """No teacher was live for `teacher_timeout_s`. The message lists the teachers set aside, with the reasons."""


class OverloadedError(TemporaryError):
    """A teacher's queue is full.

    Attributes:
        retry_after_s: seconds after which the teacher expects to have room in its queue.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PermanentError(EDLError):
    """The same call will fail again."""


class AccessDeniedError(PermanentError):
    """Kubernetes refuses the credentials or the request. The message names the RBAC rule, if one is missing."""


class InvalidObjectError(PermanentError):
    """Kubernetes refuses an object (a field, a policy, a terminating namespace), or does not know its kind."""


class ConflictError(PermanentError):
    """Another holder has the key, lock or name; or an object in Kubernetes exists already or has changed."""


class LeaseLostError(PermanentError):
    """The lease expired: its keys or shards are lost, and may belong to another process by now."""


class PoisonedShardsError(PermanentError):
    """Shards were given up after repeated failures. `edl status JOB` shows these shards with the reasons."""


class SourceError(PermanentError):
    """The user's data cannot be read, have changed, or are not as expected. The message names the file or field."""


class RejectedError(PermanentError):
    """Teachers refuse a request as invalid. The error contains the teachers' message."""


class BadOutputError(PermanentError):
    """Several teachers answered the same samples with unusable outputs (NaN, wrong shape or name)."""


class ProtocolError(PermanentError):
    """Bytes or messages do not follow the wire protocol."""
