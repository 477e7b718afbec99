"""URLs and the variables of Consul and etcd: what is accepted, what is refused, and that no secret is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.discovery import open_registry, open_store
from edl.discovery.consul_client import ConsulTarget
from edl.discovery.etcd import EtcdTarget
from edl.discovery.served.store import store_credentials
from edl.discovery.store_url import StoreUrl, identify_store, servers_of
from edl.errors import SettingsError
from edl.settings import Credentials


def members(url: str, **environ: str) -> EtcdTarget:
    return EtcdTarget.of(StoreUrl.parse(url), 5.0, environ)


def target(url: str, **environ: str) -> ConsulTarget:
    return ConsulTarget.of(StoreUrl.parse(url), 5.0, environ)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "the scheme is missing"),
        ("zookeeper://host:2181", "unknown scheme 'zookeeper'"),
        ("consul://[::1", "Invalid IPv6"),
        ("sqlite:relative.sqlite", "not the absolute path"),
        ("sqlite:///a?b", "a path may follow sqlite:///"),
        ("consul://", "a host is missing"),
        ("consul://host:8500/folder", "expected only consul://host:8500"),
        ("consul://host:8500?dc=x", "expected only consul://"),
        ("etcd://a:2379,,b:2379", "has no host; expected etcd://host:2379,host2:2379"),
        ("etcd://host:2379?timeout=3", "expected only etcd://host:2379,host2:2379"),
        ("kubernetes://lab?context=a", "such as edl://edl-store.edl:29400"),
        ("edl://host:port", "as 'port'; expected edl://host:29400"),
        ("edl://host/folder", "expected only edl://host:29400"),
    ],
)
def test_an_unusable_url_is_named(url: str, message: str) -> None:
    for opened in (open_registry, open_store):
        with pytest.raises(SettingsError, match="discovery URL") as caught:
            opened(url)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "consul://user:s3cret@host:8500",
        "consul://host:8500?token=s3cret",
        "etcd://host:2379,user:s3cret@host2:2379",
        "nothing://user:s3cret@host?token=s3cret",
        "nothing://s3cret@[::1?s3cret",
        "edl://user:s3cret@host",
    ],
)
def test_secret_in_a_url_is_refused(url: str) -> None:
    for opened in (open_registry, open_store):
        with pytest.raises(SettingsError) as caught:
            opened(url)
        assert "s3cret" not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_an_unusable_timeout_is_refused(tmp_path: Path) -> None:
    for timeout_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(SettingsError, match="timeout_s"):
            open_registry(f"sqlite:///{tmp_path}/x.sqlite", timeout_s=timeout_s)


def test_half_of_tls_is_for_teachers() -> None:
    """A CA alone does not make a store's client speak TLS: agents do so with all three files, or not at all."""
    assert not store_credentials(Credentials(ca="ca.pem"))
    assert not store_credentials(Credentials(cert="cert.pem", key="key.pem"))
    both = Credentials(ca="ca.pem", cert="cert.pem", key="key.pem")
    assert store_credentials(both) is both
    assert store_credentials(Credentials(ca="ca.pem", token_file="t")) == Credentials(token_file="t")


def test_a_consul_url_says_where() -> None:
    found = target("consul://host", CONSUL_HTTP_TOKEN=" s3cret ")
    assert found.token == "s3cret"
    assert "s3cret" not in f"{found} {found!r}"
    plain = target("consul://host")
    assert (plain.host, plain.port, plain.tls) == ("host", 8500, None)
    assert target("consul://[::1]:1").host == "::1"
    secure = target("consul+https://host")
    assert (secure.port, str(secure)) == (8501, "Consul at https://host:8501")
    assert target("consul://host:8500", CONSUL_HTTP_SSL="true").tls is not None
    assert target("consul://host:8500", CONSUL_HTTP_SSL="0").tls is None
    assert target("consul+https://host").server_name == "host"
    assert target("consul+https://host", CONSUL_TLS_SERVER_NAME="server.dc1.consul").server_name == "server.dc1.consul"


def test_etcd_url_names_members() -> None:
    assert members("etcd://a").endpoints == ("a:2379",)
    several = members("etcd://a:1,b,[::1]:3/")
    assert (several.endpoints, several.files) == (("a:1", "b:2379", "[::1]:3"), None)
    assert str(several) == "etcd at http://a:1,b:2379,[::1]:3"
    secure = members("etcd+https://a")
    assert secure.files is not None, "believes the system's CAs"
    assert servers_of("etcd://a:1,b,[::1]:3/") == [("a", 1), ("b", None), ("::1", 3)]
    assert servers_of("consul://[::1]:8500") == [("::1", 8500)]
    assert servers_of("sqlite:///a/b") == servers_of("") == []


def test_etcds_user_is_not_shown() -> None:
    for environ in (
        {"ETCDCTL_USER": "edl:s3cret:x"},
        {"ETCDCTL_USER": "edl", "ETCDCTL_PASSWORD": "s3cret:x"},
    ):
        found = members("etcd://host", **environ)
        assert (found.user, found.password) == ("edl", "s3cret:x")
        assert "s3cret" not in f"{found} {found!r}"
    with pytest.raises(SettingsError, match="set ETCDCTL_PASSWORD"):
        members("etcd://host", ETCDCTL_USER="edl")


def test_unusable_variables_are_named(tmp_path: Path) -> None:
    """Those of Consul and of etcd."""
    (tmp_path / "empty.pem").write_text("")
    missing, empty = str(tmp_path / "missing.pem"), str(tmp_path / "empty.pem")
    for of, url, environ, message in (
        (target, "consul+https://host", {"CONSUL_HTTP_SSL": "perhaps"}, "CONSUL_HTTP_SSL"),
        (target, "consul+https://host", {"CONSUL_CACERT": missing}, "CONSUL_CACERT"),
        (target, "consul+https://host", {"CONSUL_CLIENT_CERT": missing}, "CONSUL_CLIENT_CERT"),
        (target, "consul+https://host", {"CONSUL_CLIENT_KEY": missing}, "CONSUL_CLIENT_KEY"),
        (members, "etcd+https://host", {"ETCDCTL_CACERT": missing}, "ETCDCTL_CACERT.*missing.pem"),
        (members, "etcd+https://host", {"ETCDCTL_CACERT": empty}, "ETCDCTL_CACERT.*empty.pem"),
        (members, "etcd+https://host", {"ETCDCTL_CERT": missing}, "ETCDCTL_CERT is set without ETCDCTL_KEY"),
        (members, "etcd+https://host", {"ETCDCTL_CERT": missing, "ETCDCTL_KEY": missing}, "CERT.*missing.pem"),
        (members, "etcd+https://host", {"ETCDCTL_INSECURE_SKIP_TLS_VERIFY": "true"}, "name the CA.*ETCDCTL_CACERT"),
    ):
        with pytest.raises(SettingsError, match=message):
            of(url, **environ)


@pytest.mark.parametrize(
    ("url", "others"),
    [
        (
            "consul://consul:8500",
            ["consul://Consul", "CONSUL://consul:8500/", "consul://con\tsul?", "consul://consul#"],
        ),
        ("consul+https://c", ["consul+https://c:8501/"]),
        ("consul://[::1]:8500", ["consul://[0:0::1]"]),
        ("etcd://a:2379,b:2379", ["etcd://b,a", "etcd://A:2379, b/", "etcd://b,a,b"]),
        ("edl://h", ["edl://H:29400/"]),
        ("sqlite:///a/b", ["sqlite:////a/b", "sqlite:///a/%62"]),
    ],
)
def test_spellings_of_a_store(url: str, others: list[str]) -> None:
    assert {other: identify_store(other) for other in others} == dict.fromkeys(others, identify_store(url))
    assert identify_store(identify_store(url)) == identify_store(url)


def test_stores_that_are_not_the_same() -> None:
    urls = ["", "http://[", "sqlite:///a", "sqlite://a", "edl://c"]
    urls += ["consul://c", "consul+https://c", "consul://c:1", "consul://c?dc=x", "consul://c.", "consul://u@c"]
    urls += ["etcd://c", "etcd://c,d", "etcd://c:x", "etcd://c:99999", "etcd://"]
    assert len({identify_store(url) for url in urls}) == len(urls)
