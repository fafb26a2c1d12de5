"""A name server on loopback, of one name whose addresses change."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from typing import TYPE_CHECKING, Any

from tests.network.loops import LoopThread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

_A, _IN = 1, 1
_ANSWER, _NO_SUCH_NAME = 0x8180, 0x8183
_HEADER_BYTES = 12


class NameServer:
    """Answers who asks for a name over UDP, with a time to live of 0.

    Attributes
    ----------
    name : str
        What it knows.
    addresses : sequence of str
        Its IPv4 addresses, as of now.
    port : int
        Where it listens, on loopback.
    asked : int
        How many questions it has answered.
    """

    def __init__(self, name: str, addresses: Sequence[str]) -> None:
        self.name = name
        self.addresses = tuple(addresses)
        self.port = 0
        self.asked = 0
        self._thread = LoopThread("name-server")
        self._transport: Any = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._thread.call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.call(self._close())
        self._thread.stop()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: _Protocol(self), local_addr=("127.0.0.1", 0)
        )
        self.port = self._transport.get_extra_info("sockname")[1]

    async def _close(self) -> None:
        self._transport.close()

    def answer(self, query: bytes) -> bytes:
        """Return the response to a query of one question."""
        end = query.index(0, _HEADER_BYTES) + 1
        labels, at = [], _HEADER_BYTES
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        kind, _ = struct.unpack_from("!HH", query, end)
        known = ".".join(labels).lower() == self.name
        addresses = self.addresses if known and kind == _A else ()
        head = query[:2] + struct.pack(
            "!HHHHH", _ANSWER if known else _NO_SUCH_NAME, 1, len(addresses), 0, 0
        )
        # Each record names the question's name by its place.
        record = struct.pack("!HHHIH", 0xC000 | _HEADER_BYTES, _A, _IN, 0, 4)
        records = (record + ipaddress.IPv4Address(address).packed for address in addresses)
        self.asked += 1
        return head + query[_HEADER_BYTES : end + 4] + b"".join(records)


class _Protocol(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._transport.sendto(self._server.answer(data), addr)


def resolved_by(server: NameServer, *, refresh_s: float = 0.2) -> dict[str, Any]:
    """Return settings of Envoy's cluster that ask a name server, again and again."""
    cares = "envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig"
    address = {"address": "127.0.0.1", "port_value": server.port, "protocol": "UDP"}
    return {
        "type": "STRICT_DNS",
        "dns_lookup_family": "V4_ONLY",
        "dns_refresh_rate": f"{refresh_s:g}s",
        "typed_dns_resolver_config": {
            "name": "envoy.network.dns_resolver.cares",
            "typed_config": {
                "@type": f"type.googleapis.com/{cares}",
                "resolvers": [{"socket_address": address}],
                "dns_resolver_options": {"no_default_search_domain": True},
            },
        },
    }
