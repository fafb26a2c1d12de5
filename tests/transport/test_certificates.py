"""Certificates that are renewed, missing, wrong or expired, before a TLS proxy of the tests."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import awkward as ak
import pytest
import trustme
from tests.transport.shared import forward, write_certificate

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
EVENTS = ak.Array([[{"pt": 0.0}], []])


@dataclass
class Front:
    """Ends TLS before a server, and remembers the certificates that clients show."""

    authority: trustme.CA
    folder: Path
    server: FakeServer
    port: int
    shown: list[int] = field(default_factory=list)

    @property
    def root(self) -> Path:
        path = self.folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(path))
        return path

    def client(self, issued: trustme.LeafCert | None = None) -> dict[str, Any]:
        """Write a client's certificate and key, and return the options of `connect`."""
        issued = issued or self.authority.issue_cert("client@example.org")
        cert, key = write_certificate(self.folder, issued, "client")
        return {"tls_root": self.root, "tls_cert": cert, "tls_key": key}


@contextlib.contextmanager
def serving(folder: Path, authority: trustme.CA, issued: trustme.LeafCert) -> Iterator[Front]:
    """Serve a model behind TLS with a certificate, to clients of the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    with (
        FakeServer({"m": FakeModel.of(MODEL)}) as server,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        front = Front(authority, folder, server, listener.getsockname()[1])

        def accept(plain: socket.socket) -> socket.socket:
            tls = context.wrap_socket(plain, server_side=True)
            front.shown.append(tls.getpeercert()["serialNumber"])
            return tls

        forward(listener, server.url, accept)
        yield front
        listener.shutdown(socket.SHUT_RDWR)


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
        url = f"grpcs://127.0.0.1:{front.port}"
        with (
            sonic.connect(url, retry_timeout_s=1000.0, **options) as pool,
            pytest.raises(errors.AccessError, match="trust each other"),
        ):
            MODEL(EVENTS, pool=pool)
        assert front.server.calls == []


def test_a_certificate_is_read_again_when_it_changes(front: Front) -> None:
    with sonic.connect(f"grpcs://127.0.0.1:{front.port}", **front.client()) as pool:
        assert MODEL(EVENTS, pool=pool).top.tolist() == [[0.5], []]
        front.client()
        assert MODEL(EVENTS, pool=pool).top.tolist() == [[0.5], []]
        assert len(set(front.shown)) == 2


def test_a_half_written_certificate_changes_nothing(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    options = front.client()
    with sonic.connect(f"grpcs://127.0.0.1:{front.port}", **options) as pool:
        MODEL(EVENTS, pool=pool)
        key = options["tls_key"].read_text()
        front.client()
        new, _ = options["tls_key"].read_text(), options["tls_key"].write_text(key)
        assert MODEL(EVENTS, pool=pool).top.tolist() == [[0.5], []]
        assert "tls_key" in caplog.text
        assert len(set(front.shown)) == 1
        options["tls_key"].write_text(new)
        MODEL(EVENTS, pool=pool)
        assert len(set(front.shown)) == 2


def none(front: Front) -> dict[str, Any]:
    return {"tls_root": front.root}


def strange(front: Front) -> dict[str, Any]:
    return front.client(trustme.CA().issue_cert("client@example.org"))


def expired(front: Front) -> dict[str, Any]:
    return front.client(front.authority.issue_cert("client@example.org", not_after=yesterday()))


def another_key(front: Front) -> dict[str, Any]:
    options = front.client()
    other = shutil.copy(options["tls_key"], front.folder / "other.key")
    return {**front.client(), "tls_key": other}


def key_as_root(front: Front) -> dict[str, Any]:
    return {"tls_root": front.client()["tls_key"]}


@pytest.mark.parametrize(
    ("options_of", "error", "option"),
    [
        (none, errors.AccessError, "tls_cert="),
        (strange, errors.AccessError, "tls_cert="),
        (expired, errors.AccessError, "tls_cert="),
        (another_key, errors.ConfigError, "tls_key"),
        (key_as_root, errors.ConfigError, "tls_root"),
    ],
)
def test_what_a_server_will_never_take_fails_at_once(
    front: Front,
    options_of: Callable[[Front], dict[str, Any]],
    error: type[errors.SonicError],
    option: str,
) -> None:
    """Rather than as a lost server, after all the time that one may be away."""
    url = f"grpcs://127.0.0.1:{front.port}"
    with sonic.connect(url, retry_timeout_s=1000.0, **options_of(front)) as pool:
        for _ in range(2):
            with pytest.raises(error, match=option):
                MODEL(EVENTS, pool=pool)


def test_a_port_with_tls_is_told_from_a_lost_server(front: Front) -> None:
    with sonic.connect(f"grpc://127.0.0.1:{front.port}", retry_timeout_s=1000.0) as pool:
        for _ in range(2):
            with pytest.raises(errors.ConfigError, match=r"did you mean grpcs://127\.0\.0\.1"):
                MODEL(EVENTS, pool=pool)


def test_a_proxy_whose_server_is_lost_is_not_blamed_on_the_certificate(front: Front) -> None:
    """It hangs up after the handshake, too."""
    front.server.stop()
    url = f"grpcs://127.0.0.1:{front.port}"
    with (
        sonic.connect(url, retry_timeout_s=0.5, **front.client()) as pool,
        pytest.raises(errors.ServerLostError),
    ):
        MODEL(EVENTS, pool=pool)
