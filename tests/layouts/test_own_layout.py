"""A layout of one's own: a class here, and nothing elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.layouts import Batch, Bound, Elements, Feature, Layout, Source, bind_columns

JETS = ak.Array([[{"pt": [1.0, 2.0, 4.0]}, {"pt": []}], [], [{"pt": [8.0]}]])


@dataclass(frozen=True)
class Histogram(Layout):
    """How many elements of a row lie in each bin: ``[N, bins]``."""

    name: str
    edges: tuple[float, ...]
    dtype = np.dtype("float32")
    jagged = True

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,)

    def bind(self, source: Source, others: Any = None) -> Bound:
        return Bound(self, bind_columns(source, [Feature(self.name)], jagged=True))

    def row_shape(self, bucket: int) -> tuple[int, ...]:
        return (len(self.edges) - 1,)

    def write(self, out: Any, bound: Bound, batch: Batch) -> None:
        elements = Elements(bound.columns, batch.rows)
        (values,) = elements.values(self.dtype)
        for row, start, count in zip(out, elements.starts, elements.counts, strict=True):
            row[:] = np.histogram(values[start : start + count], self.edges)[0]


def test_layouts_of_ones_own_are_scored(sonic_server: Any) -> None:
    layout = Histogram("pt", (0, 3, 5, 9))
    inputs = {"counts": layout, "mask": sonic.Mask(4)}
    model = sonic.Model("m", inputs, {"y": ["low", "middle"]})
    server = sonic_server(model, functions={"m": lambda i: {"y": 2 * i["counts"][:, :2]}})
    scores = model(JETS)
    (request,) = server.requests
    assert request.inputs["mask"].sum(axis=(1, 2)).tolist() == [3, 0, 1]
    assert scores.low.tolist() == [[4, 0], [], [0]]
    assert scores.middle.tolist() == [[2, 0], [], [0]]
    assert model(JETS, deduplicate=True).tolist() == scores.tolist()
    with pytest.raises(sonic.errors.ConfigError, match="Histogram has no inverse"):
        layout.unpack(np.zeros((3, 3)), JETS)
    traced = model(ak.Array(JETS.layout.to_typetracer(forget_length=True)))
    assert str(traced.type.content) == "var * {low: float32, middle: float32}"
