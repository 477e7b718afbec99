"""py-consul behind a boundary: what EDL asks of Consul, with every error of the library translated here."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import consul.base
from consul.exceptions import ACLPermissionDenied, ConsulException

from edl.discovery.common.resource import Resource
from edl.discovery.consul.target import ConsulTarget
from edl.discovery.consul.transport import ConsulTransport, understood
from edl.errors import DiscoveryError
from edl.quoting import shown

__all__ = ["ConsulClient", "KeyValuePair", "ConsulService"]

Json = Any

_ALIVE = "alive"  # the name of a registration's own check
_NODE_ALIVE = "serfHealth"  # Consul's own name


@dataclass(frozen=True)
class ConsulService:
    """An instance of a service as Consul's health endpoint tells of it.

    Attributes:
        created: grows with every registration.
        health: "passing" if all checks pass; "lapsed" if failing checks say only that a service was not heard of: the
            TTL check of a registration of ours, and the node's own; else "failing".
    """

    node: str
    id: str
    address: str
    port: int
    tags: Sequence[str]
    meta: Mapping[str, str]
    created: int
    health: Literal["passing", "lapsed", "failing"] = "passing"


@dataclass(frozen=True)
class KeyValuePair:
    """A key as Consul holds it; `session` is empty while it is not locked."""

    key: str
    value: bytes
    index: int
    session: str


class _Api(consul.base.Consul):  # type: ignore[misc]
    def __init__(self, target: ConsulTarget) -> None:
        self._target = target
        # Everything is given, so that py-consul looks up nothing in the environment by itself.
        super().__init__(host=target.host, port=target.port, scheme="http", dc=target.dc or None, verify=True)
        self.token = None  # the transport sends it: not every call of every version of py-consul does

    def http_connect(self, *_: Any, **__: Any) -> ConsulTransport:
        return ConsulTransport(self._target)


class ConsulClient(Resource):
    """Calls to an agent. Closing it ends calls that are under way.

    All methods raise DiscoveryError when the agent cannot be reached, or refuses.
    """

    def __init__(self, target: ConsulTarget) -> None:
        super().__init__()
        self.target = target
        self._api = _Api(target)

    def _halt(self) -> None:
        self._api.http.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        self._check()
        try:
            yield
        except ACLPermissionDenied as exc:
            held = "the token in CONSUL_HTTP_TOKEN may not do this" if self.target.token else "set CONSUL_HTTP_TOKEN"
            raise DiscoveryError(f"{self.target}: {shown(exc) or 'permission denied'}: {held}") from exc
        except ConsulException as exc:
            raise DiscoveryError(f"{self.target}: {shown(exc) or type(exc).__name__}") from exc

    # Services

    def instances(self, service: str, index: int | None = None, wait_s: float = 0.0) -> tuple[int, list[ConsulService]]:
        """Return the instances of `service`; with an index, as soon as they differ from what they were then."""
        with self._translated():
            found = self._api.health.service(service, index=index, wait=f"{wait_s:g}s")
            if not found[1]:
                self._check_may_read(service)
            with understood():
                return int(found[0]), [_service(entry) for entry in found[1] or ()]

    def _check_may_read(self, service: str) -> None:
        """Tell that there is nothing from that the token may see nothing: Consul answers both with an empty list.

        It says since 1.11 that it left something out (`X-Consul-Results-Filtered-By-ACLs`), but not whether it would
        have. What its UI asks tells both, since 1.8. An agent without that, or without ACLs, refuses the question.
        """
        question = json.dumps([{"Resource": "service", "Segment": service, "Access": "read"}])
        answer = self._api.http.post(lambda answer: answer, "/v1/internal/acl/authorize", data=question)
        if answer.code != 200:
            return
        with understood():
            if not all(verdict["Allow"] for verdict in json.loads(answer.body)):
                raise ACLPermissionDenied(f"no service:read for {service!r}")

    def service_names(self) -> list[str]:
        """All services in the catalog, with live instances or without."""
        with self._translated():
            found = self._api.catalog.services()[1] or {}
            if not isinstance(found, dict):
                raise ConsulException(f"the answer is not what Consul answers: {found!r:.80}")
            names = [str(name) for name in found]
            if not names:  # Consul's own service is in every catalog, so that all was left out
                raise ACLPermissionDenied("no service:read for any service")
            return names

    def has_leader(self) -> bool:
        """Whether the servers can take a registration."""
        with self._translated():
            leader = self._api.status.leader()
            if not isinstance(leader, str):
                raise ConsulException(f"the answer is not what Consul answers: {leader!r:.80}")
            return bool(leader)

    def register_service(
        self,
        name: str,
        service_id: str,
        ttl_s: float,
        address: str = "",
        port: int = 0,
        tags: Sequence[str] = (),
        meta: Mapping[str, str] | None = None,
    ) -> None:
        """Register a service at the agent, alive until it has not been renewed for `ttl_s`."""
        check = {
            "Name": _ALIVE,
            "TTL": f"{ttl_s:g}s",
            "Status": "passing",
            # Consul removes those that stay away; it rounds up to a minute.
            "DeregisterCriticalServiceAfter": "1m",
        }
        with self._translated():
            taken = self._api.agent.service.register(
                name,
                service_id=service_id,
                address=address,
                port=port,
                tags=list(tags),
                meta=dict(meta or {}),
                check=check,
            )
            if not taken:
                raise ConsulException(f"service {name} was not registered")

    def renew_service(self, service_id: str) -> bool:
        """Say that a service is alive; False if the agent does not know it."""
        with self._translated():
            try:
                return bool(self._api.agent.check.ttl_pass(f"service:{service_id}"))
            except ConsulException:
                # The code and the words for "unknown" differ between versions, so the agent is asked what it knows.
                if self._knows_service(service_id):
                    raise
                return False

    def _knows_service(self, service_id: str) -> bool:
        return bool(self._api.http.get(lambda answer: answer.code != 404, f"/v1/agent/service/{service_id}"))

    def deregister_service(self, service_id: str) -> None:
        """Remove a service from the agent, if it is there."""
        with self._translated():
            self._api.agent.service.deregister(service_id)

    # Sessions

    def create_session(self, service_id: str, ttl_s: float) -> str:
        """Create a session that ends as soon as the service is not alive, and takes the keys that it locks with it.

        A session's own TTL is ten seconds at least, and may be exceeded twice, so the service's check does the work.
        The TTL stays behind it for the case that the agent disappears, and does not run the check.
        """
        with self._translated():
            return str(
                self._api.session.create(
                    name="edl",
                    checks=["serfHealth", f"service:{service_id}"],
                    lock_delay=0,
                    behavior="delete",
                    ttl=max(10, math.ceil(ttl_s)),
                )
            )

    def renew_session(self, session: str) -> bool:
        """Renew; False if the session has ended."""
        with self._translated():
            try:
                self._api.session.renew(session)
            except consul.exceptions.NotFound:
                return False
            return True

    def destroy_session(self, session: str) -> None:
        """End a session now."""
        with self._translated():
            self._api.session.destroy(session)

    # Keys

    def pair(self, key: str) -> KeyValuePair | None:
        """Read a key."""
        with self._translated():
            found = self._api.kv.get(key)[1]
            with understood():
                return None if found is None else _pair(found)

    def pairs(self, prefix: str, index: int | None = None, wait_s: float = 0.0) -> tuple[int, list[KeyValuePair]]:
        """All keys under `prefix`; with an index, as soon as they differ from what they were then."""
        with self._translated():
            found = self._api.kv.get(prefix, recurse=True, index=index, wait=f"{wait_s:g}s")
            with understood():
                return int(found[0]), [_pair(entry) for entry in found[1] or ()]

    def transact(self, *operations: Mapping[str, Any]) -> int | None:
        """Do all of `operations` on keys, or none.

        Returns:
            The index of the last key afterwards; None if an operation refused, for example a check.
        """
        body = json.dumps([{"KV": _encoded(operation)} for operation in operations])
        with self._translated():
            # py-consul's own call makes an error of a refusal.
            return self._api.http.put(_transacted, "/v1/txn", data=body)  # type: ignore[no-any-return]


def _service(found: Json) -> ConsulService:
    node, service = found["Node"], found["Service"]
    return ConsulService(
        node=str(node["Node"]),
        id=str(service["ID"]),
        address=str(service.get("Address") or node["Address"]),
        port=int(service.get("Port") or 0),
        tags=tuple(service.get("Tags") or ()),
        meta=dict(service.get("Meta") or {}),
        created=int(service.get("CreateIndex") or 0),
        health=_health(found.get("Checks") or (), ours="edl-id" in (service.get("Meta") or {})),
    )


def _health(checks: Sequence[Mapping[str, Any]], *, ours: bool) -> Literal["passing", "lapsed", "failing"]:
    failing = [check for check in checks if check["Status"] != "passing"]
    if not failing:
        return "passing"
    # Another check that fails, or maintenance, is somebody's word that the instance is not to be used.
    silent = all(check["CheckID"] == _NODE_ALIVE or check["Name"] == _ALIVE for check in failing)
    return "lapsed" if ours and silent else "failing"


def _pair(found: Json) -> KeyValuePair:
    return KeyValuePair(found["Key"], found["Value"] or b"", int(found["ModifyIndex"]), found.get("Session", ""))


def _encoded(operation: Mapping[str, Any]) -> dict[str, Any]:
    value = operation.get("Value")
    return {**operation, "Value": base64.b64encode(value).decode()} if isinstance(value, bytes) else dict(operation)


def _transacted(answer: consul.base.Response) -> int | None:
    if answer.code == 409:
        return None
    if answer.code == 403:
        raise ACLPermissionDenied(answer.body)
    if answer.code != 200:
        raise ConsulException(f"{answer.code} {answer.body}")
    with understood():
        results = json.loads(answer.body)["Results"] or [{"KV": {"ModifyIndex": 0}}]  # deletions have no result
        return int(results[-1]["KV"]["ModifyIndex"])
