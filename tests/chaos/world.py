"""Servers, and what lies between them and their clients: all that can break, and how.

Three URLs lead to four Tritons: an Envoy with two of them behind a name, one directly, and one
through a TCP proxy. A file names the URLs. A fault takes some of these parts, breaks them, and
gives them back when they are whole again. At any time at least one URL is whole, but for an outage
of all servers, which is short.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tritonclient.grpc
from tests.network.envoy import Envoy
from tests.network.names import NameServer, resolved_by
from tests.network.toxics import ToxicProxy
from tests.network.tritons import Triton
from tests.ports import held_port
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.server import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from distributed import Client

MODEL = "sums"
NAME = "tritons.test"
TRITONS = ("behind-1", "behind-2", "direct", "proxied")
# The URLs, and what must be whole for each to be.
ROUTES = {
    "envoy": frozenset({"envoy", "names", "behind-1", "behind-2"}),
    "direct": frozenset({"direct"}),
    "proxy": frozenset({"proxy", "proxied"}),
}
_SOURCE = '''
import numpy as np


def sums(features):
    """Sums over constituents, which are the same in any batch."""
    one, two = features[:, 0], features[:, 1]
    return {"scores": np.stack([one.sum(axis=1), (one * two).sum(axis=1)], axis=1)}
'''


@dataclass(frozen=True, slots=True)
class Fault:
    """What breaks, for how long, and the pause before the next one."""

    kind: str
    parts: tuple[str, ...]
    lasts_s: float
    pause_s: float

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(self.parts)} for {self.lasts_s:.2f} s"


def build(folder: Path) -> Path:
    """Build a repository with the model, and return where it is."""
    source, repository = folder / "sums.py", folder / "repository"
    source.write_text(_SOURCE)
    served = Served(
        f"{source}:sums",
        inputs={"features": ("float32", ["rows", 2, 64])},
        outputs={"scores": ("float32", ["rows", 2])},
    )
    sonic.build_repository(repository, {MODEL: served}, max_batch_size=2048)
    return repository


def plan(seed: int, pause_s: float = 0.8) -> Iterator[Fault]:
    """Yield faults without end: the same ones for the same seed."""
    chance = random.Random(seed)
    while True:
        kind = chance.choices(list(FAULTS), [weight for _, _, weight in FAULTS.values()])[0]
        _, choices, _ = FAULTS[kind]
        parts = chance.choice(choices)
        lasts_s = 0.1 if kind == "outage" else min(chance.expovariate(1 / 1.5), 6.0)
        yield Fault(kind, parts, lasts_s, chance.expovariate(1 / pause_s))


def is_possible(fault: Fault, busy: set[str]) -> bool:
    """Whether a fault's parts are whole, and a URL stays so; an outage takes all."""
    if fault.kind == "outage":
        return not busy
    after = busy | set(fault.parts)
    return busy.isdisjoint(fault.parts) and any(after.isdisjoint(p) for p in ROUTES.values())


class World:
    """All of it, on loopback.

    Parameters
    ----------
    folder : Path
        Where repository, logs and the file of URLs go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.servers_file = folder / "servers.txt"
        self.dask: Client | None = None
        self.worker_pids: set[int] = set()

    def __enter__(self) -> World:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        repository = build(self._folder)
        arguments = ["--model-control-mode=explicit", "--load-model=*", "--exit-timeout-secs=5"]
        # What has one name has one port.
        named, *ports, envoy, admin = (self._stack.enter_context(held_port()) for _ in range(5))
        places = [("127.0.0.2", named), ("127.0.0.3", named), *(("127.0.0.1", p) for p in ports)]
        self.tritons = {}
        for name, (address, port) in zip(TRITONS, places, strict=True):
            triton = Triton(
                repository,
                self._folder,
                port,
                address=address,
                arguments=arguments,
                ends_if_stalled=True,
            )
            self._stack.callback(triton.end)
            triton.launch()
            self.tritons[name] = triton
        for triton in self.tritons.values():
            triton.wait()
        self.names = self._stack.enter_context(NameServer(NAME, ("127.0.0.2", "127.0.0.3")))
        place = {"socket_address": {"address": NAME, "port_value": named}}
        endpoints = [{"lb_endpoints": [{"endpoint": {"address": place}}]}]
        cluster = {
            "load_assignment": {"cluster_name": "tritons", "endpoints": endpoints},
            **resolved_by(self.names),
        }
        self.envoy = Envoy([], self._folder, envoy, admin, cluster=cluster)
        self._stack.callback(self.envoy.end)
        self.envoy.start()
        self.proxy = self._stack.enter_context(ToxicProxy(self.tritons["proxied"].url))
        self.urls = {
            "envoy": self.envoy.url,
            "direct": self.tritons["direct"].url,
            "proxy": self.proxy.url,
        }
        self.list_servers(ROUTES)

    def list_servers(self, routes: Iterable[str]) -> None:
        """Write the file of URLs, as a whole."""
        new = self.servers_file.with_suffix(".new")
        new.write_text("".join(f"{self.urls[route]}\n" for route in sorted(routes)))
        new.replace(self.servers_file)

    def break_it(self, fault: Fault) -> AbstractContextManager[None]:
        """Return what breaks parts; its end mends them, and waits until they are whole."""
        breaks, _, _ = FAULTS[fault.kind]
        return breaks(self, *fault.parts)

    def workers(self) -> dict[str, int]:
        """Return the workers, and their processes, which are noted."""
        assert self.dask is not None
        pids: dict[str, int] = self.dask.run(os.getpid, on_error="ignore")
        self.worker_pids.update(pids.values())
        return pids

    def regions(self) -> list[str]:
        """Return the regions of clients that the Tritons know."""
        known: list[str] = []
        for place, triton in self.tritons.items():
            with _client(triton) as client:
                names = client.get_system_shared_memory_status().regions
                known += [f"{place} knows {name}" for name in names]
        return known


@contextlib.contextmanager
def _client(triton: Triton) -> Iterator[Any]:
    client = tritonclient.grpc.InferenceServerClient(triton.url.removeprefix("grpc://"))
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def _killed(world: World, name: str) -> Iterator[None]:
    world.tritons[name].kill()
    yield
    world.tritons[name].start()


@contextlib.contextmanager
def _hung(world: World, name: str) -> Iterator[None]:
    world.tritons[name].stop()
    yield
    world.tritons[name].go_on()


@contextlib.contextmanager
def _terminated(world: World, name: str) -> Iterator[None]:
    triton = world.tritons[name]
    triton.terminate()
    yield
    until(lambda: not triton.running, 30.0, f"the end of {name}")
    triton.start()


@contextlib.contextmanager
def _unloaded(world: World, name: str) -> Iterator[None]:
    with _client(world.tritons[name]) as client:
        client.unload_model(MODEL)
        yield
        client.load_model(MODEL)


@contextlib.contextmanager
def _outage(world: World, *names: str) -> Iterator[None]:
    for name in names:
        world.tritons[name].kill()
    yield
    for name in names:
        world.tritons[name].launch()
    for name in names:
        world.tritons[name].wait()


@contextlib.contextmanager
def _reset(world: World, _: str) -> Iterator[None]:
    world.proxy.reset()
    yield


@contextlib.contextmanager
def _closed(world: World, _: str) -> Iterator[None]:
    world.proxy.close_connections()
    yield


@contextlib.contextmanager
def _lost(world: World, _: str) -> Iterator[None]:
    world.proxy.lose()
    yield
    world.proxy.find()
    world.proxy.reset()


@contextlib.contextmanager
def _refused(world: World, _: str) -> Iterator[None]:
    world.proxy.refuse()
    world.proxy.reset()
    yield
    world.proxy.accept()


@contextlib.contextmanager
def _cut(world: World, _: str) -> Iterator[None]:
    world.proxy.cut, world.proxy.cut_after_bytes = "reset", 300_000
    yield
    world.proxy.cut_after_bytes = None


@contextlib.contextmanager
def _slow(world: World, _: str) -> Iterator[None]:
    world.proxy.latency_s = 0.05
    yield
    world.proxy.latency_s = 0.0


@contextlib.contextmanager
def _envoy_killed(world: World, _: str) -> Iterator[None]:
    world.envoy.kill()
    yield
    world.envoy.start()


@contextlib.contextmanager
def _renamed(world: World, _: str) -> Iterator[None]:
    """The name leads to one server only, then to the other, then to both."""
    both = world.names.addresses
    world.names.addresses = both[:1]
    yield
    world.names.addresses = both[1:]
    asked = world.names.asked
    until(lambda: world.names.asked > asked, 30.0, "Envoy's question")
    world.names.addresses = both


@contextlib.contextmanager
def _unnamed(world: World, _: str) -> Iterator[None]:
    both, world.names.addresses = world.names.addresses, ()
    yield
    world.names.addresses = both


@contextlib.contextmanager
def _unlisted(world: World, _: str, *gone: str) -> Iterator[None]:
    world.list_servers(ROUTES.keys() - set(gone))
    yield
    world.list_servers(ROUTES)


@contextlib.contextmanager
def _damaged_list(world: World, _: str) -> Iterator[None]:
    """The file cannot be used for a while, which changes nothing."""
    world.servers_file.write_text("no URL at all: //\n")
    yield
    world.list_servers(ROUTES)


@contextlib.contextmanager
def _worker_killed(world: World, _: str) -> Iterator[None]:
    assert world.dask is not None
    before = world.workers()
    os.kill(before[min(before)], signal.SIGKILL)
    yield
    until(lambda: len(world.workers().keys() - {min(before)}) == len(before), 60.0, "a new worker")


def _each(*parts: str) -> list[tuple[str, ...]]:
    return [(part,) for part in parts]


_ONE_TRITON = _each(*TRITONS)
# How each kind breaks the world, which parts it may take, and how often it is drawn.
FAULTS: dict[
    str,
    tuple[Callable[..., AbstractContextManager[None]], list[tuple[str, ...]], int],
] = {
    "kill": (_killed, _ONE_TRITON, 4),
    "stop": (_hung, _ONE_TRITON, 4),
    "terminate": (_terminated, _ONE_TRITON, 3),
    "unload": (_unloaded, _ONE_TRITON, 3),
    "outage": (_outage, [TRITONS], 1),
    "reset": (_reset, _each("proxy"), 1),
    "close": (_closed, _each("proxy"), 1),
    "lose": (_lost, _each("proxy"), 2),
    "refuse": (_refused, _each("proxy"), 1),
    "cut": (_cut, _each("proxy"), 1),
    "slow": (_slow, _each("proxy"), 1),
    "kill-envoy": (_envoy_killed, _each("envoy"), 2),
    "rename": (_renamed, _each("names"), 2),
    "unname": (_unnamed, _each("names"), 1),
    "unlist": (_unlisted, [("file", route) for route in ROUTES], 2),
    "damage-list": (_damaged_list, _each("file"), 1),
    "kill-worker": (_worker_killed, _each("workers"), 2),
}
