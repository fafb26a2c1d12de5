"""Tokens, headers and certificates: renewed, missing, wrong, expired, and shown to nobody else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from tests.network.toxics import Forwarded, ToxicProxy
from tests.network.tritons import Triton
from tests.ports import held_port
from tests.scored import Scored
from tests.transport.shared import EVENTS, MODEL, SERVED, score, write_certificate
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.errors import AccessError, ConfigError
from sonic_coffea.pool import Settings
from sonic_coffea.testing import FakeServer
from sonic_coffea.transport import ConnectionOptions, Token, connect_transport

CLIENT = "client@example.org"


class Shown(Forwarded):
    """A connection whose client has shown a certificate."""

    async def serve(self, reader: asyncio.StreamReader) -> None:
        certificate = self.writers[0].get_extra_info("peercert")
        self.server.shown.append(certificate["serialNumber"])
        await super().serve(reader)


class Front(ToxicProxy):
    """Ends TLS before a server, and remembers the certificates that clients show."""

    link = Shown

    def __init__(self, server: FakeServer, authority: trustme.CA, folder: Path) -> None:
        super().__init__(server.url)
        self.behind, self.authority, self.folder = server, authority, folder
        self.shown: list[int] = []

    @property
    def root(self) -> Path:
        path = self.folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(path))
        return path

    def client(
        self, issued: trustme.LeafCert | None = None, name: str = "client"
    ) -> dict[str, Any]:
        """Write a client's certificate and key, and return the options of `connect`."""
        issued = issued or self.authority.issue_cert(CLIENT)
        cert, key = write_certificate(self.folder, issued, name)
        return {"tls_root": self.root, "tls_cert": cert, "tls_key": key}


@contextlib.contextmanager
def serving(folder: Path, authority: trustme.CA, issued: trustme.LeafCert) -> Iterator[Front]:
    """Serve a model behind TLS with a certificate, to clients of the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    with FakeServer(SERVED) as server:
        front = Front(server, authority, folder)
        front.tls = context
        with front:
            yield front


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    authority = trustme.CA()
    with serving(tmp_path, authority, authority.issue_cert("127.0.0.1")) as front:
        yield front


def yesterday() -> datetime:
    return datetime.now(timezone.utc) - timedelta(days=1)


@pytest.mark.parametrize("wrong", ["nothing", "authority", "name", "expired"])
def test_servers_that_cannot_be_trusted_are_sent_nothing(wrong: str, tmp_path: Path) -> None:
    """An error at once: it is no use to ask again."""
    authority = trustme.CA()
    issued = authority.issue_cert(
        "elsewhere.example" if wrong == "name" else "127.0.0.1",
        not_after=yesterday() if wrong == "expired" else None,
    )
    with serving(tmp_path, authority, issued) as front:
        options = front.client()
        if wrong == "nothing":
            del options["tls_root"]
        elif wrong == "authority":
            trustme.CA().cert_pem.write_to_path(str(options["tls_root"]))
        with (
            sonic.connect(front.url, retry_timeout_s=1000.0, **options) as pool,
            pytest.raises(AccessError, match="trust each other"),
        ):
            score(pool)
        assert front.behind.calls == []


def test_certificates_are_read_again_when_they_change_as_a_whole(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    options = front.client()
    with sonic.connect(front.url, channels=1, hedge_after_s=60, **options) as pool:
        score(pool)
        key = options["tls_key"].read_text()
        front.client()
        new, _ = options["tls_key"].read_text(), options["tls_key"].write_text(key)
        score(pool)
        score(pool)
        (warning,) = caplog.messages
        assert "tls_key" in warning
        assert len(set(front.shown)) == 1
        options["tls_key"].write_text(new)
        score(pool)
        assert len(set(front.shown)) == 2
        # What is in flight meanwhile is answered.
        front.behind.requests.clear()
        front.behind.hold()
        pendings = []
        for sent in (1, 2):
            front.client()
            pendings.append(MODEL.submit(EVENTS, pool=pool))
            until(lambda sent=sent: len(front.behind.requests) >= sent)
        front.behind.release()
        assert [len(pending.result()) for pending in pendings] == [2, 2]
        assert pool.statistics.total().retries == 0


def expired(front: Front) -> dict[str, Any]:
    return front.client(front.authority.issue_cert(CLIENT, not_after=yesterday()))


WRONG: dict[str, tuple[Callable[[Front], dict[str, Any]], type[errors.SonicError], str]] = {
    "none": (lambda f: {"tls_root": f.root}, AccessError, "tls_cert="),
    "strange": (lambda f: f.client(trustme.CA().issue_cert(CLIENT)), AccessError, "tls_cert="),
    "expired": (expired, AccessError, "tls_cert="),
    "another key": (
        lambda f: {**f.client(), "tls_key": f.client(name="other")["tls_key"]},
        ConfigError,
        "tls_key",
    ),
    "key as root": (
        lambda f: {"tls_root": f.client()["tls_key"]},
        ConfigError,
        "client.key.*expected certificates in PEM format",
    ),
    "no root": (lambda f: {"tls_root": f.folder / "none"}, ConfigError, "none.*No such file"),
}


@pytest.mark.parametrize(("options_of", "error", "option"), WRONG.values(), ids=WRONG)
def test_what_a_server_will_never_take_fails_at_once(
    front: Front,
    options_of: Callable[[Front], dict[str, Any]],
    error: type[errors.SonicError],
    option: str,
) -> None:
    """Rather than as a lost server, after all the time that one may be away."""
    with sonic.connect(front.url, retry_timeout_s=1000.0, **options_of(front)) as pool:
        for _ in range(2):
            with pytest.raises(error, match=option) as caught:
                score(pool)
            assert caught.value.__cause__ is None


def test_ports_with_tls_and_lost_servers_behind_them_are_told_apart(front: Front) -> None:
    with sonic.connect(front.url.replace("grpcs", "grpc"), retry_timeout_s=1000.0) as pool:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"did you mean grpcs://127\.0\.0\.1"):
                score(pool)
    front.behind.stop()  # the proxy hangs up after the handshake then, as without a certificate
    with (
        sonic.connect(front.url, retry_timeout_s=0.5, **front.client()) as pool,
        pytest.raises(errors.ServerLostError),
    ):
        score(pool)


def test_scores_over_mutual_tls_to_who_has_the_certificate_and_the_header(
    repository: Path, installation: Any, tmp_path: Path, scored: Scored
) -> None:
    root, authority = tmp_path / "ca.pem", trustme.CA()
    authority.cert_pem.write_to_path(str(root))
    cert, key = write_certificate(tmp_path, authority.issue_cert("127.0.0.1"), "server")
    mine = write_certificate(tmp_path, authority.issue_cert("client@example.org"), "client")
    arguments = [
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={cert}",
        f"--grpc-server-key={key}",
        f"--grpc-root-cert={root}",
        "--grpc-use-ssl-mutual=true",
        "--grpc-restricted-protocol=health,metadata:key=secret",
    ]
    options: dict[str, Any] = {
        **dict(zip(("tls_root", "tls_cert", "tls_key"), map(str, (root, *mine)), strict=True)),
        "headers": {"triton-grpc-protocol-key": "secret"},
    }
    with held_port() as port:
        url = f"grpcs://127.0.0.1:{port}"

        def connect(**changed: Any) -> Any:
            return connect_transport(url, options=ConnectionOptions(**{**options, **changed}))

        server = Triton(repository, tmp_path, port, arguments=arguments)
        server.launch()
        try:
            with connect() as connection:
                until(connection.ready, what="the server")
            with sonic.connect(url, **options) as pool:
                scored(pool)
            with connect(headers={"triton-grpc-protocol-key": "guess"}) as connection:
                with pytest.raises(errors.AccessError, match="restricted"):
                    connection.info()
                assert not connection.ready()
            with (
                connect(tls_cert=None, tls_key=None) as connection,
                pytest.raises(errors.AccessError, match="tls_cert= and tls_key="),
            ):
                connection.metadata("tagger", None)
        finally:
            server.end()


@pytest.mark.parametrize("content", [b"", None, b"\xff"])
def test_a_file_that_is_being_renewed_leaves_the_last_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    token = Token(path)
    assert token() == "first"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert [token(), token()] == ["first", "first"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the token that it had is used" in record.message
    assert "first" not in record.message
    path.write_text("second")
    assert token() == "second"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b" \n", "no characters"),
        (b"hush-\xff", "bytes that are not UTF-8"),
        (b"hush\nhush", "such as a line break, that no token has"),
        ("hush-é".encode(), "such as a line break, that no token has"),
    ],
)
def test_a_file_that_never_has_a_token_is_named_and_not_quoted(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    message = f"token file '.*token' on .*{reason}"
    with pytest.raises(errors.ConfigError, match=message) as caught:
        Token(path)()
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None


def absent() -> str:
    raise KeyError("hush")


def garbage() -> str:
    return b"hush-\xff".decode()


RETURNED = "the function that token= names returned"


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (lambda: "hush ä", f"{RETURNED} characters, .* that no token has"),
        (lambda: "", f"{RETURNED} no characters"),
        (lambda: b"hush", f"{RETURNED} bytes, expected str"),
        (lambda: Path("hush"), rf"{RETURNED} \w+Path, expected str"),
        (lambda: None, f"{RETURNED} NoneType, expected str"),
        (absent, "the function that token= names failed: KeyError$"),
        (garbage, "the function that token= names failed: UnicodeDecodeError$"),
    ],
)
def test_functions_without_a_token_are_named_and_show_nothing(
    token: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ConnectionOptions(token=Token(token))
    with (
        connect_transport("grpc://127.0.0.1:9", options=options) as connection,
        pytest.raises(errors.ConfigError, match=message) as caught,
    ):
        connection.info()
    assert "hush" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_tokens_and_headers_are_never_shown() -> None:
    settings = Settings.make("grpc://s:1", token="hush", headers={"a-bin": b"hush", "B": "hush"})
    assert settings.headers["B"] == "hush"
    for options in (settings, settings.connection_options()):
        assert "hush" not in repr(options)


def jwt(valid_s: float) -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + valid_s}).encode())
    return f"e30.{claims.decode().rstrip('=')}.x"


@contextlib.contextmanager
def guarded(token: str) -> Iterator[FakeServer]:
    """Serve a model to whoever has the token."""
    with FakeServer(SERVED, headers={"authorization": f"Bearer {token}"}) as server:
        yield server


@pytest.mark.parametrize(
    ("valid_s", "once"), [(None, True), (1e3, True), (1.0, False), (-1.0, True)]
)
def test_a_function_is_called_once_until_its_token_is_near_its_end(
    valid_s: float | None, once: bool
) -> None:
    """By a clock that may be wrong: it is not called for each request after the end."""
    token = "opaque" if valid_s is None else jwt(valid_s)
    called = []

    def fetch() -> str:
        called.append(token)
        return token

    with guarded(token) as server, sonic.connect([server.url], token=fetch) as pool:
        for _ in range(3):
            score(pool)
        assert len(called) == 1 or not once
        until(lambda: once or [score(pool), len(called) == 2][-1])


@pytest.mark.parametrize(
    ("token", "message"), [("wrong", "token_file= reads a new one"), (lambda: "wrong", "")]
)
def test_a_token_that_no_server_ever_took_is_an_error_at_once(token: Any, message: str) -> None:
    with (
        guarded("right") as server,
        sonic.connect(server.url, token=token, retry_timeout_s=1000.0) as pool,
        pytest.raises(errors.AccessError) as caught,
    ):
        score(pool)
    assert message in str(caught.value)
    assert not isinstance(caught.value, errors.TokenExpiredError)
    assert pool.statistics.total().retries == 0


def test_a_function_that_exits_ends_its_call_only() -> None:
    """Not the thread that sends: the next call has a token."""
    exits, asked = [False], list[bool]()

    def fetch() -> str:
        asked.append(True)
        if exits[0]:
            raise SystemExit
        return jwt(1.0)

    with FakeServer(SERVED) as server:
        with sonic.connect(server.url, token=fetch) as pool:
            score(pool)
            exits[0] = True
            until(lambda: [score(pool), len(asked) > 1][-1])
        with (
            sonic.connect(server.url, token=fetch) as pool,
            pytest.raises(errors.ConfigError, match="token= names failed: SystemExit"),
        ):
            score(pool)


def test_a_slow_function_is_logged_while_it_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    def fetch() -> str:
        until(lambda: "takes more than 1 s" in caplog.text)
        return "slow"

    assert Token(fetch)() == "slow"


def test_secrets_that_a_server_repeats_are_not_shown(tmp_path: Path, caplog: Any) -> None:
    secrets: Any = {"token": "hush", "headers": {"x-key": "Key sesame-42"}}
    with FakeServer(SERVED) as server, sonic.connect(server.url, **secrets) as pool:
        server.fail(grpc.StatusCode.INTERNAL, "no such user: Bearer hush, sesame-42", times=100)
        with pytest.raises(errors.InferenceError, match="no such user: Bearer …, …") as caught:
            score(pool)
        pool.dump(tmp_path / "dump")
        shown = f"{caught.value!r} {pool._repr_html_()} {(tmp_path / 'dump').read_text()}"
    assert not any(word in f"{shown}{caplog.text}" for word in ("hush", "sesame"))
