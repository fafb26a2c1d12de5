"""A latency curve to plan with, as if a served model had been measured."""

from __future__ import annotations

from sonic_coffea.tools import Curve

CURVE = Curve(
    model="m",
    version="1",
    server="grpc://s:1",
    rows=(1, 64, 512),
    seconds=(0.0021, 0.0085, 0.0533),
    rows_per_s=10_000.0,
    in_flight=2,
    row_bytes=1000.0,
)
