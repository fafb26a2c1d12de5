"""Mutual TLS, a header that a server demands, and compression, with real Tritons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.network.tritons import Triton
from tests.ports import held_port
from tests.scored import Scored
from tests.transport.shared import write_certificate
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.transport import ConnectionOptions, connect_transport


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


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests(compression: str, server: sonic.LocalServer, scored: Scored) -> None:
    with sonic.connect(server, compression=compression) as pool:
        scored(pool)
