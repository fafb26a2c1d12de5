"""Tritons on loopback that demand no secret: what stands behind a proxy."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from typing import TYPE_CHECKING

from tests.network.processes import Kept
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


class Triton:
    """A Triton that can be killed, stopped, ended and started again at the same port.

    Parameters
    ----------
    repository, folder : Path
        What it serves, and where its log goes.
    port : int
        Where it listens, on loopback.
    arguments : sequence of str
        More arguments of ``tritonserver``.
    ends_if_stalled : bool
        Whether it ends when a model's process stands still, as a local server does; where the
        machine is busy, that may be at any time.
    """

    def __init__(
        self,
        repository: Path,
        folder: Path,
        port: int,
        *,
        address: str = "127.0.0.1",
        arguments: Sequence[str] = (),
        ends_if_stalled: bool = False,
    ) -> None:
        self.port = port
        self.address = address
        self.url = f"grpc://{address}:{port}"
        self.log = folder / f"triton-{address}-{port}.log"
        self._repository = repository
        self._arguments = [
            f"--model-repository={repository}",
            f"--grpc-address={address}",
            f"--grpc-port={port}",
            "--allow-http=false",
            "--allow-metrics=false",
            *arguments,
        ]
        self._ends_if_stalled = ends_if_stalled
        self._kept: Kept | None = None
        self._hung = False

    def launch(self) -> None:
        """Start it, and do not wait; harmless when it runs."""
        if self.running:
            return
        self.end()
        self._hung = False
        installation = ensure()
        name = f"sonic_test_{secrets.token_hex(6)}_"
        argv = [
            str(installation.tritonserver),
            f"--backend-directory={installation.backend_directory}",
            f"--backend-config=python,shm-region-prefix-name={name}",
            *self._arguments,
        ]
        # The server's Python finds its packages by its own environment alone.
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        env["VIRTUAL_ENV"] = str(installation.root)
        env["PATH"] = f"{installation.python.parent}{os.pathsep}{env.get('PATH', os.defpath)}"
        env["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, installation.library_path))
        if not self._ends_if_stalled:
            env["SONIC_COFFEA_STALL_S"] = "30"
        env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # It may end at once: no test waits for what is in flight as it stops.
        self._kept = Kept(argv, self.log, env=env, grace_s=0.0, leftovers=[f"{name}*"])

    def wait(self) -> None:
        """Return when it is ready; it is started again if it stalls, where it may, or aborts."""
        for left in reversed(range(_STARTS)):
            assert self._kept is not None
            try:
                self._kept.wait(lambda: is_ready(self.url), timeout_s=120.0)
            except RuntimeError as error:
                if not left or not (self._ends_if_stalled or _ABORT in str(error)):
                    raise
                self.launch()
            else:
                return

    def start(self) -> None:
        """Start it, and return when it is ready; harmless when it runs."""
        self.launch()
        self.wait()

    @property
    def pid(self) -> int:
        assert self._kept is not None
        return self._kept.pid

    @property
    def running(self) -> bool:
        return self._kept is not None and self._kept.running

    def kill(self) -> None:
        """Have it die at once: nobody listens at its port after that."""
        assert self._kept is not None
        self._kept.kill()

    def stop(self) -> None:
        """Have it hang: it accepts connections, and answers nothing."""
        self._hung = True
        self.send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on where it was stopped."""
        self.send(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to end in good order, and do not wait."""
        self.send(signal.SIGTERM)

    def leave(self) -> None:
        """Ask it to end in good order, and wait until it has: it answers while it unloads."""
        self.terminate()
        until(lambda: not self.running, what="the end of a Triton")

    def send(self, number: signal.Signals) -> None:
        assert self._kept is not None
        self._kept.send(number)

    def end(self) -> None:
        """End it, and wait until nothing of it is left."""
        if self._kept is not None:
            self._kept.end()

    def requests(self, model: str) -> int:
        """Return how many requests for a model it has answered."""
        with contextlib.closing(InferenceServerClient(f"{self.address}:{self.port}")) as client:
            (statistics,) = client.get_inference_statistics(model).model_stats
            answered: int = statistics.inference_stats.success.count
            return answered

    def restore(self) -> None:
        """Have it as it was at first, whatever a test has done to it."""
        if self._hung:  # it may end itself a bit later, though it went on
            self.end()
        self.start()


@contextlib.contextmanager
def tritons(
    repository: Path, folder: Path, number: int, *, arguments: Sequence[str] = ()
) -> Iterator[list[Triton]]:
    """Run several Tritons that serve the same repository."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in range(number)]
        running = [Triton(repository, folder, port, arguments=arguments) for port in ports]
        for triton in running:
            stack.callback(triton.end)
            triton.launch()
        for triton in running:
            triton.wait()
        yield running
