"""A header that a server demands, and compression, with real Tritons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.network.tritons import Triton
from tests.ports import held_port
from tests.scored import Scored
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.transport import ConnectionOptions, connect_transport


def test_who_has_the_header_that_a_server_demands_reaches_it(
    repository: Path, installation: Any, tmp_path: Path, scored: Scored
) -> None:
    name, key = "triton-grpc-protocol-key", "secret"
    with held_port() as port:
        url = f"grpc://127.0.0.1:{port}"

        def connect(key: str) -> Any:
            return connect_transport(url, options=ConnectionOptions(headers={name: key}))

        demanded = f"--grpc-restricted-protocol=health,metadata:key={key}"
        server = Triton(repository, tmp_path, port, arguments=[demanded])
        server.launch()
        try:
            with connect(key) as connection:
                until(connection.ready, what="the server")
            with sonic.connect(url, headers={name: key}) as pool:
                scored(pool)
            with connect("guess") as connection:
                with pytest.raises(errors.AccessError, match="restricted"):
                    connection.info()
                assert not connection.ready()
        finally:
            server.end()


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests(compression: str, server: sonic.LocalServer, scored: Scored) -> None:
    with sonic.connect(server, compression=compression) as pool:
        scored(pool)
