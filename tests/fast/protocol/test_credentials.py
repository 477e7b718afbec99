"""Files of certificates, keys and tokens: what is refused, in which words, and when files are read again."""

from __future__ import annotations

import asyncio
import codecs
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.distill import Options
from edl.errors import SettingsError
from edl.protocol import tls
from edl.protocol.channel import call_metadata, is_this_host
from edl.protocol.tls import CredentialFiles
from edl.settings import Credentials
from edl_serving.admission import is_revocation
from tests.certificates import Authority, Pair, ec, put
from tests.descriptors import count_descriptors
from tests.interrupting import deadline

TOKEN = "0123456789abcdef-token"
ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
CA = Authority()
GOOD = CA.issue()


def files_of(folder: Path, serving: bool = True, **changed: str | None) -> CredentialFiles:
    told = {**GOOD.save(folder), "ca": CA.save(folder), "token_file": put(folder / "token", TOKEN), **changed}
    return CredentialFiles(Credentials(**told), serving=serving)  # type: ignore[arg-type]


def pair(cert: bytes, key: bytes) -> Callable[[Path], dict[str, str]]:
    return lambda folder: Pair(cert, key).save(folder, "bad")


def file(name: str, content: bytes | str, field: str, mode: int = 0o600) -> Callable[[Path], dict[str, str]]:
    return lambda folder: {field: put(folder / name, content, mode)}


def issued(**options: Any) -> Callable[[Path], dict[str, str]]:
    return lambda folder: CA.issue(**options).save(folder, "bad")


def key_for_everybody(folder: Path) -> dict[str, str]:
    saved = GOOD.save(folder, "bad")
    Path(saved["key"]).chmod(0o644)
    return saved


EXPIRED = issued(days=(-5, -1))
P521 = ec.generate_private_key(ec.SECP521R1())
BAD: list[tuple[Callable[[Path], dict[str, str]], str]] = [
    (EXPIRED, "bad.pem' has expired: have a new one issued"),
    (issued(days=(1, 5)), "is not valid yet: check its dates, and the clock of this host"),
    (pair(GOOD.cert, CA.issue().key), "does not match certificate"),
    (pair(GOOD.cert, GOOD.cert), "contains no private key"),
    (pair(GOOD.key, GOOD.key), "contains no certificate, or a damaged one: expected PEM"),
    (lambda folder: {"key": str(folder / "nowhere.key")}, "nowhere.key' cannot be read: No such file or directory"),
    (key_for_everybody, "can be read by every user of this host (mode 0644): chmod o-rwx it"),
    (pair(GOOD.cert, GOOD.key.replace(b" PRIV", b" ENCRYPTED PRIV")), "is encrypted: decrypt it (openssl pkey"),
    (issued(key=ed25519.Ed25519PrivateKey.generate()), "bad.pem' is for a kind of key that gRPC cannot use"),
    (pair(GOOD.cert + b"-----BEGIN CERTIFICATE-----", GOOD.key), "contains no certificate, or a damaged one"),
    (file("ca2.pem", "nothing of that kind", "ca"), "ca2.pem' contains no certificate"),
    (lambda folder: {"ca": "system"}, "for clients, name your own CA"),
    (file("none", "# none yet\n", "token_file"), "contains no token: write one per line"),
    (file("short", f"{TOKEN}\nsecret-short\n", "token_file"), "line 2: a token of 12 characters can be guessed"),
    (file("two", f"{TOKEN} {TOKEN}\n", "token_file"), "line 1: expected one token per line, of letters, digits"),
    (lambda folder: {"token_file": TOKEN}, "(a name without a folder) cannot be read"),
]


@pytest.mark.parametrize(("bad", "words"), BAD)
def test_bad_files_are_refused(bad: Callable[[Path], dict[str, str]], words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        files_of(tmp_path, **bad(tmp_path))
    assert words.replace("{}", str(tmp_path)) in str(caught.value)
    for secret in (TOKEN, "secret-short", "nothing of that kind"):
        assert secret not in str(caught.value), "what is in the file, or may be a token, is in the message"


def test_rsa_keys_are_taken(tmp_path: Path) -> None:
    """`Authority` issues ECDSA ones, which all other tests use."""
    pair = CA.issue(key=rsa.generate_private_key(65537, 2048))
    assert files_of(tmp_path, **pair.save(tmp_path, "made")).current().pair == (pair.cert, pair.key)


def test_unreadable_key(tmp_path: Path) -> None:
    saved = GOOD.save(tmp_path)
    Path(saved["key"]).chmod(0o200)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root reads every file
    try:
        with pytest.raises(SettingsError, match="cannot be read: Permission denied; this process runs as user"):
            CredentialFiles(Credentials(**saved), serving=True)
    finally:
        os.seteuid(user)


def test_pipe_as_key(tmp_path: Path) -> None:
    """To open it would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    with deadline(60, "opening a pipe"), pytest.raises(SettingsError, match=r"TLS key .*pipe' is not a regular file"):
        files_of(tmp_path, key=str(tmp_path / "pipe"))


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    saved = GOOD.save(tmp_path, "shared")
    Path(saved["key"]).chmod(0o640)  # a group may read it
    files = files_of(tmp_path, serving=False, **saved)
    shown = repr(files) + repr(files.current()) + repr(files.settings) + repr(Options(credentials=files.settings))
    assert TOKEN not in shown
    assert "PRIVATE" not in shown
    assert files.current().names == ("127.0.0.1", "localhost")
    assert files.current().not_after.endswith("GMT")


def test_replaced_files_are_read_again(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    assert files.current(now=True) is files.current(now=True), "read again though nothing changed"
    put(tmp_path / "token", f"{TOKEN}-2\n{TOKEN}\n")
    assert files.current(now=True).tokens == (f"{TOKEN}-2", TOKEN)
    assert files.current(now=True).version == 1
    before = files.current()
    put(tmp_path / "token", (tmp_path / "token").read_bytes())
    assert files.current(now=True) is before, "who renews every file at once would have all connections made anew"


def test_certificates_behind_marks(tmp_path: Path) -> None:
    """gRPC would skip a certificate that does not begin a line, or follows an editor's byte order mark."""
    mark = codecs.BOM_UTF8
    saved = Pair(mark + GOOD.cert.rstrip() + CA.pem, mark + GOOD.key).save(tmp_path, "marked")
    marked = {
        "ca": put(tmp_path / "ca2.pem", mark + b"# a CA\n" + CA.pem),
        "token_file": put(tmp_path / "t", mark + TOKEN.encode()),
    }
    found = files_of(tmp_path, **saved, **marked).current()
    assert (found.pair, found.ca, found.tokens) == ((GOOD.cert + CA.pem, GOOD.key), CA.pem, (TOKEN,))


def test_key_of_no_use_does_not_replace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = files_of(tmp_path)
    CA.issue(key=P521).save(tmp_path)
    assert files.current(now=True).pair == (GOOD.cert, GOOD.key), "nobody could connect from then on"
    assert "a kind of key that gRPC cannot use" in caplog.text


def test_own_certificate_that_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(tmp_path)
    assert files.explain_certificate() == ""
    now, old = files.current(), CA.issue(days=(-5, -1))
    aged = tls.Material(now.version, now.ca, (old.cert, old.key), now.tokens)
    monkeypatch.setattr(files, "_material", aged)
    assert "has expired" in files.explain_certificate()


INCOMPLETE = [
    ({"cert": "a.pem"}, False, "a TLS certificate without its key"),
    ({"key": "a.key"}, True, "a TLS key without its certificate"),
    ({"ca": "ca.pem"}, True, "a server needs --tls-cert"),
    ({"server_name": "a"}, False, "no server can be verified"),
    ({"cert": "a.pem", "key": "a.key"}, False, "no server can be verified"),
    ({"ca": ""}, False, "ca must be non-empty text"),
    ({"token_file": 3}, False, "token_file must be non-empty text"),
]


@pytest.mark.parametrize(("told", "serving", "words"), INCOMPLETE)
def test_settings_that_lack_a_part(told: dict[str, str], serving: bool, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        CredentialFiles(Credentials(**told), serving=serving)  # type: ignore[arg-type]


def test_environment() -> None:
    environ = {
        "EDL_TLS_CA": "ca",
        "EDL_TLS_CERT": "cert",
        "EDL_TLS_KEY": "key",
        "EDL_TLS_SERVER_NAME": "name",
        "EDL_TOKEN_FILE": "token",
        "EDL_ALLOW_INSECURE_TOKENS": "yes",
    }
    assert Credentials.of(environ=environ) == Credentials("ca", "cert", "key", "name", "token", True)
    assert Credentials.of(ca="other", environ=environ).ca == "other", "an argument gives way to the environment"
    assert not Credentials.of(environ={})
    with pytest.raises(SettingsError, match="EDL_ALLOW_INSECURE_TOKENS='maybe': must be 1 or 0"):
        Credentials.of(environ={"EDL_ALLOW_INSECURE_TOKENS": "maybe"})
    with pytest.raises(SettingsError, match="set EDL_TOKEN_FILE to its path") as caught:
        Credentials.of(environ={"EDL_TOKEN": TOKEN})
    assert TOKEN not in str(caught.value)


def test_token_needs_tls_or_this_host(tmp_path: Path) -> None:
    told = {"token_file": put(tmp_path / "token", TOKEN)}
    plain = CredentialFiles(Credentials(**told))
    for endpoint in ("10.0.0.7:1", "teacher.example:1", "[fd00::7]:1", "localhost.example:1", "127.example:1"):
        with pytest.raises(SettingsError, match="gets no token over a connection without TLS"):
            call_metadata(endpoint, plain)
    for endpoint in ("127.0.0.1:8500", "127.8.9.1:8500", "localhost:8500", "[::1]:8500", "unix:/run/teacher.sock"):
        assert is_this_host(endpoint)
        assert call_metadata(endpoint, plain) == (("authorization", f"Bearer {TOKEN}"),)
    for more in ({"ca": CA.save(tmp_path)}, {"allow_insecure_tokens": True}):
        files = CredentialFiles(Credentials(**told, **more))  # type: ignore[arg-type]
        assert call_metadata("10.0.0.7:8500", files) == (("authorization", f"Bearer {TOKEN}"),)


def test_keys_are_on_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    before = count_descriptors("/memfd:", str(tmp_path))
    assert files_of(tmp_path).tls
    assert count_descriptors("/memfd:", str(tmp_path)) == before, "descriptors are left open"


def test_link_that_kubernetes_moves(tmp_path: Path) -> None:
    """A secret's files are links through one folder's link, which is replaced in one step."""
    for name, token in (("first", TOKEN), ("second", TOKEN[::-1])):
        (tmp_path / name).mkdir()
        put(tmp_path / name / "token", token)
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "token").symlink_to("..data/token")
    files = CredentialFiles(Credentials(token_file=str(tmp_path / "token")))
    assert files.current().tokens == (TOKEN,)
    (tmp_path / "..data_tmp").symlink_to("second")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    assert files.current(now=True).tokens == (TOKEN[::-1],)


def test_only_what_is_taken_away_revokes(tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")

    def material(bundle: bytes, *tokens: str) -> tls.Material:
        return tls.Material(0, bundle, None, tokens)

    before = material(old.pem, "a")
    for same in (before, material(new.pem + b"# both\n" + old.pem, "a"), material(old.pem, "b", "a")):
        assert not is_revocation(before, same), "streams of students that nothing was taken from end"
    for less in (material(new.pem, "a"), material(old.pem, "b"), material(old.pem)):
        assert is_revocation(before, less)
    assert is_revocation(material(old.pem + new.pem), material(old.pem))


class PollerCompletionQueue:
    def _handle_events(self, error: Exception) -> None:
        raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [(BlockingIOError(11, "x"), False), (RuntimeError("Event loop is closed"), False), (RuntimeError("x"), True)],
)
def test_grpcs_false_alarms_are_not_told(error: Exception, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """asyncio logs what a callback of gRPC's raises in a process with several event loops."""

    async def call() -> None:
        asyncio.get_running_loop().call_soon(PollerCompletionQueue()._handle_events, error)
        await asyncio.sleep(0)

    asyncio.run(call())
    assert ("Traceback" in caplog.text) == told
