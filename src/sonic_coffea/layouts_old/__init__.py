"""Layouts: from jagged arrays to the tensors of a model, and back."""

from __future__ import annotations

from sonic_coffea.layouts_old._ahead import compile_ahead
from sonic_coffea.layouts_old._assembly import ByRow, Outputs, assemble
from sonic_coffea.layouts_old._binding import bind_columns
from sonic_coffea.layouts_old._dense import Dense
from sonic_coffea.layouts_old._fields import Feature, OneHot, Source
from sonic_coffea.layouts_old._flat import Flat
from sonic_coffea.layouts_old._inputs import Inputs, Segment, bind_inputs, check_told_apart, declared
from sonic_coffea.layouts_old._layout import Bound, Layout
from sonic_coffea.layouts_old._lazy import is_lazy, is_tracer, over_partitions, trace
from sonic_coffea.layouts_old._mask import Mask
from sonic_coffea.layouts_old._outputs import Output
from sonic_coffea.layouts_old._padded import Bucketed, Padded
from sonic_coffea.layouts_old._pairwise import Pairwise
from sonic_coffea.layouts_old._row import Row
from sonic_coffea.layouts_old._rows import Int64, Rows, RowSelection
from sonic_coffea.layouts_old._texts import dtype_name
from sonic_coffea.layouts_old._tokens import Tokens

__all__ = [
    "Bound",
    "Bucketed",
    "ByRow",
    "Dense",
    "Feature",
    "Flat",
    "Inputs",
    "Int64",
    "Layout",
    "Mask",
    "OneHot",
    "Output",
    "Outputs",
    "Padded",
    "Pairwise",
    "Row",
    "RowSelection",
    "Rows",
    "Segment",
    "Source",
    "Tokens",
    "assemble",
    "bind_columns",
    "bind_inputs",
    "check_told_apart",
    "compile_ahead",
    "declared",
    "dtype_name",
    "is_lazy",
    "is_tracer",
    "over_partitions",
    "trace",
]
