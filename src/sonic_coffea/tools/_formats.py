"""The best format for a link: more connections, compression, half precision, or no padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.transport import ConnectionOptions, Contract, connect_transport

if TYPE_CHECKING:
    from sonic_coffea.pool import Settings
    from sonic_coffea.tools._bench import Curve
    from sonic_coffea.transport import Connection

# The pool opens so many connections to a server that is far away.
_CONNECTIONS = 4
# A way is worth its costs if it multiplies the rate by this.
_GAIN = 1.15


@dataclass(frozen=True, slots=True)
class Format:
    """A way to send rows, and the rate that it reaches.

    Attributes
    ----------
    name : str
        The way.
    option : str
        The option of `connect`, or the layout, that selects it.
    row_bytes : float
        Bytes of a row's tensors to the server; of compressed ones, before that.
    rows_per_s : float
        The rate of the saturated server, or link.
    measured : bool
        If false, the rate follows from the bytes that the link carries, up to the server's rate.
    """

    name: str
    option: str
    row_bytes: float
    rows_per_s: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Formats:
    """The ways to send rows over a link.

    Attributes
    ----------
    ways : tuple of Format
        The first is the plain one.
    server_rows_per_s : float
        The rate of the server if almost no bytes travel: at least what was measured with compressed
        zeros, or the greatest rate of all. Where compression is slow, the server may do more.
    """

    ways: tuple[Format, ...]
    server_rows_per_s: float

    @property
    def link_limits(self) -> bool:
        """Whether more rows were scored when fewer bytes travelled; if not, no way is faster."""
        return self.server_rows_per_s > _GAIN * self.ways[0].rows_per_s

    @property
    def best(self) -> Format:
        """The fastest way; the plain one if no other is faster by 15 %."""
        plain = self.ways[0]
        fastest = max(self.ways, key=lambda way: way.rows_per_s)
        return fastest if fastest.rows_per_s > _GAIN * plain.rows_per_s else plain


def compare_formats(
    settings: Settings,
    curve: Curve,
    *,
    filled: float = 0.5,
    seconds: float = 1.0,
    progress: Callable[[str], None] | None = None,
) -> Formats:
    """Measure the rate that a link carries, and the rate that each way to send rows would reach.

    Parameters
    ----------
    settings : Settings
        One server, and its options.
    curve : Curve
        The latency curve of the server, from `measure`.
    filled : float
        The part of the tensors that is not padding: compression is measured with random numbers
        there, and zeros elsewhere.
    seconds : float
        Approximate duration of each measurement.
    progress : callable, optional
        Called with a short text at each stage.
    """
    tell = progress or (lambda _: None)
    options = dataclasses.replace(settings.connection_options(), compression=None)
    compressed = dataclasses.replace(options, compression="gzip")

    def rate(connections: int, tensors: dict[str, Any], with_options: ConnectionOptions) -> float:
        with ExitStack() as stack:
            links = [
                stack.enter_context(connect_transport(curve.server, options=with_options))
                for _ in range(connections)
            ]
            requests = max(2 * curve.in_flight, round(seconds * curve.rows_per_s / rows))
            threads = stack.enter_context(ThreadPoolExecutor(connections))

            def send(link: Connection) -> float:
                # TCP is slow at the beginning.
                for _ in range(2):
                    _, took_s = link.ask(
                        contract,
                        curve.version,
                        tensors,
                        requests=requests,
                        in_flight=curve.in_flight,
                    )
                return requests * rows / took_s

            return sum(threads.map(send, links))

    rows = curve.rows[-1]
    with connect_transport(curve.server, options=options) as connection:
        contract = connection.contract(curve.model, curve.version)
    zeros = contract.zeros(rows, curve.length)
    tell("compressed zeros: what the server does")
    alone = rate(1, zeros, compressed)
    tell(f"{_CONNECTIONS} connections")
    several = rate(_CONNECTIONS, zeros, options)
    far = several > _GAIN * curve.rows_per_s
    tell("compressed random numbers")
    gzip = rate(_CONNECTIONS if far else 1, _random(contract, zeros, filled), compressed)

    whole = sum(tensor.nbytes for tensor in zeros.values()) / rows
    floats = sum(t.nbytes for t in zeros.values() if t.dtype.kind == "f" and t.itemsize > 2) / rows
    server = max(alone, several, gzip, curve.rows_per_s)
    carried = max(several, curve.rows_per_s) * whole
    half, dense = whole - floats / 2, filled * whole
    channels = f"channels={_CONNECTIONS}"
    also = f"{channels}, " if far else ""
    half_rate, dense_rate = min(server, carried / half), min(server, carried / dense)
    ways = [
        ("as declared", "", whole, curve.rows_per_s, True),
        ("several connections", channels, whole, several, True),
        ("compression", f'{also}compression="gzip"', whole, gzip, True),
        ("half precision", f'{also}dtype="float16"', half, half_rate, False),
        ("no padding", f"{also}Bucketed or Flat", dense, dense_rate, False),
    ]
    return Formats(ways=tuple(Format(*way) for way in ways), server_rows_per_s=server)


def _random(contract: Contract, zeros: dict[str, Any], filled: float) -> dict[str, Any]:
    """Fill the beginning of each row of floating-point numbers; indices stay valid."""
    chance = np.random.default_rng(1)
    tensors = {}
    for spec in contract.inputs:
        tensor = zeros[spec.name].copy()
        if tensor.dtype.kind == "f" and tensor.ndim > 1:
            part = tensor[..., : max(1, round(filled * tensor.shape[-1]))]
            part[...] = chance.standard_normal(part.shape)
        tensors[spec.name] = tensor
    return tensors
