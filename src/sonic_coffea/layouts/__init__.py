"""Layouts: how jagged arrays become the tensors that a model wants, and back."""

from __future__ import annotations

from sonic_coffea.layouts._fields import Feature
from sonic_coffea.layouts._inputs import Inputs, bind_inputs, declared
from sonic_coffea.layouts._lazy import is_lazy, over_partitions
from sonic_coffea.layouts._outputs import Assembly, ByRow, Output
from sonic_coffea.layouts._rows import Rows
from sonic_coffea.layouts._segments import Segment
from sonic_coffea.layouts._specs import Bucketed, Dense, Flat, Layout, Mask, Padded, Row
from sonic_coffea.layouts._tracing import is_tracer, trace

__all__ = [
    "Assembly",
    "Bucketed",
    "ByRow",
    "Dense",
    "Feature",
    "Flat",
    "Inputs",
    "Layout",
    "Mask",
    "Output",
    "Padded",
    "Row",
    "Rows",
    "Segment",
    "bind_inputs",
    "declared",
    "is_lazy",
    "is_tracer",
    "over_partitions",
    "trace",
]
