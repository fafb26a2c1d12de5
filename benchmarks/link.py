"""A link between two network namespaces, with a delay, a bandwidth and losses, without root.

Real TCP goes over it: packets are read from one network device and written to the other, after as
long as a link would need. What waits for the link is bounded, as in a router, and lost beyond that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NEAR, FAR = "10.99.0.1", "10.99.0.2"
_IFF_TUN, _IFF_NO_PI, _TUNSETIFF = 0x0001, 0x1000, 0x400454CA
_TUN = Path("/dev/net/tun")
_UNSHARE = ("unshare", "--net", "--")
_UNSHARE_USER = ("unshare", "--user", "--map-root-user", "--net", "--")
_INSIDE = "SONIC_BENCHMARK_NAMESPACE"
# What a router keeps back: as much as is on its way at full rate, and not less than this.
_MIN_QUEUE_S = 0.02
_MAX_PACKETS = 64


@dataclass(frozen=True)
class Link:
    """What a link is like.

    Attributes
    ----------
    round_trip_s : float
        Of a packet that waits for no other.
    bits_per_s : float
        Each way, headers of IP included.
    loss : float
        The part of the packets that is lost by chance.
    packet_bytes : int
        The most in a packet (MTU).
    """

    round_trip_s: float
    bits_per_s: float
    loss: float = 0.0
    packet_bytes: int = 1500

    def __str__(self) -> str:
        lost = f", {self.loss:.0%} lost" if self.loss else ""
        return f"{self.round_trip_s * 1e3:.0f} ms, {self.bits_per_s / 1e6:,.0f} Mbit/s{lost}"


def available() -> bool:
    """Whether this machine lets users make namespaces and network devices."""
    tools = all(shutil.which(tool) for tool in ("unshare", "ip")) and _TUN.exists()
    return tools and subprocess.run([*_UNSHARE_USER, "true"], check=False).returncode == 0


def in_namespace() -> None:
    """Run this program again where it may make network devices, unless it is there.

    Raises
    ------
    SystemExit
        With its exit status, or if this machine has no namespaces for users.
    """
    if _INSIDE in os.environ:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    if not available():
        sys.exit(f"this needs the commands unshare and ip, {_TUN}, and namespaces for users")
    inside = [*_UNSHARE_USER, sys.executable, *sys.argv]
    sys.exit(subprocess.run(inside, env={**os.environ, _INSIDE: "1"}, check=False).returncode)


@contextlib.contextmanager
def far_away(link: Link, command: Sequence[object]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a namespace of its own, whose address is `FAR`, at the end of a link."""
    near = _device("near", NEAR, link)
    arguments = [json.dumps(asdict(link)), str(near), *map(str, command)]
    process = subprocess.Popen(
        [*_UNSHARE, sys.executable, __file__, *arguments], pass_fds=[near], start_new_session=True
    )
    os.close(near)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _device(name: str, address: str, link: Link) -> int:
    """Make a device whose packets are read from, and written to, a descriptor."""
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
    )
    for command in (
        f"link set {name} mtu {link.packet_bytes} txqueuelen 10000 up",
        f"address add {address}/24 dev {name}",
        "link set lo up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return descriptor


class _Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, link: Link, come: int, go: int, seed: int) -> None:
        self.come, self.go = come, go
        self._link = link
        self._random = random.Random(seed)
        self._free_at = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def take(self, now: float) -> None:
        """Take what has come, and say when it will arrive."""
        link = self._link
        longest_s = max(link.round_trip_s, _MIN_QUEUE_S)
        for _ in range(_MAX_PACKETS):
            try:
                packet = os.read(self.come, 65_536)
            except BlockingIOError:
                return
            begin = max(now, self._free_at)
            if begin - now > longest_s or self._random.random() < link.loss:
                continue
            self._free_at = begin + 8 * len(packet) / link.bits_per_s
            self._under_way.append((self._free_at + link.round_trip_s / 2, packet))

    def deliver(self, now: float) -> float:
        """Hand over what has arrived; return when the next one does."""
        waiting = self._under_way
        while waiting and waiting[0][0] <= now:
            with contextlib.suppress(BlockingIOError):
                os.write(self.go, waiting.popleft()[1])
        return waiting[0][0] if waiting else now + 1.0


def _carry(link: Link, near: int, far: int, until: subprocess.Popen[bytes]) -> None:
    directions = [_Direction(link, near, far, 1), _Direction(link, far, near, 2)]
    while until.poll() is None:
        beside = time.monotonic() + 1.0
        while (now := time.monotonic()) < beside:
            following = min(direction.deliver(now) for direction in directions)
            readable, _, _ = select.select([near, far], [], [], max(following - now, 0.0))
            now = time.monotonic()
            for direction in directions:
                if direction.come in readable:
                    direction.take(now)


def _main() -> None:
    described, near, *command = sys.argv[1:]
    link = Link(**json.loads(described))
    far = _device("far", FAR, link)
    with subprocess.Popen(command) as process:
        try:
            _carry(link, int(near), far, process)
        finally:
            process.terminate()


if __name__ == "__main__":
    _main()
