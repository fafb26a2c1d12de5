"""Layouts: how jagged arrays become the tensors that a model wants, and back."""

from __future__ import annotations

from sonic_coffea.layouts._fields import Feature
from sonic_coffea.layouts._rows import Rows
from sonic_coffea.layouts._specs import Layout, Mask, Padded, Prepared, Row, prepare_inputs

__all__ = ["Feature", "Layout", "Mask", "Padded", "Prepared", "Row", "Rows", "prepare_inputs"]
