"""Tritons on loopback that demand no secret: what stands behind a proxy."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from typing import TYPE_CHECKING

from tests.network.processes import Service
from tests.ports import held_port
from tests.waiting import until
from tritonclient.grpc import InferenceServerClient

from sonic_coffea.server import ensure
from sonic_coffea.server._probe import is_ready

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_STARTS = 5
# By it, Triton's Python backend aborts now and then as models come and go.
_ABORT = "boost::interprocess::lock_exception"


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
        # The server's Python finds its packages by its own environment alone.
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        env["VIRTUAL_ENV"] = str(installation.root)
        env["PATH"] = f"{installation.python.parent}{os.pathsep}{env.get('PATH', os.defpath)}"
        env["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, installation.library_path))
        # On a busy machine, a model's process may stand still for a while.
        env["SONIC_COFFEA_STALL_S"] = "30"
        env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        super().__init__(
            argv,
            folder / f"triton-{address}-{port}.log",
            lambda: is_ready(self.url),
            env=env,
            grace_s=0.0,  # it may end at once: no test waits for what is in flight as it stops
            leftovers=[f"{name}*"],
        )

    def launch(self) -> None:
        if not self.running:
            self.hung = False
        super().launch()

    def wait(self, timeout_s: float = 120.0) -> None:
        """Return when it is ready; it is started again if it aborts."""
        for left in reversed(range(_STARTS)):
            try:
                super().wait(timeout_s)
            except RuntimeError as error:
                if not left or _ABORT not in str(error):
                    raise
                self.launch()
            else:
                break

    def stop(self) -> None:
        """Have it hang: it accepts connections, and answers nothing."""
        self.hung = True
        self.send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on where it was stopped."""
        self.send(signal.SIGCONT)

    def leave(self) -> None:
        """Ask it to end in good order, and wait until it has: it answers while it unloads."""
        self.send(signal.SIGTERM)
        until(lambda: not self.running, 60.0, "the end of a Triton")

    def requests(self, model: str) -> int:
        """Return how many requests for a model it has answered."""
        with contextlib.closing(InferenceServerClient(f"{self.address}:{self.port}")) as client:
            (statistics,) = client.get_inference_statistics(model).model_stats
            answered: int = statistics.inference_stats.success.count
            return answered


def restore(tritons: Sequence[Triton]) -> None:
    """Have Tritons as they were at first, whatever a test has done to them."""
    for triton in tritons:
        if triton.hung:  # it may end itself a bit later, though it went on
            triton.end()
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
