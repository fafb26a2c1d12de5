"""Tritons on loopback that demand no secret: what stands behind a proxy."""

from __future__ import annotations

import contextlib
import secrets
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from tests.network.processes import Service
from tests.ports import held_port
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sonic_coffea.server import ensure
from sonic_coffea.transport import connect_transport


class Triton(Service):
    """A Triton that can be killed, stopped, ended and started again at the same port.

    Parameters
    ----------
    repository, folder : Path
        What it serves, and where its log goes.
    port, address : int, str
        Where it listens.
    arguments : sequence of str
        More arguments of ``tritonserver``.
    """

    def __init__(
        self,
        repository: Path,
        folder: Path,
        port: int,
        *,
        address: str = "127.0.0.1",
        arguments: Sequence[str] = (),
    ) -> None:
        self.port = port
        self.address = address
        self.url = f"grpc://{address}:{port}"
        self.hung = False
        installation = ensure()
        name = f"sonic_test_{secrets.token_hex(6)}_"
        argv = [
            str(installation.tritonserver),
            f"--backend-directory={installation.backend_directory}",
            f"--backend-config=python,shm-region-prefix-name={name}",
            f"--model-repository={repository}",
            f"--grpc-address={address}",
            f"--grpc-port={port}",
            "--allow-http=false",
            "--allow-metrics=false",
            *arguments,
        ]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        env = installation.environment() | threads
        super().__init__(
            argv,
            folder / f"triton-{address}-{port}.log",
            self._is_ready,
            env=env,
            grace_s=0.0,  # it may end at once: no test waits for what is in flight as it stops
            leftovers=[f"{name}*"],
            # Its Python backend aborts now and then as models come and go.
            aborts="boost::interprocess::lock_exception",
        )

    def _is_ready(self) -> bool:
        with connect_transport(self.url) as connection:
            return connection.ready()

    def stop(self) -> None:
        """Have it hang: it accepts connections, and answers nothing."""
        self.hung = True
        self.send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on where it was stopped."""
        self.send(signal.SIGCONT)

    def leave(self) -> None:
        """Ask it to end in good order, and wait until it has: it answers while it unloads."""
        self.ends(signal.SIGTERM)

    def tell(self, what: str, model: str = "tagger") -> Any:
        """Have it "Load" or "Unload" a model."""
        request = getattr(service_pb2, f"RepositoryModel{what}Request")(model_name=model)
        with grpc.insecure_channel(f"{self.address}:{self.port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return getattr(stub, f"RepositoryModel{what}")(request, timeout=60)


def restore(tritons: Sequence[Triton]) -> None:
    """Have Tritons as they were at first, whatever a test has done to them."""
    for triton in tritons:
        if triton.hung:  # it may end itself a bit later, though it went on
            triton.end()
        triton.hung = False
        triton.launch()
    for triton in tritons:
        triton.wait()


@contextlib.contextmanager
def tritons(
    repository: Path, folder: Path, number: int, *, arguments: Sequence[str] = ()
) -> Iterator[list[Triton]]:
    """Provide several Tritons that serve the same repository; each starts with `restore`."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in range(number)]
        running = [Triton(repository, folder, port, arguments=arguments) for port in ports]
        for triton in running:
            stack.callback(triton.end)
        yield running
