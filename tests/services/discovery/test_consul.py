"""What only Consul has: its catalog and DNS, services of others, ACLs, TLS, agents that hang or are something else."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from edl.discovery import Instance, Snapshot, open_registry, open_store
from edl.errors import DiscoveryError, SettingsError
from tests.fast.discovery.conformance.backends import eventually, registered, teacher
from tests.plugins_consul import ConsulAgent, free_ports

pytestmark = pytest.mark.consul
TOKEN = "0b3c9a52-8f5e-4f8e-9b52-3d1c6f9a7e11"


def test_teacher_is_an_ordinary_service(consul_agent: ConsulAgent, service: str) -> None:
    instance = Instance(
        service, "gpu-7:0", "127.0.0.1", 8001, 2.5, "draining", "digits", tags=("fast",), meta={"zone": "b"}
    )
    with open_registry(consul_agent.url) as registry, registry.register(instance):
        assert eventually(lambda: consul_agent.ask(f"/v1/health/service/{service}?passing"))
        (entry,) = consul_agent.ask(f"/v1/health/service/{service}?passing")
        found = entry["Service"]
        assert (found["Address"], found["Port"], found["Tags"]) == ("127.0.0.1", 8001, ["fast"])
        assert found["Meta"] == {
            "model": "digits",
            "capacity": "2.5",
            "state": "draining",
            "zone": "b",
            "edl-id": "gpu-7:0",
        }
        assert "gpu-7" in found["ID"]
        (check,) = [check for check in entry["Checks"] if check["ServiceID"] == found["ID"]]
        assert (check["Type"], check["Status"]) == ("ttl", "passing")
        assert check["Definition"].get("DeregisterCriticalServiceAfter", "1m") in ("1m", "1m0s")
    assert eventually(lambda: not consul_agent.ask(f"/v1/catalog/service/{service}"))


def test_a_teacher_is_found_by_dns(consul_agent: ConsulAgent, service: str) -> None:
    with open_registry(consul_agent.url) as registry, registry.register(teacher(service, port=8123)):
        assert eventually(lambda: registry.snapshot(service).instances)
        assert eventually(lambda: _srv_port(consul_agent.dns_port, f"{service}.service.consul")) == 8123


def _srv_port(dns_port: int, name: str) -> int | None:
    """The port of the first SRV record, by hand: the standard library resolves addresses only."""
    question = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.settimeout(5)
        query = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + question + struct.pack("!2H", 33, 1)
        udp.sendto(query, ("127.0.0.1", dns_port))
        answer = udp.recv(4096)
    if struct.unpack("!H", answer[6:8])[0] == 0:
        return None
    record = answer[12 + len(question) + 4 :]  # a pointer to the name, type, class, TTL, length, then the data
    priority_weight_port = struct.unpack("!3H", record[12:18])
    return int(priority_weight_port[2])


def test_foreign_services_are_seen(consul_agent: ConsulAgent, service: str) -> None:
    consul_agent.ask("/v1/agent/service/register", "PUT", {"Name": service, "ID": f"{service}-1", "Port": 8001})
    try:
        with open_registry(consul_agent.url) as registry:
            assert eventually(lambda: registry.snapshot(service).instances)
            (found,) = registry.snapshot(service).instances
            assert (found.endpoint, found.capacity, found.state, found.model) == ("127.0.0.1:8001", 1.0, "ready", "")
            assert found.id.endswith(f"/{service}-1")
            assert service in registry.services()
            assert "consul" not in registry.services()
    finally:
        consul_agent.ask(f"/v1/agent/service/deregister/{service}-1", "PUT")


def test_odd_names_of_others_are_left_out(consul_agent: ConsulAgent, service: str) -> None:
    """Consul takes names that no teacher can have: whoever asks for each service in the list gets an answer."""
    foreign = {f"{service}-slash": f"{service}/api", f"{service}-space": f"{service} api"}
    try:
        for number, name in foreign.items():
            consul_agent.ask("/v1/agent/service/register", "PUT", {"Name": name, "ID": number, "Port": 8001})
        with open_registry(consul_agent.url) as registry, registry.register(teacher(service)):
            assert eventually(lambda: set(foreign.values()) <= set(consul_agent.ask("/v1/catalog/services")))
            assert eventually(lambda: service in registry.services())
            for name in registry.services():
                registry.snapshot(name)
    finally:
        for number in foreign:
            consul_agent.ask(f"/v1/agent/service/deregister/{number}", "PUT")


def test_registrations_survive_a_restart(consul_agent: ConsulAgent, service: str) -> None:
    """What was registered survives a restart that keeps its data."""
    with (
        open_registry(consul_agent.url) as registry,
        open_store(consul_agent.url) as store,
        registry.register(teacher(service), 8.0),
        registry.watch(service) as watch,
        store.lease(60.0) as lease,
    ):
        entry = store.put(f"{service}/a", b"1", lease)
        while not (healthy := watch.get(10) or pytest.fail("not seen")).instances:
            pass
        consul_agent.kill()
        history = [watch.get(10) or pytest.fail("the watcher does not notice")]
        consul_agent.start()
        while history[-1] != healthy:
            history.append(watch.get(30) or pytest.fail("the watcher does not recover"))
        while (snapshot := watch.get(2.0)) is not None:  # and so it stays
            history.append(snapshot)
        assert history[0].stale
        assert [snapshot.instances for snapshot in history] == [healthy.instances] * len(history)
        assert history[-1] == healthy
        assert store.get(entry.key) == entry
        assert store.put(entry.key, b"2", lease).version > entry.version
        assert not lease.lost


def test_quiet_watch_asks_nothing(consul_agent: ConsulAgent, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from edl.discovery.consul.transport import ConsulTransport

    paths: list[str] = []
    send = ConsulTransport._request

    def counted(self: ConsulTransport, method: str, callback: object, path: str, *rest: object) -> object:
        paths.append(path)
        return send(self, method, callback, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ConsulTransport, "_request", counted)
    with open_registry(consul_agent.url) as registry, registry.watch(service) as watch:
        assert watch.get(10) == Snapshot(service, ())
        eventually(lambda: len(paths) >= 2)
        time.sleep(1.0)
        assert len(paths) <= 3, paths


def test_missing_agent_is_an_error(service: str) -> None:
    """An agent that is not there is an error and not an empty answer."""
    url = f"consul://127.0.0.1:{free_ports(1)[0]}"
    with open_registry(url) as registry, open_store(url) as store, registry.watch(service) as watch:
        for call in (
            lambda: registry.snapshot(service),
            registry.services,
            lambda: registry.register(teacher(service)),
            lambda: store.get("a"),
            lambda: store.list("a"),
            lambda: store.put("a", b""),
            store.lease,
        ):
            with pytest.raises(DiscoveryError, match="cannot be reached"):
                call()
        snapshot = watch.get(10)
        assert snapshot is not None
        assert "cannot be reached" in snapshot.stale


def test_hanging_agent_is_an_error_in_time(consul_agent: ConsulAgent, service: str) -> None:
    """An agent that hangs is an error in time, and nothing waits for it."""
    registry, store = open_registry(consul_agent.url, timeout_s=0.5), open_store(consul_agent.url, timeout_s=0.5)
    registration = eventually(lambda: registered(registry, service)) or pytest.fail("Consul is too slow")
    watch = registry.watch(service)
    assert watch.get(10) is not None
    os.kill(consul_agent.pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{consul_agent.pid}/task").iterdir())
    eventually(lambda: all((thread / "stat").read_text().rpartition(") ")[2][0] == "T" for thread in threads))
    try:
        begun = time.monotonic()
        with pytest.raises(DiscoveryError, match="timed out"):
            registry.snapshot(service)
        with pytest.raises(DiscoveryError, match="timed out"):
            store.put("a", b"1")
        watch.close()
        registration.close()
        registry.close()
        store.close()
        assert time.monotonic() - begun < 15
    finally:
        os.kill(consul_agent.pid, signal.SIGCONT)


def test_missing_servers_are_an_outage(tmp_path: Path, service: str) -> None:
    """Servers that are away behind a living agent are an outage too."""
    server = ConsulAgent(tmp_path / "server", {"node_name": "server"})
    try:
        server.start()
        client = {"node_name": "client", "server": False, "bootstrap_expect": 0, "retry_join": [server.lan_address]}
        agent = ConsulAgent(tmp_path / "client", client)
        try:
            agent.start()
            _loses_its_servers(agent, server, service)
        finally:
            agent.kill()
    finally:
        server.kill()


def _loses_its_servers(agent: ConsulAgent, server: ConsulAgent, service: str) -> None:
    with (
        open_registry(agent.url) as registry,
        registry.register(teacher(service), 8.0),
        registry.watch(service) as watch,
        open_store(agent.url) as store,
        store.lease(1.0) as lease,
    ):
        while not (healthy := watch.get(10) or pytest.fail("not seen")).instances:
            pass
        server.kill()
        stale = watch.get(20)
        assert stale is not None
        assert (bool(stale.stale), stale.instances) == (True, healthy.instances)
        with pytest.raises(DiscoveryError):
            registry.register(teacher(service, "b"))
        assert eventually(lambda: lease.lost)
        server.start()
        history = [stale]
        while history[-1].stale:
            history.append(watch.get(30) or pytest.fail("the watcher does not recover"))
        assert [snapshot.instances for snapshot in history] == [healthy.instances] * len(history)


class _Nonsense(BaseHTTPRequestHandler):
    answers: tuple[tuple[int, bytes], ...] = (
        (200, b"<html>welcome to the wireless network</html>"),
        (200, b'{"not": "a list"}'),
        (200, b'[{"Service": 7, "Node": []}]'),
        (200, b'["text"]'),
        (200, b"\xff\xfe\0"),
        (500, b"boom"),
        (302, b"elsewhere"),
        (200, b""),
    )
    asked = 0

    def do_GET(self) -> None:
        code, body = self.answers[type(self).asked % len(self.answers)]
        type(self).asked += 1
        self.send_response(code)
        self.send_header("X-Consul-Index", "7" if type(self).asked % 2 else "no number")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def test_foreign_server_is_an_error(service: str) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Nonsense)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        url = f"consul://127.0.0.1:{server.server_port}"
        with open_registry(url) as registry, open_store(url) as store:
            for _ in _Nonsense.answers:
                for call in (
                    lambda: registry.snapshot(service),
                    lambda: store.get("a"),
                    lambda: store.list("a"),
                    lambda: store.put("a", b""),
                    lambda: registry.register(teacher(service)),
                ):
                    with pytest.raises(DiscoveryError):
                        call()
            with registry.watch(service) as watch, store.watch("a") as store_watch:
                for _ in range(2):
                    snapshot, entries = watch.get(10), store_watch.get(10)
                    assert snapshot is not None
                    assert entries is not None
                    assert snapshot.stale
                    assert entries.stale
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def agent_with_acl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsulAgent]:
    config = {"acl": {"enabled": True, "default_policy": "deny", "tokens": {"master": TOKEN, "agent": TOKEN}}}
    agent = ConsulAgent(tmp_path_factory.mktemp("consul-acl"), config, token=TOKEN)
    try:
        agent.start()
        yield agent
    finally:
        agent.kill()


def test_token_opens_acls_and_is_not_shown(
    agent_with_acl: ConsulAgent, service: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The token opens an agent with ACLs and is shown nowhere."""
    caplog.set_level(logging.DEBUG)
    shown = []
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", TOKEN)
    with (
        open_registry(agent_with_acl.url) as registry,
        open_store(agent_with_acl.url) as store,
        registry.register(teacher(service), 2.0) as registration,
        registry.watch(service) as watch,
        store.lease(10.0) as lease,
        store.elect(service, b"me", 10.0) as election,
    ):
        assert eventually(lambda: registry.snapshot(service).instances)
        assert eventually(lambda: (watch.get(1) or Snapshot("", ())).instances)
        entry = store.put(f"{service}/a", b"1", lease)
        entry = store.compare_and_set(entry.key, b"2", entry.version, lease) or pytest.fail("not set")
        assert store.delete(entry.key, entry.version)
        assert election.wait(20)
        for thing in (registry, store, registration, watch, lease, election):
            shown += [repr(thing), repr(vars(thing))]
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", wrong := str(uuid.uuid4()))
    with open_registry(agent_with_acl.url) as registry, open_store(agent_with_acl.url) as store:
        for call in (
            lambda: registry.snapshot(service),
            lambda: registry.register(teacher(service)),
            lambda: store.get("a"),
            lambda: store.put("a", b""),
            lambda: store.lease(),
        ):
            with pytest.raises(DiscoveryError, match="CONSUL_HTTP_TOKEN") as caught:
                call()
            shown.append(str(caught.value))
        with registry.watch(service) as watch:
            refused = watch.get(10)
            assert refused is not None
            assert "CONSUL_HTTP_TOKEN" in refused.stale
            shown.append(repr(refused))
    monkeypatch.delenv("CONSUL_HTTP_TOKEN")
    with open_registry(agent_with_acl.url) as registry, pytest.raises(DiscoveryError, match="set CONSUL_HTTP_TOKEN"):
        registry.register(teacher(service))
    shown += [record.getMessage() for record in caplog.records]
    assert not [text for text in shown if TOKEN in text or wrong in text]


def test_list_that_acls_filter_is_error(
    agent_with_acl: ConsulAgent, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consul answers with an empty list where the token may not read, and a student would let go of all teachers."""
    rules = f'service "{service}" {{ policy = "read" }} node_prefix "" {{ policy = "read" }}'
    policy = agent_with_acl.ask("/v1/acl/policy", "PUT", {"Name": service, "Rules": rules})
    anonymous = "/v1/acl/token/00000000-0000-0000-0000-000000000002"
    agent_with_acl.ask(anonymous, "PUT", {"Policies": [{"ID": policy["ID"]}]})
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", TOKEN)
    with open_registry(agent_with_acl.url) as writer, writer.register(teacher(service), 10.0):
        monkeypatch.delenv("CONSUL_HTTP_TOKEN")
        with open_registry(agent_with_acl.url) as registry, registry.watch(service) as watch:
            assert eventually(lambda: registry.snapshot(service).instances)
            assert registry.services() == (service,), "a token for one service sees that one"
            assert eventually(lambda: (watch.get(1) or Snapshot("", ())).instances)
            agent_with_acl.ask(anonymous, "PUT", {"Policies": []})
            for call in (lambda: registry.snapshot(service), registry.services):
                assert eventually(lambda call=call: "set CONSUL_HTTP_TOKEN" in refusal(call)), "an empty list, no error"
            # A question that was asked before waits for its 10 s, is answered as was right then, and asked once more.
            filtered = next(snapshot for snapshot in iter(lambda: watch.get(40), None) if snapshot.stale)
            assert "no service:read" in filtered.stale
            assert filtered.instances, "the teachers known last are gone"


class _Filtering(BaseHTTPRequestHandler):
    """What Consul 1.11 and newer answer a token that may not read the nodes; older ones leave the header out."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Consul-Index", "7")
        self.send_header("X-Consul-Results-Filtered-By-ACLs", "true")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_: object) -> None:
        pass


def test_filtered_by_acls_header_is_error(service: str) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Filtering)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with (
            open_registry(f"consul://127.0.0.1:{server.server_port}") as registry,
            pytest.raises(DiscoveryError, match="the token may not read it"),
        ):
            registry.snapshot(service)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except DiscoveryError as exc:
        return str(exc)
    return ""


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def agent_with_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ConsulAgent, Path]]:
    """An agent that shows a certificate for 127.0.0.1 and asks its clients for one."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program, which makes the certificates, is missing")
    folder = tmp_path_factory.mktemp("consul-tls")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    root = ("-subj", "/CN=test CA", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    _openssl(folder, "req", "-x509", *new_key, *usage, *root)
    identifiers = "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    (folder / "server.ext").write_text(identifiers + "subjectAltName=IP:127.0.0.1,DNS:server.dc1.consul\n")
    (folder / "client.ext").write_text(identifiers + "extendedKeyUsage=clientAuth\n")
    for name in ("server", "client"):
        _openssl(folder, "req", *new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *sign, "-out", f"{name}.pem")
    config = {
        "ca_file": str(folder / "ca.pem"),
        "cert_file": str(folder / "server.pem"),
        "key_file": str(folder / "server.key"),
        "verify_incoming_rpc": False,
        "verify_incoming_https": True,
    }
    agent = ConsulAgent(folder / "agent", config, https=True)
    try:
        agent.start()
        yield agent, folder
    finally:
        agent.kill()


def test_tls_follows_consuls_variables(
    agent_with_tls: tuple[ConsulAgent, Path], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, folder = agent_with_tls
    secure = agent.url.replace("consul:", "consul+https:")

    def refused(message: str, url: str = secure) -> None:
        with open_registry(url) as registry, pytest.raises(DiscoveryError, match=message):
            registry.snapshot(service)

    refused("CERTIFICATE_VERIFY_FAILED")
    monkeypatch.setenv("CONSUL_CACERT", str(folder / "ca.pem"))
    refused("cannot be reached")  # without a certificate of our own
    monkeypatch.setenv("CONSUL_CLIENT_CERT", str(folder / "client.pem"))
    monkeypatch.setenv("CONSUL_CLIENT_KEY", str(folder / "client.key"))
    refused("cannot be reached|400", agent.url)  # plain HTTP to a port that speaks TLS
    with monkeypatch.context() as other:
        other.setenv("CONSUL_TLS_SERVER_NAME", "somebody.else")
        refused("CERTIFICATE_VERIFY_FAILED.*somebody")
    _works(secure, service)
    with monkeypatch.context() as other:
        other.setenv("CONSUL_HTTP_SSL", "true")
        _works(agent.url, service)
    with monkeypatch.context() as other:
        other.setenv("CONSUL_TLS_SERVER_NAME", "server.dc1.consul")
        _works(secure, service)
    with monkeypatch.context() as other:
        other.delenv("CONSUL_CACERT")
        other.setenv("CONSUL_HTTP_SSL_VERIFY", "false")
        _works(secure, service)
    with monkeypatch.context() as other:
        other.setenv("CONSUL_CACERT", str(folder / "missing.pem"))
        with pytest.raises(SettingsError, match="CONSUL_CACERT"):
            open_registry(secure)


def _works(url: str, service: str) -> None:
    with open_registry(url) as registry, registry.register(teacher(service)), registry.watch(service) as watch:
        assert eventually(lambda: (watch.get(1) or Snapshot("", ())).instances)
        with open_store(url) as store, store.lease(10.0) as lease:
            store.put(f"{service}/a", b"1", lease)
    assert url.startswith("consul")


def test_only_silence_is_a_lapse(consul_agent: ConsulAgent, service: str) -> None:
    check = {"Name": "http", "TTL": "60s", "Status": "critical"}
    foreign = {"Name": service, "ID": f"{service}-x", "Address": "127.0.0.1", "Port": 1, "Check": check}
    consul_agent.ask("/v1/agent/service/register", "PUT", foreign)
    try:
        with open_registry(consul_agent.url) as registry, registry.register(teacher(service)):
            assert eventually(lambda: registry.snapshot(service).instances)
            assert not registry.snapshot(service).lapsed, "a check of somebody else's fails: it is not well"
            found = consul_agent.ask("/v1/agent/services")
            (own,) = [name for name, entry in found.items() if entry["Service"] == service and name != foreign["ID"]]
            consul_agent.ask(f"/v1/agent/service/maintenance/{own}?enable=true", "PUT")
            assert eventually(lambda: not registry.snapshot(service).instances)
            assert not registry.snapshot(service).lapsed, "a person took it out"
            consul_agent.ask(f"/v1/agent/service/maintenance/{own}?enable=false", "PUT")
            assert eventually(lambda: registry.snapshot(service).instances)
    finally:
        consul_agent.ask(f"/v1/agent/service/deregister/{foreign['ID']}", "PUT")
