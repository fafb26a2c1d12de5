"""Certificates that are renewed, missing, wrong or expired, before a TLS proxy of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.network.toxics import Forwarded, ToxicProxy
from tests.transport.shared import SERVED, score, write_certificate

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.errors import AccessError, ConfigError
from sonic_coffea.testing import FakeServer

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
    with sonic.connect(front.url, **options) as pool:
        score(pool)
        key = options["tls_key"].read_text()
        front.client()
        new, _ = options["tls_key"].read_text(), options["tls_key"].write_text(key)
        score(pool)
        assert "tls_key" in caplog.text
        assert len(set(front.shown)) == 1
        options["tls_key"].write_text(new)
        score(pool)
        assert len(set(front.shown)) == 2


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
    "key as root": (lambda f: {"tls_root": f.client()["tls_key"]}, ConfigError, "tls_root"),
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
            with pytest.raises(error, match=option):
                score(pool)


def test_a_port_with_tls_is_told_from_a_lost_server(front: Front) -> None:
    with sonic.connect(front.url.replace("grpcs", "grpc"), retry_timeout_s=1000.0) as pool:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"did you mean grpcs://127\.0\.0\.1"):
                score(pool)


def test_a_proxy_whose_server_is_lost_is_not_blamed_on_the_certificate(front: Front) -> None:
    """It hangs up after the handshake, too."""
    front.behind.stop()
    with (
        sonic.connect(front.url, retry_timeout_s=0.5, **front.client()) as pool,
        pytest.raises(errors.ServerLostError),
    ):
        score(pool)
