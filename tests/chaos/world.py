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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distributed import Client
from tests.network.proxies import Envoy
from tests.network.toxics import ToxicProxy
from tests.network.tritons import Triton, restore, tritons
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.server import Served

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
    """All of it, on loopback; `running` makes one.

    Parameters
    ----------
    folder : Path
        Where the file of URLs goes.
    four, envoy, proxy : sequence of Triton, Envoy, ToxicProxy
        What runs.

    Attributes
    ----------
    dask : distributed.Client
        A client of the cluster that scores.
    """

    dask: Client

    def __init__(
        self, folder: Path, four: Sequence[Triton], envoy: Envoy, proxy: ToxicProxy
    ) -> None:
        self.servers_file = folder / "servers.txt"
        self.tritons = dict(zip(TRITONS, four, strict=True))
        self.envoy, self.proxy = envoy, proxy
        self.urls = dict(zip(ROUTES, (envoy.url, four[2].url, proxy.url), strict=True))
        self.list_servers(ROUTES)

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path) -> Iterator[World]:
        """Run it all, with files in a folder."""
        with tritons(build(folder), folder, 4, arguments=ARGUMENTS) as four:
            restore(four)
            with Envoy.before(four[:2], folder) as envoy, ToxicProxy(four[3].url) as proxy:
                yield cls(folder, four, envoy, proxy)

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

    def workers(self) -> dict[str, int]:
        """Return the workers, and their processes."""
        pids: dict[str, int] = self.dask.run(os.getpid, on_error="ignore")
        return pids


def _outage(world: World, *names: str) -> None:
    for name in names:
        world.tritons[name].kill()


def _refuse(world: World, _: str) -> None:
    world.proxy.refuse()
    world.proxy.break_connections(reset=True)


def _found(world: World, _: str) -> None:
    world.proxy.find()
    world.proxy.break_connections(reset=True)


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
    """How a fault breaks the world and mends it, and which parts it may take."""

    breaks: Callable[..., None]
    mends: Callable[..., None]
    choices: list[tuple[str, ...]]


def _of_triton(breaks: Callable[[Triton], Any], mends: Callable[..., Any]) -> Kind:
    """Return a fault that any of the Tritons may have."""
    return Kind(
        lambda world, name: breaks(world.tritons[name]),
        lambda world, name: mends(world.tritons[name]),
        [(name,) for name in TRITONS],
    )


_PROXY, _FILE = [("proxy",)], [("file",)]
FAULTS = {
    "kill": _of_triton(Triton.kill, Triton.start),
    "stop": _of_triton(Triton.stop, Triton.go_on),
    "terminate": _of_triton(Triton.leave, Triton.start),
    "unload": _of_triton(
        lambda triton: triton.tell("Unload", MODEL), lambda triton: triton.tell("Load", MODEL)
    ),
    "outage": Kind(_outage, lambda w, *names: restore([w.tritons[n] for n in names]), [TRITONS]),
    "reset": Kind(lambda w, _: w.proxy.break_connections(reset=True), _nothing, _PROXY),
    "close": Kind(lambda w, _: w.proxy.break_connections(), _nothing, _PROXY),
    "lose": Kind(lambda w, _: w.proxy.lose(), _found, _PROXY),
    "refuse": Kind(_refuse, lambda w, _: w.proxy.accept(), _PROXY),
    "cut": Kind(_set(cut_after_bytes=300_000), _set(cut_after_bytes=None), _PROXY),
    "slow": Kind(_set(latency_s=0.05), _set(latency_s=0.0), _PROXY),
    "kill-envoy": Kind(lambda w, _: w.envoy.kill(), lambda w, _: w.envoy.start(), [("envoy",)]),
    "lead-to": Kind(
        lambda w, _, *names: w.lead_to(*names),
        lambda w, *_: w.lead_to(*TRITONS[:2]),
        [("endpoints",), ("endpoints", "behind-1"), ("endpoints", "behind-2")],
    ),
    "unlist": Kind(
        lambda w, _, gone: w.list_servers(ROUTES.keys() - {gone}),
        lambda w, *_: w.list_servers(ROUTES),
        [("file", route) for route in ROUTES],
    ),
    # Which changes nothing.
    "damage-list": Kind(
        lambda w, _: w.servers_file.write_text("no URL at all: //\n"),
        lambda w, _: w.list_servers(ROUTES),
        _FILE,
    ),
    "kill-worker": Kind(_kill_worker, _nothing, [("workers",)]),
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
    """Yield faults without end, each kind as often: the same ones for the same seed."""
    chance = random.Random(seed)
    while True:
        for name in chance.sample(list(FAULTS), len(FAULTS)):
            parts = chance.choice(FAULTS[name].choices)
            lasts_s = 0.1 if name == "outage" else min(chance.expovariate(1 / 1.5), 6.0)
            yield Fault(name, parts, lasts_s, chance.expovariate(1 / pause_s))


def is_possible(fault: Fault, busy: set[str]) -> bool:
    """Whether a fault's parts are whole, and a URL stays so; an outage takes all."""
    if fault.kind == "outage":
        return not busy
    after = busy | set(fault.parts)
    return busy.isdisjoint(fault.parts) and any(after.isdisjoint(p) for p in ROUTES.values())
