from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Commit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_REPORT: _ClassVar[Commit]
    COMMIT_CHECKPOINT: _ClassVar[Commit]
COMMIT_REPORT: Commit
COMMIT_CHECKPOINT: Commit

class HelloRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("format", "job", "term")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    format: int
    job: str
    term: int
    def __init__(self, format: _Optional[int] = ..., job: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class DatasetSpec(_message.Message):
    __slots__ = ("kind", "location", "units", "shard_size", "seed", "shuffle", "epochs", "max_failures", "lease_s", "session_s", "commit", "index", "ignore_expiries", "flush_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    SHARD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    MAX_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EXPIRIES_FIELD_NUMBER: _ClassVar[int]
    FLUSH_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    location: str
    units: int
    shard_size: int
    seed: int
    shuffle: bool
    epochs: int
    max_failures: int
    lease_s: float
    session_s: float
    commit: Commit
    index: bytes
    ignore_expiries: bool
    flush_s: float
    def __init__(self, kind: _Optional[str] = ..., location: _Optional[str] = ..., units: _Optional[int] = ..., shard_size: _Optional[int] = ..., seed: _Optional[int] = ..., shuffle: _Optional[bool] = ..., epochs: _Optional[int] = ..., max_failures: _Optional[int] = ..., lease_s: _Optional[float] = ..., session_s: _Optional[float] = ..., commit: _Optional[_Union[Commit, str]] = ..., index: _Optional[bytes] = ..., ignore_expiries: _Optional[bool] = ..., flush_s: _Optional[float] = ...) -> None: ...

class CreateDataset(_message.Message):
    __slots__ = ("dataset", "spec")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    spec: DatasetSpec
    def __init__(self, dataset: _Optional[str] = ..., spec: _Optional[_Union[DatasetSpec, _Mapping]] = ...) -> None: ...

class ExtendDataset(_message.Message):
    __slots__ = ("dataset", "units", "index", "known")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    units: int
    index: bytes
    known: int
    def __init__(self, dataset: _Optional[str] = ..., units: _Optional[int] = ..., index: _Optional[bytes] = ..., known: _Optional[int] = ...) -> None: ...

class EndDataset(_message.Message):
    __slots__ = ("dataset",)
    DATASET_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    def __init__(self, dataset: _Optional[str] = ...) -> None: ...

class DescribeDatasetRequest(_message.Message):
    __slots__ = ("dataset",)
    DATASET_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    def __init__(self, dataset: _Optional[str] = ...) -> None: ...

class DatasetReply(_message.Message):
    __slots__ = ("dataset", "spec", "units", "ended")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    spec: DatasetSpec
    units: int
    ended: bool
    def __init__(self, dataset: _Optional[str] = ..., spec: _Optional[_Union[DatasetSpec, _Mapping]] = ..., units: _Optional[int] = ..., ended: _Optional[bool] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("id", "term", "epoch", "shard", "start", "stop")
    ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    term: int
    epoch: int
    shard: int
    start: int
    stop: int
    def __init__(self, id: _Optional[int] = ..., term: _Optional[int] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class LeaseId(_message.Message):
    __slots__ = ("id", "term")
    ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    id: int
    term: int
    def __init__(self, id: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("lease", "reason", "units")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseId
    reason: str
    units: int
    def __init__(self, lease: _Optional[_Union[LeaseId, _Mapping]] = ..., reason: _Optional[str] = ..., units: _Optional[int] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("dataset", "session", "holder")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    session: str
    holder: str
    def __init__(self, dataset: _Optional[str] = ..., session: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("session", "request", "done", "done_terms", "failed", "want", "returned")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    DONE_TERMS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    session: str
    request: int
    done: _containers.RepeatedScalarFieldContainer[int]
    done_terms: _containers.RepeatedScalarFieldContainer[int]
    failed: _containers.RepeatedCompositeFieldContainer[Failure]
    want: int
    returned: _containers.RepeatedCompositeFieldContainer[Partial]
    def __init__(self, session: _Optional[str] = ..., request: _Optional[int] = ..., done: _Optional[_Iterable[int]] = ..., done_terms: _Optional[_Iterable[int]] = ..., failed: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., want: _Optional[int] = ..., returned: _Optional[_Iterable[_Union[Partial, _Mapping]]] = ...) -> None: ...

class NextRequest(_message.Message):
    __slots__ = ("open", "turn")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    turn: Turn
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("lease", "reason")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseId
    reason: str
    def __init__(self, lease: _Optional[_Union[LeaseId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class NextReply(_message.Message):
    __slots__ = ("request", "leases", "refused", "finished", "poisoned", "wait_s", "epoch", "last_request")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    POISONED_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    refused: _containers.RepeatedCompositeFieldContainer[Refusal]
    finished: bool
    poisoned: int
    wait_s: float
    epoch: int
    last_request: int
    def __init__(self, request: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., finished: _Optional[bool] = ..., poisoned: _Optional[int] = ..., wait_s: _Optional[float] = ..., epoch: _Optional[int] = ..., last_request: _Optional[int] = ...) -> None: ...

class Partial(_message.Message):
    __slots__ = ("lease", "units")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseId
    units: int
    def __init__(self, lease: _Optional[_Union[LeaseId, _Mapping]] = ..., units: _Optional[int] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("session", "mark", "partial")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    session: str
    mark: int
    partial: _containers.RepeatedCompositeFieldContainer[Partial]
    def __init__(self, session: _Optional[str] = ..., mark: _Optional[int] = ..., partial: _Optional[_Iterable[_Union[Partial, _Mapping]]] = ...) -> None: ...

class MarkReply(_message.Message):
    __slots__ = ("mark",)
    MARK_FIELD_NUMBER: _ClassVar[int]
    mark: int
    def __init__(self, mark: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("dataset", "session", "of_holder", "of_session", "mark")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OF_HOLDER_FIELD_NUMBER: _ClassVar[int]
    OF_SESSION_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    session: str
    of_holder: str
    of_session: str
    mark: int
    def __init__(self, dataset: _Optional[str] = ..., session: _Optional[str] = ..., of_holder: _Optional[str] = ..., of_session: _Optional[str] = ..., mark: _Optional[int] = ...) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ("session", "commit")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    session: str
    commit: bool
    def __init__(self, session: _Optional[str] = ..., commit: _Optional[bool] = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetryPoisoned(_message.Message):
    __slots__ = ("dataset", "shards")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    shards: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dataset: _Optional[str] = ..., shards: _Optional[_Iterable[int]] = ...) -> None: ...

class RetryPoisonedReply(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: int
    def __init__(self, shards: _Optional[int] = ...) -> None: ...

class RestoreProgress(_message.Message):
    __slots__ = ("dataset", "progress")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    progress: bytes
    def __init__(self, dataset: _Optional[str] = ..., progress: _Optional[bytes] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: bytes
    def __init__(self, progress: _Optional[bytes] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class BeginTerm(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class Expire(_message.Message):
    __slots__ = ("leases", "sessions")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, leases: _Optional[_Iterable[int]] = ..., sessions: _Optional[_Iterable[str]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("begin_term", "create_dataset", "extend_dataset", "end_dataset", "open_session", "turn", "expire", "mark", "resume", "retry_poisoned", "restore_progress", "close_session", "time_ms")
    BEGIN_TERM_FIELD_NUMBER: _ClassVar[int]
    CREATE_DATASET_FIELD_NUMBER: _ClassVar[int]
    EXTEND_DATASET_FIELD_NUMBER: _ClassVar[int]
    END_DATASET_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    RETRY_POISONED_FIELD_NUMBER: _ClassVar[int]
    RESTORE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    begin_term: BeginTerm
    create_dataset: CreateDataset
    extend_dataset: ExtendDataset
    end_dataset: EndDataset
    open_session: OpenSession
    turn: Turn
    expire: Expire
    mark: Mark
    resume: Resume
    retry_poisoned: RetryPoisoned
    restore_progress: RestoreProgress
    close_session: CloseSession
    time_ms: int
    def __init__(self, begin_term: _Optional[_Union[BeginTerm, _Mapping]] = ..., create_dataset: _Optional[_Union[CreateDataset, _Mapping]] = ..., extend_dataset: _Optional[_Union[ExtendDataset, _Mapping]] = ..., end_dataset: _Optional[_Union[EndDataset, _Mapping]] = ..., open_session: _Optional[_Union[OpenSession, _Mapping]] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ..., expire: _Optional[_Union[Expire, _Mapping]] = ..., mark: _Optional[_Union[Mark, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., retry_poisoned: _Optional[_Union[RetryPoisoned, _Mapping]] = ..., restore_progress: _Optional[_Union[RestoreProgress, _Mapping]] = ..., close_session: _Optional[_Union[CloseSession, _Mapping]] = ..., time_ms: _Optional[int] = ...) -> None: ...

class ShardRange(_message.Message):
    __slots__ = ("epoch", "shard", "start", "stop")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    shard: int
    start: int
    stop: int
    def __init__(self, epoch: _Optional[int] = ..., shard: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class FailureState(_message.Message):
    __slots__ = ("holder", "reason", "time_ms")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    reason: str
    time_ms: int
    def __init__(self, holder: _Optional[str] = ..., reason: _Optional[str] = ..., time_ms: _Optional[int] = ...) -> None: ...

class ShardState(_message.Message):
    __slots__ = ("epoch", "shard", "returned", "poisoned", "failures", "late", "passed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    POISONED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    shard: int
    returned: _containers.RepeatedScalarFieldContainer[int]
    poisoned: _containers.RepeatedScalarFieldContainer[int]
    failures: _containers.RepeatedCompositeFieldContainer[FailureState]
    late: bool
    passed: int
    def __init__(self, epoch: _Optional[int] = ..., shard: _Optional[int] = ..., returned: _Optional[_Iterable[int]] = ..., poisoned: _Optional[_Iterable[int]] = ..., failures: _Optional[_Iterable[_Union[FailureState, _Mapping]]] = ..., late: _Optional[bool] = ..., passed: _Optional[int] = ...) -> None: ...

class MarkState(_message.Message):
    __slots__ = ("session", "mark", "consumed", "open")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    session: str
    mark: int
    consumed: _containers.RepeatedCompositeFieldContainer[ShardRange]
    open: _containers.RepeatedCompositeFieldContainer[ShardRange]
    def __init__(self, session: _Optional[str] = ..., mark: _Optional[int] = ..., consumed: _Optional[_Iterable[_Union[ShardRange, _Mapping]]] = ..., open: _Optional[_Iterable[_Union[ShardRange, _Mapping]]] = ...) -> None: ...

class HistoryState(_message.Message):
    __slots__ = ("session", "holder", "marks", "pending")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    session: str
    holder: str
    marks: _containers.RepeatedCompositeFieldContainer[MarkState]
    pending: _containers.RepeatedCompositeFieldContainer[ShardRange]
    def __init__(self, session: _Optional[str] = ..., holder: _Optional[str] = ..., marks: _Optional[_Iterable[_Union[MarkState, _Mapping]]] = ..., pending: _Optional[_Iterable[_Union[ShardRange, _Mapping]]] = ...) -> None: ...

class LeaseState(_message.Message):
    __slots__ = ("lease", "marked")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    MARKED_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    marked: int
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., marked: _Optional[int] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("session", "holder", "last_request", "reply", "leases", "units_done", "resume", "resume_reply")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    UNITS_DONE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    RESUME_REPLY_FIELD_NUMBER: _ClassVar[int]
    session: str
    holder: str
    last_request: int
    reply: NextReply
    leases: _containers.RepeatedCompositeFieldContainer[LeaseState]
    units_done: int
    resume: Resume
    resume_reply: ResumeReply
    def __init__(self, session: _Optional[str] = ..., holder: _Optional[str] = ..., last_request: _Optional[int] = ..., reply: _Optional[_Union[NextReply, _Mapping]] = ..., leases: _Optional[_Iterable[_Union[LeaseState, _Mapping]]] = ..., units_done: _Optional[int] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., resume_reply: _Optional[_Union[ResumeReply, _Mapping]] = ...) -> None: ...

class DatasetState(_message.Message):
    __slots__ = ("dataset", "spec", "units", "ended", "epoch", "position", "units_done", "shards", "sessions", "histories", "index")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    UNITS_DONE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    HISTORIES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    spec: DatasetSpec
    units: int
    ended: bool
    epoch: int
    position: int
    units_done: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardState]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionState]
    histories: _containers.RepeatedCompositeFieldContainer[HistoryState]
    index: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, dataset: _Optional[str] = ..., spec: _Optional[_Union[DatasetSpec, _Mapping]] = ..., units: _Optional[int] = ..., ended: _Optional[bool] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., units_done: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardState, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionState, _Mapping]]] = ..., histories: _Optional[_Iterable[_Union[HistoryState, _Mapping]]] = ..., index: _Optional[_Iterable[bytes]] = ...) -> None: ...

class EndedSession(_message.Message):
    __slots__ = ("session", "reason")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session: str
    reason: str
    def __init__(self, session: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EndedLease(_message.Message):
    __slots__ = ("id", "dataset", "epoch", "shard", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: int
    dataset: str
    epoch: int
    shard: int
    reason: str
    def __init__(self, id: _Optional[int] = ..., dataset: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class BookState(_message.Message):
    __slots__ = ("format", "term", "last_lease", "datasets", "ended_sessions", "ended_leases")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LAST_LEASE_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ENDED_LEASES_FIELD_NUMBER: _ClassVar[int]
    format: int
    term: int
    last_lease: int
    datasets: _containers.RepeatedCompositeFieldContainer[DatasetState]
    ended_sessions: _containers.RepeatedCompositeFieldContainer[EndedSession]
    ended_leases: _containers.RepeatedCompositeFieldContainer[EndedLease]
    def __init__(self, format: _Optional[int] = ..., term: _Optional[int] = ..., last_lease: _Optional[int] = ..., datasets: _Optional[_Iterable[_Union[DatasetState, _Mapping]]] = ..., ended_sessions: _Optional[_Iterable[_Union[EndedSession, _Mapping]]] = ..., ended_leases: _Optional[_Iterable[_Union[EndedLease, _Mapping]]] = ...) -> None: ...

class ProgressState(_message.Message):
    __slots__ = ("spec", "units", "epoch", "position", "units_done", "shards")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    UNITS_DONE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    spec: DatasetSpec
    units: int
    epoch: int
    position: int
    units_done: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardState]
    def __init__(self, spec: _Optional[_Union[DatasetSpec, _Mapping]] = ..., units: _Optional[int] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., units_done: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardState, _Mapping]]] = ...) -> None: ...
