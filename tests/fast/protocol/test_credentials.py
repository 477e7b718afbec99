"""Files of certificates, keys and tokens: what is refused, in which words, and when files are read again."""

from __future__ import annotations

import asyncio
import codecs
import errno
import logging
import os
import queue
import ssl
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edl.distill import Options
from edl.errors import SettingsError
from edl.protocol.channel import call_metadata, is_this_host
from edl.protocol.tls import certificates, credentials
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.tls.public_keys import kind_not_in_grpc
from edl.protocol.transport import grpc
from edl.settings import Credentials
from edl_serving.rpc import authentication
from edl_serving.rpc.authentication import is_revocation
from tests.certificates import Authority, Pair, ec, put
from tests.descriptors import count_descriptors
from tests.interrupting import deadline

TOKEN = "0123456789abcdef-token"
ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
CA = Authority()
GOOD = CA.issue()
MARK = codecs.BOM_UTF8


def files_of(folder: Path, serving: bool = True, **changed: str | None) -> CredentialFiles:
    told = {**GOOD.save(folder), "ca": CA.save(folder), "token_file": put(folder / "token", TOKEN), **changed}
    return CredentialFiles(Credentials(**told), serving=serving)  # type: ignore[arg-type]


def expired(folder: Path) -> dict[str, str]:
    return CA.issue(days=(-5, -1)).save(folder, "bad")


def not_yet_valid(folder: Path) -> dict[str, str]:
    return CA.issue(days=(1, 5)).save(folder, "bad")


def of_another_key(folder: Path) -> dict[str, str]:
    return Pair(GOOD.cert, CA.issue().key).save(folder, "bad")


def no_key(folder: Path) -> dict[str, str]:
    return Pair(GOOD.cert, GOOD.cert).save(folder, "bad")


def no_certificate(folder: Path) -> dict[str, str]:
    return Pair(GOOD.key, GOOD.key).save(folder, "bad")


def half_a_certificate(folder: Path) -> dict[str, str]:
    return Pair(GOOD.cert[: len(GOOD.cert) // 2], GOOD.key).save(folder, "bad")


def empty_key(folder: Path) -> dict[str, str]:
    return Pair(GOOD.cert, b"").save(folder, "bad")


def missing_key(folder: Path) -> dict[str, str]:
    return {**GOOD.save(folder), "key": str(folder / "nowhere.key")}


def folder_as_key(folder: Path) -> dict[str, str]:
    return {**GOOD.save(folder), "key": str(folder)}


def key_for_everybody(folder: Path) -> dict[str, str]:
    saved = GOOD.save(folder, "bad")
    Path(saved["key"]).chmod(0o644)
    return saved


def encrypted_key(folder: Path) -> dict[str, str]:
    return Pair(GOOD.cert, GOOD.key.replace(b"BEGIN PRIVATE", b"BEGIN ENCRYPTED PRIVATE")).save(folder, "bad")


def ed25519_key(folder: Path) -> dict[str, str]:
    return CA.issue(key=ed25519.Ed25519PrivateKey.generate()).save(folder, "bad")


def p521_key(folder: Path) -> dict[str, str]:
    return CA.issue(key=ec.generate_private_key(ec.SECP521R1())).save(folder, "bad")


def p224_key(folder: Path) -> dict[str, str]:
    return CA.issue(key=ec.generate_private_key(ec.SECP224R1())).save(folder, "bad")


def rsa_pss_key(folder: Path) -> dict[str, str]:
    """The cryptography package makes none."""
    saved = {"cert": str(folder / "bad.pem"), "key": str(folder / "bad.key")}
    command = "openssl req -x509 -newkey rsa-pss -pkeyopt rsa_keygen_bits:2048 -nodes -subj /CN=test -out"
    subprocess.run([*command.split(), saved["cert"], "-keyout", saved["key"]], check=True, capture_output=True)
    Path(saved["key"]).chmod(0o600)
    return saved


def marked_certificate(folder: Path) -> dict[str, str]:
    return Pair(MARK + GOOD.cert, GOOD.key).save(folder, "bad")


def marked_key(folder: Path) -> dict[str, str]:
    return Pair(GOOD.cert, MARK + GOOD.key).save(folder, "bad")


def marked_chain(folder: Path) -> dict[str, str]:
    return Pair(GOOD.cert + MARK + CA.pem, GOOD.key).save(folder, "bad")


def joined_chain(folder: Path) -> dict[str, str]:
    return Pair(GOOD.cert.rstrip() + CA.pem, GOOD.key).save(folder, "bad")


def utf16_certificate(folder: Path) -> dict[str, str]:
    return Pair(GOOD.cert.decode().encode("utf-16"), GOOD.key).save(folder, "bad")


def marked_ca(folder: Path) -> dict[str, str]:
    return {"ca": put(folder / "marked-ca.pem", MARK + CA.pem)}


def marked_token(folder: Path) -> dict[str, str]:
    return {"token_file": put(folder / "marked", MARK + TOKEN.encode())}


def no_ca(folder: Path) -> dict[str, str]:
    return {"ca": put(folder / "no-ca.pem", "nothing of that kind")}


def empty_ca(folder: Path) -> dict[str, str]:
    return {"ca": put(folder / "empty-ca.pem", "\n")}


def public_ca(folder: Path) -> dict[str, str]:
    return {"ca": "system"}


def no_token(folder: Path) -> dict[str, str]:
    return {"token_file": put(folder / "none", "# none yet\n")}


def short_token(folder: Path) -> dict[str, str]:
    return {"token_file": put(folder / "short", f"{TOKEN}\nsecret-short\n")}


def two_in_a_line(folder: Path) -> dict[str, str]:
    return {"token_file": put(folder / "two", f"{TOKEN} {TOKEN}\n")}


def token_for_everybody(folder: Path) -> dict[str, str]:
    return {"token_file": put(folder / "open", TOKEN, 0o644)}


def token_as_path(folder: Path) -> dict[str, str]:
    return {"token_file": TOKEN}


BAD: dict[Callable[[Path], dict[str, str]], str] = {
    expired: "bad.pem' has expired: have a new one issued",
    not_yet_valid: "is not valid yet: see its dates, and this host's clock",
    of_another_key: "does not match certificate",
    no_key: "holds no private key",
    no_certificate: "holds no certificate: expected PEM",
    half_a_certificate: "cannot be used",
    empty_key: "bad.key' is empty",
    missing_key: "nowhere.key' is not there: give the path of a file",
    folder_as_key: "is a folder: name the file",
    key_for_everybody: "can be read by every user of this host (mode 0644): chmod o-rwx it",
    encrypted_key: "is encrypted: decrypt it (openssl pkey",
    ed25519_key: "bad.pem' is for a key of the kind Ed25519, which gRPC does not speak",
    p521_key: "bad.pem' is for a key of the kind EC P-521, which gRPC does not speak",
    p224_key: "bad.pem' is for a key of the kind EC P-224, which gRPC does not speak",
    rsa_pss_key: "bad.pem' is for a key of the kind RSA-PSS, which gRPC does not speak",
    marked_certificate: "TLS certificate '{}/bad.pem' begins with a byte order mark (BOM)",
    marked_key: "TLS key '{}/bad.key' begins with a byte order mark (BOM)",
    marked_chain: "-----BEGIN must be at the beginning of a line: a byte order mark (BOM)",
    joined_chain: "-----BEGIN must be at the beginning of a line",
    utf16_certificate: "TLS certificate '{}/bad.pem' begins with a byte order mark (BOM)",
    marked_ca: "TLS CA file '{}/marked-ca.pem' begins with a byte order mark (BOM)",
    marked_token: "token file '{}/marked' begins with a byte order mark (BOM)",
    no_ca: "no-ca.pem' holds no usable certificate",
    empty_ca: "empty-ca.pem' is empty",
    public_ca: "name one of your own for clients",
    no_token: "holds no token: write one a line",
    short_token: "line 2: a token of 12 characters can be guessed",
    two_in_a_line: "line 1: a token has letters, digits",
    token_for_everybody: "can be read by every user",
    token_as_path: "is not there: give the path of a file",
}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_bad_files_are_refused(bad: Callable[[Path], dict[str, str]], tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        files_of(tmp_path, **bad(tmp_path))
    assert BAD[bad].replace("{}", str(tmp_path)) in str(caught.value)
    for secret in (TOKEN, "secret-short", "nothing of that kind"):
        assert secret not in str(caught.value), "what is in the file, or may be a token, is in the message"


TAKEN = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_kinds_of_keys_are_those_of_grpc(kind: str) -> None:
    """What is refused, and what is not, is what gRPC does in a handshake."""
    pair = CA.issue(key=TAKEN[kind]())
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(pair.key, pair.cert)]))
    server.start()
    try:
        with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(CA.pem)) as channel:
            states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
            channel.subscribe(states.put, try_to_connect=True)
            ends = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
            state = next(state for state in iter(lambda: states.get(timeout=30), None) if state in ends)
    finally:
        server.stop(None)
    refused = kind_not_in_grpc(ssl.PEM_cert_to_DER_cert(pair.cert.decode()))
    assert (state is grpc.ChannelConnectivity.READY) == (not refused), f"{kind}: {state}, said: {refused!r}"


def test_unreadable_key(tmp_path: Path) -> None:
    saved = GOOD.save(tmp_path)
    Path(saved["key"]).chmod(0o200)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root reads every file
    try:
        with pytest.raises(SettingsError, match="cannot be read: Permission denied; this process runs as user"):
            certificates.read_pair(**saved)
    finally:
        os.seteuid(user)


def test_client_certificates_of_clients(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="has expired"):
        files_of(tmp_path, serving=False, **expired(tmp_path))
    assert files_of(tmp_path, serving=False).current().identity is not None


def test_pipe_as_key(tmp_path: Path) -> None:
    """To open it would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    with deadline(10, "opening a pipe"), pytest.raises(SettingsError, match=r"TLS key .*pipe' is no file"):
        files_of(tmp_path, key=str(tmp_path / "pipe"))


def test_group_may_read_a_key(tmp_path: Path) -> None:
    saved = GOOD.save(tmp_path)
    Path(saved["key"]).chmod(0o640)
    assert files_of(tmp_path, **saved).tls


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    shown = repr(files) + repr(files.current()) + repr(files.settings) + repr(Options(credentials=files.settings))
    assert TOKEN not in shown
    assert "PRIVATE" not in shown


def test_names_of_a_certificate(tmp_path: Path) -> None:
    identity = files_of(tmp_path).current().identity
    assert identity is not None
    assert identity.names == ("127.0.0.1", "localhost")
    assert identity.not_after.endswith("GMT")


def test_replaced_files_are_read_again(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    assert files.current(now=True) is files.current(now=True), "read again though nothing changed"
    put(tmp_path / "token", f"{TOKEN}-2\n{TOKEN}\n")
    assert files.current(now=True).tokens == (f"{TOKEN}-2", TOKEN)
    assert files.current(now=True).version == 1


def test_files_written_anew_are_no_change(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    before = files.current()
    put(tmp_path / "token", (tmp_path / "token").read_bytes())
    assert files.current(now=True) is before, "who renews every file at once would have all connections made anew"


def test_bad_files_do_not_replace_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = files_of(tmp_path)
    before = files.current()
    new = CA.issue()
    put(tmp_path / "tls.pem", new.cert)
    with caplog.at_level(logging.WARNING):
        assert files.current(now=True) is before, "a certificate whose key is still the old one"
        assert files.current(now=True) is before
    assert [record.getMessage() for record in caplog.records if "does not match" in record.getMessage()], (
        "no word of it"
    )
    assert len(caplog.records) == 1, "said more than once"
    put(tmp_path / "tls.key", new.key)
    assert files.current(now=True).pair == (new.cert, new.key)
    (tmp_path / "tls.key").unlink()
    assert files.current(now=True).pair == (new.cert, new.key)


@pytest.mark.parametrize("cause", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("unforeseen")], ids=repr)
def test_unforeseen_error_keeps_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cause: Exception
) -> None:
    files = files_of(tmp_path)
    before, new = files.current(), CA.issue()
    new.save(tmp_path)

    def fail(*_: object) -> int:
        raise cause

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "memfd_create", fail)
        assert files.current(now=True) is before, "an error on the way to new files took the old ones away"
        assert files.current(now=True) is before
    assert len(caplog.records) == 1, "said more than once, or not at all"
    assert str(cause) in caplog.text
    assert files.current(now=True).pair == (new.cert, new.key), "never tried again"


def test_failed_end_of_streams_is_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is all that ends streams of revoked credentials: it must outlive what it meets, and lose nothing."""
    monkeypatch.setattr(authentication, "CHECK_EVERY_S", 0.001)
    monkeypatch.setattr(credentials, "CHECK_EVERY_S", 0.0)
    files, calls = files_of(tmp_path), []

    async def revoke() -> None:
        ended = asyncio.Event()

        def end_streams() -> None:
            calls.append(1)
            if len(calls) < 3:
                raise RuntimeError("streams cannot be ended")
            ended.set()

        task = asyncio.create_task(authentication.watch_revocations(files, end_streams))
        await asyncio.sleep(0)  # it has seen the first token
        put(tmp_path / "token", TOKEN[::-1])
        try:
            await asyncio.wait_for(ended.wait(), 30)
        finally:
            task.cancel()

    asyncio.run(revoke())
    assert caplog.text.count("streams cannot be ended") == 2, "a cause is logged once: one message with its traceback"


@pytest.mark.parametrize("serving", [True, False])
def test_key_of_no_use_does_not_replace(tmp_path: Path, serving: bool, caplog: pytest.LogCaptureFixture) -> None:
    files = files_of(tmp_path, serving)
    CA.issue(key=ec.generate_private_key(ec.SECP521R1())).save(tmp_path)
    assert files.current(now=True).pair == (GOOD.cert, GOOD.key), "nobody could connect from then on"
    assert "of the kind EC P-521" in caplog.text


def test_own_certificate_that_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(tmp_path)
    assert files.explain_certificate() == ""
    monkeypatch.setattr(credentials, "logger", logging.getLogger("quiet"))
    monkeypatch.setattr(files, "_material", CredentialFilesLike.of(files, CA.issue(days=(-5, -1))))
    assert "has expired" in files.explain_certificate()


class CredentialFilesLike:
    @staticmethod
    def of(files: CredentialFiles, pair: Pair) -> credentials.Material:
        """As if time had gone by."""
        now = files.current()
        return credentials.Material(now.version, now.ca, (pair.cert, pair.key), now.tokens, now.identity)


INCOMPLETE = [
    ({"cert": "a.pem"}, False, "a TLS certificate without its key"),
    ({"key": "a.key"}, True, "a TLS key without its certificate"),
    ({"ca": "ca.pem"}, True, "a server needs one, --tls-cert"),
    ({"server_name": "a"}, False, "nothing says which servers to believe"),
    ({"cert": "a.pem", "key": "a.key"}, False, "nothing says which servers to believe"),
    ({"ca": ""}, False, "ca must be text"),
    ({"token_file": 3}, False, "token_file must be text"),
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
    for endpoint in (
        "10.0.0.7:8500",
        "teacher.example:8500",
        "[fd00::7]:8500",
        "localhost.example:80",
        "127.example:1",
    ):
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

    def material(bundle: bytes, *tokens: str) -> credentials.Material:
        return credentials.Material(0, bundle, None, tokens)

    before = material(old.pem, "a")
    for same in (before, material(new.pem + b"# both\n" + old.pem, "a"), material(old.pem, "b", "a")):
        assert not is_revocation(before, same), "streams of students that nothing was taken from end"
    for less in (material(new.pem, "a"), material(old.pem, "b"), material(old.pem)):
        assert is_revocation(before, less)
    assert is_revocation(material(old.pem + new.pem), material(old.pem))


def test_program_that_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "token", TOKEN)
    monkeypatch.chdir(tmp_path)
    files = CredentialFiles(Credentials(token_file="token"))
    monkeypatch.chdir("/")
    put(tmp_path / "token", TOKEN[::-1])
    assert files.current(now=True).tokens == (TOKEN[::-1],)


def test_settings_take_paths(tmp_path: Path) -> None:
    assert Credentials(token_file=tmp_path / "token") == Credentials(token_file=str(tmp_path / "token"))  # type: ignore[arg-type]


def test_names_in_a_bundle_of_cas(tmp_path: Path) -> None:
    """Bundles of systems have the CAs' names as comments, with whatever letters these have."""
    bundle = "# Főtanúsítvány, 台灣\n".encode() + CA.pem
    ca = put(tmp_path / "bundle.pem", bundle)
    assert certificates.read_ca(ca) == bundle
    trusted = certificates.context_for(bundle, None, serving=False).get_ca_certs()
    assert len(trusted) == 1
