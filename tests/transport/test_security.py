"""TLS, mutual TLS, tokens and compression, against real Tritons."""

from __future__ import annotations

import contextlib
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from tests.ports import held_port

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.server import ensure
from sonic_coffea.server.launch.runtimes import Serving, choose
from sonic_coffea.transport import ConnectionOptions, Tls, connect_transport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.scored import Scored


@dataclass
class Secured:
    """A Triton with TLS, and the files that it takes to speak to it."""

    url: str
    root: str
    cert: str
    key: str
    mutual: bool


@contextlib.contextmanager
def triton(repository: Path, arguments: list[str], log: Path, ready: Any) -> Iterator[str]:
    """Run a Triton without what a `LocalServer` adds."""
    installed = ensure()
    serving = Serving(
        arguments=[],
        repository=repository,
        folder=repository,
        shared_memory="",
        threads=None,
        env={},
    )
    env = choose("pip", installation=installed).launch(serving).env
    with log.open("w") as out, held_port() as port:
        server = subprocess.Popen(
            [
                str(installed.tritonserver),
                f"--model-repository={repository}",
                f"--backend-directory={installed.backend_directory}",
                "--grpc-address=127.0.0.1",
                f"--grpc-port={port}",
                "--allow-http=false",
                "--allow-metrics=false",
                *arguments,
            ],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 60
            while not ready(port):
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def files(folder: Path, issued: trustme.LeafCert, name: str) -> tuple[str, str]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    return str(cert), str(key)


@pytest.fixture(scope="module", params=["tls", "mutual"])
def secured(
    request: pytest.FixtureRequest,
    authority: trustme.CA,
    repository: Path,
    installation: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    root = folder / "ca.pem"
    authority.cert_pem.write_to_path(str(root))
    cert, key = files(folder, authority.issue_cert("127.0.0.1", "localhost"), "server")
    mine, my_key = files(folder, authority.issue_cert("client@example.org"), "client")
    arguments = [
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={cert}",
        f"--grpc-server-key={key}",
        f"--grpc-root-cert={root}",
        f"--grpc-use-ssl-mutual={'true' if request.param == 'mutual' else 'false'}",
    ]
    options = ConnectionOptions(tls=Tls(root=str(root), cert=mine, key=my_key))

    def ready(port: int) -> bool:
        connection = connect_transport(f"grpcs://127.0.0.1:{port}", options=options)
        with contextlib.closing(connection):
            return connection.ready()

    log = folder / "triton.log"
    with triton(repository, arguments, log, ready) as address:
        yield Secured(f"grpcs://{address}", str(root), mine, my_key, request.param == "mutual")


def test_scores_over_tls(
    secured: Secured,
    scored: Scored,
) -> None:
    options = {"tls_root": secured.root, "tls_cert": secured.cert, "tls_key": secured.key}
    with sonic.connect(secured.url, **options) as pool:
        scored(pool)


@pytest.mark.parametrize("wrong", ["nothing", "authority", "name", "expired"])
def test_a_server_that_cannot_be_trusted(
    wrong: str, secured: Secured, authority: trustme.CA, repository: Path, tmp_path: Path
) -> None:
    """It is no use to ask again, and nothing is sent to it."""
    root: str | None = secured.root
    url = secured.url
    with contextlib.ExitStack() as stack:
        if wrong == "nothing":
            root = None
        elif wrong == "authority":
            root = str(tmp_path / "other.pem")
            trustme.CA().cert_pem.write_to_path(root)
        else:
            ended = datetime.now(timezone.utc) - timedelta(days=1)
            issued = (
                authority.issue_cert("elsewhere.example")
                if wrong == "name"
                else authority.issue_cert("127.0.0.1", not_after=ended)
            )
            cert, key = files(tmp_path, issued, "wrong")
            arguments = [
                "--grpc-use-ssl=true",
                f"--grpc-server-cert={cert}",
                f"--grpc-server-key={key}",
                f"--grpc-root-cert={secured.root}",
            ]
            log = tmp_path / "log"

            def listens(port: int) -> bool:
                return f"Started GRPCInferenceService at 127.0.0.1:{port}" in log.read_text()

            url = f"grpcs://{stack.enter_context(triton(repository, arguments, log, listens))}"
        connection = stack.enter_context(
            contextlib.closing(
                connect_transport(
                    url,
                    options=ConnectionOptions(
                        tls=Tls(root=root, cert=secured.cert, key=secured.key)
                    ),
                )
            )
        )
        with pytest.raises(errors.AccessError, match="trust each other"):
            connection.contract("tagger", None)
        assert not connection.ready()


@pytest.mark.parametrize("wrong", ["none", "stranger"])
def test_a_client_that_cannot_be_trusted(wrong: str, secured: Secured, tmp_path: Path) -> None:
    cert, key = None, None
    if wrong == "stranger":
        cert, key = files(tmp_path, trustme.CA().issue_cert("client@example.org"), "stranger")
    options = ConnectionOptions(tls=Tls(root=secured.root, cert=cert, key=key))
    with contextlib.closing(connect_transport(secured.url, options=options)) as connection:
        if not secured.mutual:
            assert connection.contract("tagger", None).max_rows == 64
            return
        with pytest.raises(errors.AccessError, match="tls_cert= and tls_key="):
            connection.contract("tagger", None)


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests(
    compression: str,
    server: sonic.LocalServer,
    scored: Scored,
) -> None:
    with sonic.connect(server, compression=compression) as pool:
        scored(pool)


def test_an_error_does_not_show_the_token() -> None:
    def token() -> str:
        return b"hush-\xff".decode()

    options = ConnectionOptions(token=token)
    with (
        contextlib.closing(connect_transport("grpc://127.0.0.1:9", options=options)) as connection,
        pytest.raises(errors.ConfigError, match=r"token= names failed: UnicodeDecodeError$"),
    ):
        connection.info()
