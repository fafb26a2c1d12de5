"""Servers, and what lies between them and their clients: all that can break, and how.

Three URLs lead to four Tritons: an Envoy with two of them, one directly, and one through a TCP
proxy. A file names the URLs. A fault takes some of these parts, breaks them, and gives them back
when they are whole again. At any time at least one URL is whole, but for an outage of all servers,
which is short.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import tritonclient.grpc
from tests.network.proxies import Envoy
from tests.network.toxics import ToxicProxy
from tests.network.tritons import restore, tritons
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.server import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from distributed import Client

MODEL = "sums"
TRITONS = ("behind-1", "behind-2", "direct", "proxied")
# The URLs, and what must be whole for each to be.
ROUTES = {
    "envoy": frozenset({"envoy", "endpoints", "behind-1", "behind-2"}),
    "direct": frozenset({"direct"}),
    "proxy": frozenset({"proxy", "proxied"}),
}
ARGUMENTS = ("--model-control-mode=explicit", "--load-model=*", "--exit-timeout-secs=5")
_SOURCE = '''
import numpy as np


def sums(features):
    """Sums over constituents, which are the same in any batch."""
    one, two = features[:, 0], features[:, 1]
    return {"scores": np.stack([one.sum(axis=1), (one * two).sum(axis=1)], axis=1)}
'''


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
        with contextlib.ExitStack() as stack:
            repository = build(self._folder)
            four = stack.enter_context(tritons(repository, self._folder, 4, arguments=ARGUMENTS))
            restore(four)
            self.tritons = dict(zip(TRITONS, four, strict=True))
            self.envoy = stack.enter_context(Envoy.before(four[:2], self._folder))
            self.proxy = stack.enter_context(ToxicProxy(four[3].url))
            urls = (self.envoy.url, four[2].url, self.proxy.url)
            self.urls = dict(zip(ROUTES, urls, strict=True))
            self.list_servers(ROUTES)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def list_servers(self, routes: Iterable[str]) -> None:
        """Write the file of URLs, as a whole."""
        new = self.servers_file.with_suffix(".new")
        new.write_text("".join(f"{self.urls[route]}\n" for route in sorted(routes)))
        new.replace(self.servers_file)

    def lead_to(self, *names: str) -> None:
        """Have Envoy lead to some Tritons."""
        self.envoy.lead_to([self.tritons[name] for name in names])

    @contextlib.contextmanager
    def broken(self, fault: Fault) -> Iterator[None]:
        """Break parts; the end mends them, and waits until they are whole."""
        kind = FAULTS[fault.kind]
        kind.breaks(self, *fault.parts)
        yield
        kind.mends(self, *fault.parts)

    def client(self, name: str) -> contextlib.closing[Any]:
        """Return a bare client of a Triton."""
        target = self.tritons[name].url.removeprefix("grpc://")
        return contextlib.closing(tritonclient.grpc.InferenceServerClient(target))

    def workers(self) -> dict[str, int]:
        """Return the workers, and their processes, which are noted."""
        assert self.dask is not None
        pids: dict[str, int] = self.dask.run(os.getpid, on_error="ignore")
        self.worker_pids.update(pids.values())
        return pids

    def regions(self) -> list[str]:
        """Return the regions of clients that the Tritons know."""
        known: list[str] = []
        for place in self.tritons:
            with self.client(place) as client:
                names = client.get_system_shared_memory_status().regions
                known += [f"{place} knows {name}" for name in names]
        return known


def _restart(world: World, name: str) -> None:
    until(lambda: not world.tritons[name].running, 30.0, f"the end of {name}")
    world.tritons[name].start()


def _unload(world: World, name: str) -> None:
    with world.client(name) as client:
        client.unload_model(MODEL)


def _load(world: World, name: str) -> None:
    with world.client(name) as client:
        client.load_model(MODEL)


def _outage(world: World, *names: str) -> None:
    for name in names:
        world.tritons[name].kill()


def _refuse(world: World, _: str) -> None:
    world.proxy.refuse()
    world.proxy.reset()


def _found(world: World, _: str) -> None:
    world.proxy.find()
    world.proxy.reset()


def _set(**settings: Any) -> Callable[..., None]:
    def change(world: World, _: str) -> None:
        for name, value in settings.items():
            setattr(world.proxy, name, value)

    return change


def _kill_worker(world: World, _: str) -> None:
    before = world.workers()
    os.kill(before[min(before)], signal.SIGKILL)
    until(lambda: len(world.workers().keys() - {min(before)}) == len(before), 60.0, "a new worker")


def _nothing(*_: Any) -> None:
    pass


class Kind(NamedTuple):
    """How a fault breaks the world and mends it, which parts it may take, how often it is drawn."""

    breaks: Callable[..., None]
    mends: Callable[..., None]
    choices: list[tuple[str, ...]]
    weight: int = 1


_ONE_TRITON = [(name,) for name in TRITONS]
_PROXY, _FILE = [("proxy",)], [("file",)]
FAULTS = {
    "kill": Kind(
        lambda w, name: w.tritons[name].kill(),
        lambda w, name: w.tritons[name].start(),
        _ONE_TRITON,
        4,
    ),
    "stop": Kind(
        lambda w, name: w.tritons[name].stop(),
        lambda w, name: w.tritons[name].go_on(),
        _ONE_TRITON,
        4,
    ),
    "terminate": Kind(
        lambda w, name: w.tritons[name].send(signal.SIGTERM), _restart, _ONE_TRITON, 3
    ),
    "unload": Kind(_unload, _load, _ONE_TRITON, 3),
    "outage": Kind(_outage, lambda w, *names: restore([w.tritons[n] for n in names]), [TRITONS]),
    "reset": Kind(lambda w, _: w.proxy.reset(), _nothing, _PROXY),
    "close": Kind(lambda w, _: w.proxy.close_connections(), _nothing, _PROXY),
    "lose": Kind(lambda w, _: w.proxy.lose(), _found, _PROXY, 2),
    "refuse": Kind(_refuse, lambda w, _: w.proxy.accept(), _PROXY),
    "cut": Kind(_set(cut="reset", cut_after_bytes=300_000), _set(cut_after_bytes=None), _PROXY),
    "slow": Kind(_set(latency_s=0.05), _set(latency_s=0.0), _PROXY),
    "kill-envoy": Kind(lambda w, _: w.envoy.kill(), lambda w, _: w.envoy.start(), [("envoy",)], 2),
    "lead-to": Kind(
        lambda w, _, *names: w.lead_to(*names),
        lambda w, *_: w.lead_to(*TRITONS[:2]),
        [("endpoints",), ("endpoints", "behind-1"), ("endpoints", "behind-2")],
        3,
    ),
    "unlist": Kind(
        lambda w, _, gone: w.list_servers(ROUTES.keys() - {gone}),
        lambda w, *_: w.list_servers(ROUTES),
        [("file", route) for route in ROUTES],
        2,
    ),
    # Which changes nothing.
    "damage-list": Kind(
        lambda w, _: w.servers_file.write_text("no URL at all: //\n"),
        lambda w, _: w.list_servers(ROUTES),
        _FILE,
    ),
    "kill-worker": Kind(_kill_worker, _nothing, [("workers",)], 2),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What breaks, for how long, and the pause before the next one."""

    kind: str
    parts: tuple[str, ...]
    lasts_s: float
    pause_s: float

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(self.parts)} for {self.lasts_s:.2f} s"


def plan(seed: int, pause_s: float = 0.8) -> Iterator[Fault]:
    """Yield faults without end: the same ones for the same seed."""
    chance = random.Random(seed)
    while True:
        name = chance.choices(list(FAULTS), [kind.weight for kind in FAULTS.values()])[0]
        parts = chance.choice(FAULTS[name].choices)
        lasts_s = 0.1 if name == "outage" else min(chance.expovariate(1 / 1.5), 6.0)
        yield Fault(name, parts, lasts_s, chance.expovariate(1 / pause_s))


def is_possible(fault: Fault, busy: set[str]) -> bool:
    """Whether a fault's parts are whole, and a URL stays so; an outage takes all."""
    if fault.kind == "outage":
        return not busy
    after = busy | set(fault.parts)
    return busy.isdisjoint(fault.parts) and any(after.isdisjoint(p) for p in ROUTES.values())
