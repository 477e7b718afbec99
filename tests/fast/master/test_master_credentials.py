"""TLS and tokens between masters and workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edl.errors import NoMasterError, RejectedError, SettingsError
from edl.master import MasterClient, MasterServer, ShardReader, ShardSettings, open_dataset
from edl.settings import Credentials

certificates = pytest.importorskip("tests.certificates")

Lead = Callable[..., MasterServer]


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[[str], str]:
    return lambda text: str(certificates.put(tmp_path / f"token-{text}", f"{text}\n"))


def test_mutual_tls_and_tokens(lead: Lead, url: str, tmp_path: Path, tokens: Callable[[str], str]) -> None:
    authority = certificates.Authority()
    ca = str(certificates.put(tmp_path / "ca.pem", authority.pem))
    pair = authority.issue(*certificates.HERE).save(tmp_path)
    secret = tokens("a-token-that-is-long-enough-for-this")
    credentials = Credentials(ca=ca, token_file=secret, **pair)
    lead(credentials=credentials)
    with (
        MasterClient("job", url, timeout_s=20, credentials=credentials) as client,
        ShardReader(client, "d") as reader,
    ):
        client.create_dataset("d", open_dataset("range:100", ShardSettings(shard_size=10)))
        assert sum(len(shard) for shard in reader) == 100
    with MasterClient("job", url, timeout_s=1, credentials=Credentials()) as plain, pytest.raises(NoMasterError):
        plain.status()
    stranger = certificates.Authority("another CA").issue(*certificates.HERE).save(tmp_path, "stranger")
    other = Credentials(ca=ca, token_file=secret, **stranger)
    with MasterClient("job", url, timeout_s=1, credentials=other) as client, pytest.raises(NoMasterError):
        client.status()


def test_a_wrong_token_is_refused_at_once(lead: Lead, url: str, tokens: Callable[[str], str]) -> None:
    lead(credentials=Credentials(token_file=tokens("the-token-of-this-job-is-this-one")))
    for credentials in (Credentials(), Credentials(token_file=tokens("some-other-token-than-that-one"))):
        with MasterClient("job", url, timeout_s=30, credentials=credentials) as client:
            with pytest.raises(RejectedError, match="EDL_TOKEN_FILE"):
                client.status()
            with ShardReader(client, "d") as reader, pytest.raises(RejectedError, match="EDL_TOKEN_FILE"):
                next(reader)


def test_a_token_does_not_cross_a_network(tokens: Callable[[str], str]) -> None:
    credentials = Credentials(token_file=tokens("the-token-of-this-job-is-this-one"))
    with (
        MasterClient("job", endpoint="192.0.2.1:1", timeout_s=5, credentials=credentials) as client,
        pytest.raises(SettingsError, match="without TLS"),
    ):
        client.status()
