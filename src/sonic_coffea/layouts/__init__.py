"""Layouts: from jagged arrays to the tensors of a model, and back."""

from __future__ import annotations

from sonic_coffea.layouts._assignments import assignments
from sonic_coffea.layouts._batch import (
    Inputs,
    Segment,
    bind_inputs,
    check_separable,
    declared,
    resolved,
)
from sonic_coffea.layouts._elements import BLOCK_BYTES, Elements, bind_columns
from sonic_coffea.layouts._features import Feature, Metadata, OneHot, Scaled, features_by_name
from sonic_coffea.layouts._fields import Bucketed, Dense, Flat, Mask, Padded, Row
from sonic_coffea.layouts._file_positions import (
    EVENT_ID,
    FilePositions,
    file_of,
    file_positions,
    find_rows,
    touch_position,
)
from sonic_coffea.layouts._layout import Batch, Bound, Layout
from sonic_coffea.layouts._options import checked, dtype_name, held
from sonic_coffea.layouts._outputs import ByRow, Output, Outputs
from sonic_coffea.layouts._padding import content_of, load_loop
from sonic_coffea.layouts._pairwise import Pairwise
from sonic_coffea.layouts._source import (
    Source,
    array_of,
    check_index,
    columns_of,
    giving_back,
    has_no_data,
    is_lazy,
    is_tracer,
    lazy_file,
    metadata_of,
    only_columns,
    over_partitions,
    records_of,
)
from sonic_coffea.layouts._structure import Int64, RowSelection, Structure, ranges
from sonic_coffea.layouts._tokens import Tokens

# What layouts of a user's own are made of.
__all__ = ["Batch", "Bound", "Elements", "Feature", "Layout", "bind_columns"]
