"""Options and settings of teachers (`edl serve`, and the gateway of `edl register`), and `--exit-with`."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from typing_extensions import Self

from edl.background import BackgroundLoop
from edl.discovery.served.addresses import outward_address
from edl.discovery.store_url import servers_of
from edl.errors import SettingsError
from edl.log_output import log_to_stderr
from edl.protocol.tls import CredentialFiles
from edl.settings import Credentials, DiscoverySettings, LoadSettings
from edl_serving import options as v
from edl_serving.backends import MODEL_LOADERS
from edl_serving.backends.source import DEFAULT_MAX_TOKENS, ModelSource
from edl_serving.options import Option, OptionGroup
from edl_serving.registration import ReadyFile, RegistrationSettings, TeacherRegistration
from edl_serving.settings import ServerSettings

NO_DISCOVERY = "none"
_MODEL = OptionGroup(
    "the model (give one of the first seven options)",
    (
        Option("callable", v.text, "TARGET", "a function over numpy arrays: package.module:name or path/file.py:name"),
        Option("factory", v.text, "TARGET", "a function or class that returns such a function; takes --option"),
        Option("torch-factory", v.text, "TARGET", "a function that returns a torch.nn.Module; takes --option"),
        Option("torchscript", v.text, "FILE", "a model saved by torch.jit.save"),
        Option("torch-export", v.text, "FILE", "a model saved by torch.export.save (.pt2)"),
        Option("paddle", v.text, "PREFIX", "a PaddlePaddle inference model: PREFIX.json or .pdmodel, PREFIX.pdiparams"),
        Option("hf", v.text, "FOLDER", "a transformers model: config.json and .safetensors; needs --task"),
        Option("task", v.text, "TASK", "--hf: causal-lm, masked-lm, feature-extraction or sequence-classification"),
        Option("checkpoint", v.text, "FILE", "weights for --torch-factory: a state_dict (.pt) or .safetensors"),
        Option("option", v.json_or_text, "KEY=VALUE", "argument of the factory; repeatable", pairs=True),
        Option("input", v.text, "SPEC", "an input, name:TYPE[size,size] without the batch; repeatable", many=True),
        Option("output", v.text, "SPEC", "an output, same form; found by calling the model if omitted", many=True),
        Option("device", v.text, "DEVICE", "cpu, cuda, cuda:1 or auto (default); comma-separated"),
    ),
)
_SERVER = OptionGroup(
    "the server",
    (
        Option("service", v.text, "NAME", "students find the model under this name (default: --model)"),
        Option("host", v.text, "ADDRESS", "address to listen on (default 127.0.0.1; 0.0.0.0 for other machines)"),
        Option("port", v.port, "PORT", "TCP port (default 0: any free one)"),
        Option("max-batch", v.count, "ROWS", "maximum rows per model call (default 64)"),
        Option("max-delay", v.duration_s, "TIME", "how long a batch waits for more rows, e.g. 5ms (default 0)"),
        Option("metrics-port", v.port, "PORT", "serve /metrics, /livez and /readyz, 0 for any port (default: off)"),
    ),
)
_MORE_MODEL = OptionGroup(
    "more about the model",
    (
        Option("sample", v.text, "FILE", "an .npz file with a batch of each input, for the warm-up"),
        Option("threads", v.count, "N", "CPU threads per model call"),
        Option("autocast", v.text, "DTYPE", "bfloat16 or float16: compute in mixed precision"),
        Option("normalize", v.text, "MEANS/STDS", "imagenet, or m,m,m/s,s,s: turn uint8 images into floats"),
        Option("top-k", v.count, "K", "--hf: maximum log-probabilities per token in a request (default 64)"),
        Option("max-tokens", v.count, "N", "--hf: maximum tokens in a batch or a sequence (default 8192)"),
        Option("dtype", v.text, "DTYPE", "--hf: float32, bfloat16, float16 or auto (default: the checkpoint's)"),
        Option("packing", v.flag, "", "--hf: pack sequences without padding, if the model allows it", negative=True),
        Option(
            "model-version", v.text, "TEXT", "identifies the weights in label caches (default: a hash, if possible)"
        ),
    ),
    advanced=True,
)
_MORE_SERVER = OptionGroup(
    "more about the server",
    (
        Option("model", v.text, "NAME", "name of the model in requests, if not the service's"),
        Option("tensor-channel", v.flag, "", "also accept students' requests over a socket (default)", negative=True),
        Option("channel-port", v.port, "PORT", "TCP port of that socket (default 0: any free one)"),
        Option("max-queue", v.count, "ROWS", "rows that may wait before requests are refused (default 1024)"),
        Option("max-queue-bytes", v.size_bytes, "SIZE", "bytes that may wait, answers included (default 1GiB)"),
        Option("max-message", v.size_bytes, "SIZE", "largest request (default 512MiB)"),
        Option("max-connections", v.count, "N", "clients with open calls (default 1024)"),
        Option("max-streams", v.count, "N", "open streams and tensor channels, for all clients (default 1024)"),
        Option("max-client-bytes", v.size_bytes, "SIZE", "bytes of requests and answers per client (default 1GiB)"),
        Option("drain-timeout", v.duration_s, "TIME", "how long SIGTERM waits for requests in flight (default 30s)"),
        Option("linger", v.duration_s, "TIME", "keep serving for this long after draining is announced (default 0.5s)"),
        Option("check-nan", v.flag, "", "return an error instead of NaN (default)", negative=True),
        Option("shared-memory", v.flag, "", "let students on this host use shared memory (default)", negative=True),
        Option("shared-memory-user", v.user, "USER", "accept (copy) this user's shared memory; repeatable", many=True),
        Option("metrics-host", v.text, "ADDRESS", "metrics address (default 127.0.0.1)"),
        Option("canary", v.duration_s, "TIME", "run a sample row at this interval; not ready while it fails"),
        Option("canary-timeout", v.duration_s, "TIME", "how long that row may take, queueing included (default 30s)"),
        Option("stall-timeout", v.duration_s, "TIME", "/livez fails if a model call takes longer (default 30min)"),
        Option("access-log", v.text, "PATH", "one JSON line per request; - for standard output (default: none)"),
    ),
    advanced=True,
)
STORE_OPTION = Option(
    "store",
    v.text,
    "URL",
    "sqlite:///path, edl://host:29400, consul://host:8500 or etcd://host:2379"
    " (default: EDL_DISCOVERY, else your SQLite file)",
    alias="discovery",
)
REGISTRATION_OPTIONS = (
    Option("ttl", v.duration_s, "TIME", "time until a dead process counts as gone (default: EDL_TTL_S, or 10s)"),
    Option("id", v.text, "NAME", "id, unique within the service (default: host name and port)"),
    Option("capacity", v.number, "WEIGHT", "a teacher with 2 takes twice as many students as with 1 (default 1)"),
    Option("tag", v.text, "TEXT", "a tag; repeatable", many=True),
    Option("meta", v.text, "KEY=VALUE", "metadata that students can read; repeatable", pairs=True),
    Option("publish-load", v.flag, "", "publish rows and compute time (default; EDL_PUBLISH_LOAD)", negative=True),
)
_TLS = "TLS and tokens (docs/security.md); files are reread on change"
_CREDENTIALS = OptionGroup(
    _TLS,
    (
        *v.credential_options("server", "students"),
        Option("max-connection-age", v.duration_s, "TIME", "mutual TLS: recheck certificates this often (default 1h)"),
        Option("open-health", v.flag, "", "answer health checks without a token (default)", negative=True),
    ),
    advanced=True,
)
CLIENT_CREDENTIALS = OptionGroup(_TLS, v.credential_options("client", "the server"), advanced=True)
_DISCOVERY = OptionGroup(f"discovery (--store {NO_DISCOVERY} to stay out of it)", (STORE_OPTION,))
_MORE_DISCOVERY = OptionGroup(
    "more about discovery",
    (*REGISTRATION_OPTIONS, Option("advertise", v.text, "HOST", "address where students reach this host")),
    advanced=True,
)
PROCESS_OPTIONS = (
    Option("log-format", v.log_format, "FORMAT", "text (default), or json: one object per line"),
    Option("verbose", v.flag, "", "log more", negative=True),
)
_PROCESS = OptionGroup(
    "the process",
    (
        Option("ready-file", v.text, "PATH", "JSON file written when ready: endpoint, port, metrics_port, pid"),
        Option("exit-with", v.count, "PID", "drain and exit when process PID ends"),
        *PROCESS_OPTIONS,
    ),
    advanced=True,
)
SERVER_GROUPS = (_SERVER, _DISCOVERY, _MORE_SERVER, _CREDENTIALS, _MORE_DISCOVERY, _PROCESS)
"""The options that every teacher has, whatever its model is."""
GROUPS = (_MODEL, *SERVER_GROUPS[:2], _MORE_MODEL, *SERVER_GROUPS[2:])
_SERVER_SETTINGS = {
    **{setting.name: "" for setting in fields(ServerSettings) if setting.name != "model"},
    "max_batch": "max_batch_rows",
    "max_delay": "max_delay_s",
    "max_queue": "max_queue_rows",
    "max_message": "max_message_bytes",
    "shared_memory_user": "shared_memory_users",
    "drain_timeout": "drain_timeout_s",
    "canary": "canary_s",
    "canary_timeout": "canary_timeout_s",
    "stall_timeout": "stall_timeout_s",
    "max_connection_age": "max_connection_age_s",
}
_SOURCE_FIELDS = {
    **{field.name: "" for field in fields(ModelSource)},
    "option": "options",
    "input": "inputs",
    "output": "outputs",
    "model_version": "version",
}


def pick(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Select the keys of `names` from `given`, and rename them to the values of `names` (empty: keep the name)."""
    return {new or old: given[old] for old, new in names.items() if old in given}


def refuse_zero(given: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if given.get(key) == 0:
            raise SettingsError(f"--{key.replace('_', '-')} 0: expected a value above 0")


def prepare_process(command: str, given: Mapping[str, Any]) -> None:
    log_to_stderr(command, verbose=given.get("verbose", False), log_format=given.get("log_format", "text"))
    if "exit_with" in given:
        terminate_with_parent(given["exit_with"])


def registration_settings_of(given: Mapping[str, Any], service: str) -> RegistrationSettings:
    settings = DiscoverySettings.of(given.get("store"), given.get("ttl"))
    return RegistrationSettings(
        service=service,
        url=None if settings.url == NO_DISCOVERY else settings.url,
        ttl_s=settings.ttl_s,
        id=given.get("id"),
        capacity=given.get("capacity", 1.0),
        tags=given.get("tag", ()),
        meta=given.get("meta", {}),
        load=LoadSettings.of(given.get("publish_load")),
    )


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Settings to serve and register a teacher.

    Attributes:
        address: Host name or address at which students reach this server.
        linger_s: Seconds for which the server keeps serving after it is shown as draining, so that students notice
            before they are refused; at most a quarter of the drain timeout.
    """

    server: ServerSettings
    registration: RegistrationSettings
    address: str
    linger_s: float = 0.5
    ready_file: str | None = None

    @classmethod
    def build(cls, given: Mapping[str, Any], **fields: Any) -> Self:
        model = given.get("model") or given.get("service")
        if model is None:
            raise SettingsError("name the service: --service NAME, under which students find the model")
        registration = registration_settings_of(given, given.get("service") or model)
        address = _advertised_address(given, registration.url)
        registration.check(address)
        rest = pick(given, {"linger": "linger_s", "ready_file": ""})
        server = _server_settings(model, given)
        return cls(server=server, registration=registration, address=address, **rest, **fields)

    @contextlib.contextmanager
    def registering(self) -> Iterator[TeacherRegistration]:
        """Yield the registration; leave discovery at the end. Raise for wrong credentials before a model is loaded."""
        CredentialFiles.of(self.server.credentials, serving=True)
        with (
            ReadyFile(self.ready_file) as ready_file,
            TeacherRegistration(self.registration, self.address, self.linger_s, ready_file) as registration,
        ):
            yield registration


@dataclass(frozen=True, kw_only=True)
class ServeConfig(TeacherConfig):
    """The settings of `edl serve`: the settings of a teacher, and the model."""

    source: ModelSource

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ServeConfig:
        kinds = [kind for kind in MODEL_LOADERS if kind.replace("-", "_") in given]
        if len(kinds) != 1:
            found = f"got {' and '.join(f'--{kind}' for kind in kinds)}" if kinds else "got none"
            raise SettingsError(f"pass exactly one of {', '.join(f'--{kind}' for kind in MODEL_LOADERS)}; {found}")
        (kind,) = kinds
        source = ModelSource(kind, given[kind.replace("-", "_")], **pick(given, _SOURCE_FIELDS))
        return cls.build(given, source=source)


def _server_settings(model: str, given: Mapping[str, Any]) -> ServerSettings:
    chosen = pick(given, _SERVER_SETTINGS)
    chosen["credentials"] = Credentials.of_options(given)
    if "hf" in given and given.get("task") != "sequence-classification":  # there, rows are texts
        if "max_batch" in given:
            raise SettingsError("rows of --hf are tokens: give --max-tokens in place of --max-batch")
        chosen["max_batch_rows"] = given.get("max_tokens", DEFAULT_MAX_TOKENS)
    if "max_queue" not in given and "max_batch_rows" in chosen:
        chosen["max_queue_rows"] = max(ServerSettings.max_queue_rows, 4 * chosen["max_batch_rows"])
    if "metrics_port" not in given and "metrics_host" in given:
        raise SettingsError("--metrics-host requires --metrics-port")
    return ServerSettings(model, **chosen)


def _advertised_address(given: Mapping[str, Any], url: str | None) -> str:
    if "advertise" in given:
        return str(given["advertise"])
    host = str(given.get("host", ServerSettings.host)).strip("[]")
    if host not in ("0.0.0.0", "::", "*"):
        return host
    return outward_address(server for server, _ in servers_of(url or ""))


_POLL_S = 0.25  # poll interval without pidfd; short enough that tests can soon reuse a port


def terminate_with_parent(pid: int) -> None:
    """Send SIGTERM to this process when process `pid` ends, for whatever reason.

    This process is put into its own process group, so that it ends even if SIGSTOP has paused it. When the end of the
    other process orphans the group, the kernel sends SIGHUP and SIGCONT to its *stopped* members (setpgid(2), POSIX
    "orphaned process group").
    """
    try:
        watched = _open(pid)
    except ProcessLookupError as exc:
        raise SettingsError(f"--exit-with {pid}: there is no such process") from exc
    if os.getpgrp() != os.getpid() and os.getsid(0) != os.getpid():
        os.setpgid(0, 0)
    BackgroundLoop("edl-parent-watch", functools.partial(_terminate_if_gone, pid, watched))


def _open(pid: int) -> int | None:
    if sys.platform == "linux":
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:
            pass  # the kernel or sandbox does not support pidfd
    if not _is_alive(pid):
        raise ProcessLookupError
    return None


def _terminate_if_gone(pid: int, watched: int | None) -> float | None:
    """Send SIGTERM to this process if `pid` has ended; return the seconds until the next check, or None to stop."""
    if watched is not None:
        select.select([watched], [], [])
    elif _is_alive(pid):
        return _POLL_S
    os.kill(os.getpid(), signal.SIGTERM)
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process exists but belongs to another user
    return True
