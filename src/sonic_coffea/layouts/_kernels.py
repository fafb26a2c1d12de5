"""The compiled kernels, to be called; `_loops` and `_pair_loops` have what is compiled."""

from __future__ import annotations

from sonic_coffea.layouts._machine_code import Kernel, address, load

__all__ = ["address", "load", "mask", "padded", "pairs", "positions", "rows", "sort", "unpad"]

padded = Kernel("_loops", "padded")
rows = Kernel("_loops", "rows")
mask = Kernel("_loops", "mask")
positions = Kernel("_loops", "positions")
sort = Kernel("_loops", "sort")
unpad = Kernel("_loops", "unpad")
pairs = Kernel("_pair_loops", "pairs")
