"""Layouts: from jagged arrays to the tensors of a model, and back."""

from __future__ import annotations

from sonic_coffea.layouts._assignments import assignments
from sonic_coffea.layouts._batch import (
    Inputs,
    Segment,
    bind_inputs,
    check_told_apart,
    declared,
)
from sonic_coffea.layouts._elements import Columns, Elements, bind_columns
from sonic_coffea.layouts._features import Feature, Metadata, OneHot, number_of
from sonic_coffea.layouts._file_positions import (
    FilePositions,
    file_of,
    file_positions,
    touch_position,
)
from sonic_coffea.layouts._frames import columns_of, giving_back, records_of
from sonic_coffea.layouts._jagged import Bucketed, Flat, Mask, Padded
from sonic_coffea.layouts._layout import Batch, Bound, Layout, dtype_name
from sonic_coffea.layouts._output import Output
from sonic_coffea.layouts._pairwise import Pairwise
from sonic_coffea.layouts._row import Dense, Row
from sonic_coffea.layouts._scalers import Scaled, named, read_json
from sonic_coffea.layouts._scores import ByRow, Outputs, assemble, trace
from sonic_coffea.layouts._source import Source, is_lazy, is_tracer, over_partitions
from sonic_coffea.layouts._structure import Int64, RowSelection, Structure
from sonic_coffea.layouts._tokens import Tokens

__all__ = [
    "Batch",
    "Bound",
    "Bucketed",
    "ByRow",
    "Columns",
    "Dense",
    "Elements",
    "Feature",
    "FilePositions",
    "Flat",
    "Inputs",
    "Int64",
    "Layout",
    "Mask",
    "Metadata",
    "OneHot",
    "Output",
    "Outputs",
    "Padded",
    "Pairwise",
    "Row",
    "RowSelection",
    "Scaled",
    "Segment",
    "Source",
    "Structure",
    "Tokens",
    "assemble",
    "assignments",
    "bind_columns",
    "bind_inputs",
    "check_told_apart",
    "columns_of",
    "declared",
    "dtype_name",
    "file_of",
    "file_positions",
    "giving_back",
    "is_lazy",
    "is_tracer",
    "named",
    "number_of",
    "over_partitions",
    "read_json",
    "records_of",
    "touch_position",
    "trace",
]
