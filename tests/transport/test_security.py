"""TLS, mutual TLS, a header that a server demands, and compression, with real Tritons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from tests.network.tritons import Triton
from tests.ports import held_port
from tests.transport.shared import write_certificate
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.transport import ConnectionOptions, connect_transport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.scored import Scored


HEADERS = {"triton-grpc-protocol-key": "secret"}


@dataclass
class Secured:
    """A Triton with TLS, and the files that it takes to speak to it."""

    url: str
    files: dict[str, str]
    mutual: bool

    def options(self, **changed: Any) -> ConnectionOptions:
        return ConnectionOptions(**{**self.files, "headers": HEADERS, **changed})


@pytest.fixture(scope="module", params=["tls", "mutual"])
def secured(
    request: pytest.FixtureRequest,
    repository: Path,
    installation: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Secured]:
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    root = folder / "ca.pem"
    authority.cert_pem.write_to_path(str(root))
    cert, key = write_certificate(folder, authority.issue_cert("127.0.0.1"), "server")
    mine = write_certificate(folder, authority.issue_cert("client@example.org"), "client")
    arguments = [
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={cert}",
        f"--grpc-server-key={key}",
        f"--grpc-root-cert={root}",
        "--grpc-restricted-protocol=health,metadata:key=secret",
        f"--grpc-use-ssl-mutual={'true' if request.param == 'mutual' else 'false'}",
    ]
    files = dict(zip(("tls_root", "tls_cert", "tls_key"), map(str, (root, *mine)), strict=True))
    with held_port() as port:
        secured = Secured(f"grpcs://127.0.0.1:{port}", files, request.param == "mutual")
        server = Triton(repository, folder, port, arguments=arguments)
        server.launch()
        try:
            with connect_transport(secured.url, options=secured.options()) as connection:
                until(connection.ready, what="the server")
            yield secured
        finally:
            server.end()


def test_scores_over_tls(secured: Secured, scored: Scored) -> None:
    with sonic.connect(secured.url, headers=HEADERS, **secured.files) as pool:
        scored(pool)


def test_only_the_header_that_a_server_demands_opens_it(secured: Secured) -> None:
    options = secured.options(headers=dict.fromkeys(HEADERS, "guess"))
    with connect_transport(secured.url, options=options) as connection:
        with pytest.raises(errors.AccessError, match="restricted"):
            connection.info()
        assert not connection.ready()


@pytest.mark.parametrize("wrong", ["none", "stranger"])
def test_only_mutual_tls_wants_a_certificate(wrong: str, secured: Secured, tmp_path: Path) -> None:
    files: Any = (None, None)
    if wrong == "stranger":
        stranger = trustme.CA().issue_cert("client@example.org")
        files = map(str, write_certificate(tmp_path, stranger, "stranger"))
    cert, key = files
    options = secured.options(tls_cert=cert, tls_key=key)
    with connect_transport(secured.url, options=options) as connection:
        if not secured.mutual:
            assert connection.metadata("tagger", None).max_rows == 64
            return
        with pytest.raises(errors.AccessError, match="tls_cert= and tls_key="):
            connection.metadata("tagger", None)


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests(compression: str, server: sonic.LocalServer, scored: Scored) -> None:
    with sonic.connect(server, compression=compression) as pool:
        scored(pool)
