"""Layouts: from jagged arrays to the tensors of a model, and back."""

from __future__ import annotations

from sonic_coffea.layouts._assignments import assignments
from sonic_coffea.layouts._batch import Inputs, Segment, bind_inputs, check_told_apart, declared
from sonic_coffea.layouts._elements import Elements, bind_columns
from sonic_coffea.layouts._features import (
    Feature,
    Metadata,
    OneHot,
    Scaled,
    named,
)
from sonic_coffea.layouts._fields import Bucketed, Dense, Flat, Mask, Padded, Row
from sonic_coffea.layouts._file_positions import (
    FilePositions,
    file_of,
    file_positions,
    found,
    touch_position,
)
from sonic_coffea.layouts._layout import Batch, Bound, Layout
from sonic_coffea.layouts._options import checked, dtype_name, held
from sonic_coffea.layouts._outputs import ByRow, Output, Outputs, trace
from sonic_coffea.layouts._padding import content_of
from sonic_coffea.layouts._pairwise import Pairwise
from sonic_coffea.layouts._source import (
    Source,
    check_index,
    columns_of,
    giving_back,
    is_lazy,
    is_tracer,
    lazy_file,
    over_partitions,
    records_of,
)
from sonic_coffea.layouts._structure import Int64, Structure
from sonic_coffea.layouts._tokens import Tokens

__all__ = [
    "Batch",
    "Bound",
    "Bucketed",
    "ByRow",
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
    "Scaled",
    "Segment",
    "Source",
    "Structure",
    "Tokens",
    "assignments",
    "bind_columns",
    "bind_inputs",
    "check_index",
    "check_told_apart",
    "checked",
    "columns_of",
    "content_of",
    "declared",
    "dtype_name",
    "file_of",
    "file_positions",
    "found",
    "giving_back",
    "held",
    "is_lazy",
    "is_tracer",
    "lazy_file",
    "named",
    "over_partitions",
    "records_of",
    "touch_position",
    "trace",
]
