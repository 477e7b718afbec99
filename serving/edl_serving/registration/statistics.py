"""Statistics of a server of another make: Triton's extension `ModelStatistics` of KServe v2.

Triton counts by size of the batch that a model was executed with, so that rows are the sum of sizes times executions,
and compute time is that of executions. (`inference_stats` has the time of a batch once for every request in it.)
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

from __future__ import annotations

from collections.abc import Sequence

from edl.protocol import kserve, names
from edl.protocol.channel import call_metadata, channel
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.transport import grpc
from edl.quoting import shown
from edl.settings import Credentials
from edl_serving.registration.load import TeacherCounts

__all__ = ["ModelStatisticsReader", "count_instances", "counts_of"]

NO_STATISTICS = "the server has no statistics (ModelStatistics of KServe v2)"
NO_BATCHES = "its model has no batch dimension, so that the server counts requests rather than rows"


class ModelStatisticsReader:
    """Asks a server what its model has computed. For a single thread.

    Args:
        target: `host:port` or `unix:/path`.
        model: name of the model.
        timeout_s: for a call.
        credentials: TLS and tokens for the server.

    Raises:
        SettingsError: the credentials cannot be used.
    """

    def __init__(self, target: str, model: str, timeout_s: float, credentials: Credentials) -> None:
        self._target = target
        self._model = model
        self._timeout_s = timeout_s
        self._files = CredentialFiles.of(credentials)
        self._connect()

    def _connect(self) -> None:
        self._version = self._files.current(now=True).version if self._files is not None else 0
        self._call_metadata = call_metadata(self._target, self._files)
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
        self._channel = channel(self._target, self._files, options)
        self._statistics = self._channel.unary_unary(
            names.method("ModelStatistics"),
            request_serializer=kserve.ModelStatisticsRequest.SerializeToString,
            response_deserializer=kserve.ModelStatisticsResponse.FromString,
        )
        self._config = self._channel.unary_unary(
            names.method("ModelConfig"),
            request_serializer=kserve.ModelConfigRequest.SerializeToString,
            response_deserializer=kserve.ModelConfigResponse.FromString,
        )

    def read(self) -> TeacherCounts:
        """Return what the model has computed; without rows, and with the reason, if the server does not say."""
        if self._files is not None and self._files.current().version != self._version:
            self._channel.close()
            self._connect()
        timeout_s, metadata = self._timeout_s, self._call_metadata
        try:
            request = kserve.ModelStatisticsRequest(name=self._model)
            answer = self._statistics(request, timeout=timeout_s, metadata=metadata)
            config = self._config(kserve.ModelConfigRequest(name=self._model), timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as exc:
            return TeacherCounts(None, None, 1, None, _reason(exc))
        except ValueError:  # of gRPC, since `close` was called in another thread
            return TeacherCounts(None, None, 1, None, "the connection is closed")
        return counts_of(answer.model_stats, config.config)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def counts_of(versions: Sequence[kserve.ModelStatistics], config: kserve.ModelConfig) -> TeacherCounts:
    """Return what a model has computed.

    Args:
        versions: the statistics of its versions.
        config: the model's configuration.
    """
    workers = count_instances(config)
    if not config.max_batch_size:
        return TeacherCounts(None, None, workers, None, NO_BATCHES)
    batches = [batch for version in versions for batch in version.batch_stats]
    rows = sum(batch.batch_size * batch.compute_infer.count for batch in batches)
    compute_ns = sum(
        part.ns for batch in batches for part in (batch.compute_input, batch.compute_infer, batch.compute_output)
    )
    return TeacherCounts(rows, compute_ns / 1e9, workers, None)


def count_instances(config: kserve.ModelConfig) -> int:
    """Return how many instances of a model a server has, at least 1.

    Args:
        config: the model's configuration, as the server completes it.
    """
    groups = config.instance_group
    return max(1, sum(max(group.count, 1) * max(len(group.gpus), 1) for group in groups))


def _reason(exc: grpc.RpcError) -> str:
    code = exc.code() if isinstance(exc, grpc.Call) else None
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return NO_STATISTICS
    words = shown(exc.details() or "", 200) if isinstance(exc, grpc.Call) else shown(exc, 200)
    return f"the server does not say what it computed: {code.name if code is not None else ''} {words}".strip()
