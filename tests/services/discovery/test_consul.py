"""What only Consul has: its catalog and DNS, services of others, ACLs, TLS, agents that lose their servers."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.discovery import Instance, Registry, Snapshot, Store, open_registry, open_store
from edl.discovery.consul_client import ConsulClient
from edl.errors import DiscoveryError, SettingsError
from tests.certificates import Authority
from tests.fast.discovery.conformance.backends import ConsulBackend, teacher
from tests.fast.discovery.conformance.fixtures import PATIENT_S
from tests.fast.discovery.conformance.suite import LONG_S, refusal, seen
from tests.plugins_consul import ConsulAgent
from tests.waiting import DEADLINE_S, wait_until

TOKEN = "0b3c9a52-8f5e-4f8e-9b52-3d1c6f9a7e11"


@pytest.fixture
def backend(consul_agent: ConsulAgent) -> ConsulBackend:
    return ConsulBackend(consul_agent)


@contextlib.contextmanager
def foreign(agent: ConsulAgent, name: str, **fields: object) -> Iterator[str]:
    """A service of another program's; yields its number."""
    number = f"foreign-{uuid.uuid4()}"
    agent.ask("/v1/agent/service/register", "PUT", {"Name": name, "ID": number, "Port": 8001, **fields})
    try:
        yield number
    finally:
        agent.ask(f"/v1/agent/service/deregister/{number}", "PUT")


# The catalog


def test_teacher_is_an_ordinary_service(consul_agent: ConsulAgent, registry: Registry, service: str) -> None:
    """Found in the catalog, and so by Consul's DNS."""
    instance = Instance(
        service, "gpu-7:0", "127.0.0.1", 8123, 2.5, "draining", "digits", tags=("fast",), meta={"zone": "b"}
    )
    with registry.register(instance, LONG_S):
        (entry,) = wait_until(lambda: consul_agent.ask(f"/v1/health/service/{service}?passing"))
        found = entry["Service"]
        assert (found["Address"], found["Port"], found["Tags"]) == ("127.0.0.1", 8123, ["fast"])
        own = {"model": "digits", "capacity": "2.5", "state": "draining", "edl-id": "gpu-7:0"}
        assert found["Meta"] == {**own, "zone": "b"}
        assert "gpu-7" in found["ID"]
        (check,) = [check for check in entry["Checks"] if check["ServiceID"] == found["ID"]]
        assert (check["Type"], check["Status"]) == ("ttl", "passing")
        assert check["Definition"].get("DeregisterCriticalServiceAfter", "1m") in ("1m", "1m0s")
    wait_until(lambda: not consul_agent.ask(f"/v1/catalog/service/{service}"))


def test_foreign_services_are_seen(consul_agent: ConsulAgent, registry: Registry, service: str) -> None:
    """Those whose name no teacher can have are left out: whoever asks for each in the list gets an answer."""
    with (
        foreign(consul_agent, service) as number,
        foreign(consul_agent, odd := f"{service}/api"),
        foreign(consul_agent, f"{service} api"),
    ):
        (found,) = wait_until(lambda: registry.snapshot(service).instances)
        assert (found.port, found.capacity, found.state, found.model) == (8001, 1.0, "ready", "")
        assert found.id.endswith(f"/{number}")
        wait_until(lambda: service in registry.services() and odd in consul_agent.ask("/v1/catalog/services"))
        assert "consul" not in registry.services()
        for name in registry.services():
            registry.snapshot(name)


def test_only_silence_is_a_lapse(consul_agent: ConsulAgent, registry: Registry, service: str) -> None:
    check = {"Name": "http", "TTL": "60s", "Status": "critical"}
    with foreign(consul_agent, service, Check=check) as number, registry.register(teacher(service), LONG_S):
        wait_until(lambda: registry.snapshot(service).instances)
        assert not registry.snapshot(service).lapsed, "a check of somebody else's fails: it is not well"
        found = consul_agent.ask("/v1/agent/services")
        (own,) = [name for name, entry in found.items() if entry["Service"] == service and name != number]
        consul_agent.ask(f"/v1/agent/service/maintenance/{own}?enable=true", "PUT")
        wait_until(lambda: not registry.snapshot(service).instances)
        assert not registry.snapshot(service).lapsed, "a person took it out"
        consul_agent.ask(f"/v1/agent/service/maintenance/{own}?enable=false", "PUT")
        wait_until(lambda: registry.snapshot(service).instances)


# Watches


def test_quiet_watch_asks_nothing(registry: Registry, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []
    send = ConsulClient._send

    def counted(self: ConsulClient, method: str, url: str, *rest: object) -> object:
        paths.extend([url] if service in url else [])  # of others, which earlier tests closed, some may end late
        return send(self, method, url, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ConsulClient, "_send", counted)
    with registry.watch(service) as watch:
        assert watch.get(DEADLINE_S) == Snapshot(service, ())
        assert watch.get(1.0) is None
        assert len(paths) <= 3, paths


def test_missing_servers_are_an_outage(stack: contextlib.ExitStack, tmp_path: Path, service: str) -> None:
    """Those behind an agent that lives."""
    server = stack.enter_context(ConsulAgent(tmp_path / "server", {"node_name": "server"}))
    client = {"node_name": "client", "server": False, "bootstrap_expect": 0, "retry_join": [server.lan_address]}
    agent = stack.enter_context(ConsulAgent(tmp_path / "client", client))
    registry = stack.enter_context(open_registry(agent.url))
    store = stack.enter_context(open_store(agent.url))
    stack.enter_context(registry.register(teacher(service), LONG_S))
    lease = stack.enter_context(store.lease(1.0))
    watch = stack.enter_context(registry.watch(service))
    healthy = seen(watch, "a")
    server.kill()
    stale = watch.get(DEADLINE_S) or pytest.fail("the watch does not notice")
    assert (bool(stale.stale), stale.instances) == (True, healthy.instances)
    with pytest.raises(DiscoveryError):
        registry.register(teacher(service, "b"))
    wait_until(lambda: lease.lost)
    server.start()
    while stale.stale:
        stale = watch.get(DEADLINE_S) or pytest.fail("the watch does not recover")
        assert stale.instances == healthy.instances


# ACLs and TLS


@pytest.fixture(scope="module")
def agent_with_acl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsulAgent]:
    config = {"acl": {"enabled": True, "default_policy": "deny", "tokens": {"master": TOKEN, "agent": TOKEN}}}
    with ConsulAgent(tmp_path_factory.mktemp("consul-acl"), config, token=TOKEN) as agent:
        yield agent


def use(registry: Registry, store: Store, service: str) -> str:
    """All that needs rights; what is shown of it."""
    with (
        registry.register(teacher(service), 2.0) as registration,
        registry.watch(service) as watch,
        store.lease(LONG_S) as lease,
        store.elect(service, b"me", LONG_S) as election,
    ):
        seen(watch, "a")
        assert registry.snapshot(service).instances
        entry = store.put(f"{service}/a", b"1", lease)
        entry = store.compare_and_set(entry.key, b"2", entry.version, lease) or pytest.fail("not set")
        assert store.delete(entry.key, entry.version)
        assert election.wait(DEADLINE_S)
        return "".join(
            repr(thing) + repr(vars(thing)) for thing in (registry, store, registration, watch, lease, election)
        )


def test_token_opens_acls_and_is_not_shown(
    agent_with_acl: ConsulAgent, service: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", TOKEN)
    url = agent_with_acl.url
    with open_registry(url, timeout_s=PATIENT_S) as registry, open_store(url, timeout_s=PATIENT_S) as store:
        shown = use(registry, store, service)
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", wrong := str(uuid.uuid4()))
    with open_registry(url) as registry, open_store(url) as store, registry.watch(service) as watch:
        for call in (
            lambda: registry.snapshot(service),
            lambda: registry.register(teacher(service)),
            lambda: store.get("a"),
            lambda: store.put("a", b""),
            store.lease,
        ):
            assert "CONSUL_HTTP_TOKEN" in refusal(call)
            shown += refusal(call)
        refused = watch.get(DEADLINE_S) or pytest.fail("the watch says nothing")
        assert "CONSUL_HTTP_TOKEN" in refused.stale
    monkeypatch.delenv("CONSUL_HTTP_TOKEN")
    with open_registry(url) as registry:
        assert "set CONSUL_HTTP_TOKEN" in refusal(lambda: registry.register(teacher(service)))
    shown += repr(refused) + caplog.text
    assert TOKEN not in shown
    assert wrong not in shown


def test_list_that_acls_filter_is_error(
    agent_with_acl: ConsulAgent, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consul answers with an empty list where the token may not read, and a student would let go of all teachers."""
    monkeypatch.setattr("edl.discovery.watching.QUERY_S", 1.0)  # a question that was asked before waits so
    rules = f'service "{service}" {{ policy = "read" }} node_prefix "" {{ policy = "read" }}'
    policy = agent_with_acl.ask("/v1/acl/policy", "PUT", {"Name": service, "Rules": rules})
    anonymous = "/v1/acl/token/00000000-0000-0000-0000-000000000002"
    agent_with_acl.ask(anonymous, "PUT", {"Policies": [{"ID": policy["ID"]}]})
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", TOKEN)
    with open_registry(agent_with_acl.url) as writer, writer.register(teacher(service), LONG_S):
        monkeypatch.delenv("CONSUL_HTTP_TOKEN")
        with open_registry(agent_with_acl.url) as registry, registry.watch(service) as watch:
            wait_until(lambda: not refusal(lambda: registry.snapshot(service)))
            seen(watch, "a")
            assert registry.services() == (service,), "a token for one service sees that one"
            agent_with_acl.ask(anonymous, "PUT", {"Policies": []})
            for call in (lambda: registry.snapshot(service), registry.services):
                wait_until(lambda call=call: "set CONSUL_HTTP_TOKEN" in refusal(call), "an error, no empty list")
            filtered = next(snapshot for snapshot in iter(lambda: watch.get(DEADLINE_S), None) if snapshot.stale)
            assert "service:read is missing" in filtered.stale
            assert filtered.instances, "the teachers known last are gone"


def test_tls_follows_consuls_variables(tmp_path: Path, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an agent that shows a certificate for 127.0.0.1, and asks its clients for one."""
    authority = Authority()
    ca = authority.save(tmp_path)
    server = authority.issue("127.0.0.1", "server.dc1.consul").save(tmp_path, "server")
    client = authority.issue("client").save(tmp_path, "client")
    files = {"ca_file": ca, "cert_file": server["cert"], "key_file": server["key"]}
    config = {**files, "verify_incoming_rpc": False, "verify_incoming_https": True}
    agent = ConsulAgent(tmp_path / "agent", config, https=True)
    secure = agent.url.replace("consul:", "consul+https:")

    def refused(url: str = secure) -> str:
        with open_registry(url) as registry:
            return refusal(lambda: registry.snapshot(service))

    def works(url: str = secure, **variables: str) -> None:
        with monkeypatch.context() as other:
            for name, value in variables.items():
                other.setenv(name, value)
            with open_registry(url, timeout_s=PATIENT_S) as registry, open_store(url, timeout_s=PATIENT_S) as store:
                use(registry, store, service)

    with agent:
        assert "CERTIFICATE_VERIFY_FAILED" in refused()
        monkeypatch.setenv("CONSUL_CACERT", ca)
        assert "cannot be reached" in refused(), "without a certificate of our own"
        monkeypatch.setenv("CONSUL_CLIENT_CERT", client["cert"])
        monkeypatch.setenv("CONSUL_CLIENT_KEY", client["key"])
        assert refused(agent.url), "plain HTTP to a port that speaks TLS"
        works()
        works(agent.url, CONSUL_HTTP_SSL="true")
        works(CONSUL_TLS_SERVER_NAME="server.dc1.consul")
        monkeypatch.setenv("CONSUL_TLS_SERVER_NAME", "somebody.else")
        assert "CERTIFICATE_VERIFY_FAILED" in refused()
        assert "somebody" in refused()
        monkeypatch.delenv("CONSUL_CACERT")
        works(CONSUL_HTTP_SSL_VERIFY="false")
        monkeypatch.setenv("CONSUL_CACERT", str(tmp_path / "missing.pem"))
        with pytest.raises(SettingsError, match="CONSUL_CACERT"):
            open_registry(secure)
