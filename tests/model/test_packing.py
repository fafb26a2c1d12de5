"""The tensors of all inputs, without a server."""

from __future__ import annotations

from typing import Any

import awkward as ak
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer


def test_what_is_packed_is_what_is_sent() -> None:
    model = sonic.Model(
        "m",
        {"x": sonic.Bucketed("pf", (2, 4)), "mask": sonic.Mask(), "pt": sonic.Row("pt")},
        {"y": None},
    )
    jets = ak.Array(
        [
            [{"pf": [1.0, 2.0, 3.0], "pt": 6.0}, None],
            [],
            [{"pf": [4.0], "pt": 4.0}, {"pf": [1.0] * 9, "pt": 9.0}],
        ]
    )
    packed = model.pack(jets)
    assert packed["x"].tolist() == [[[1, 2, 3, 0]], [[4, 0, 0, 0]], [[1, 1, 1, 1]]]
    assert packed["mask"].tolist() == [[[1, 1, 1, 0]], [[1, 0, 0, 0]], [[1, 1, 1, 1]]]
    assert packed["pt"].tolist() == [[6], [4], [9]]
    sent = {}

    def keep(inputs: dict[str, Any]) -> dict[str, Any]:
        for row, pt in enumerate(inputs["pt"][:, 0].tolist()):
            sent[pt] = {name: tensor[row].tolist() for name, tensor in inputs.items()}
        return {"y": inputs["pt"]}

    with FakeServer({"m": FakeModel.of(model, keep)}) as server, sonic.connect(server.url):
        model(jets)
    rows = ak.drop_none(ak.flatten(jets), axis=0)
    for row in range(len(rows)):
        alone = model.pack(rows[row : row + 1])
        assert sent[rows.pt[row]] == {name: tensor[0].tolist() for name, tensor in alone.items()}


def test_offsets_are_packed_too() -> None:
    model = sonic.Model("m", {"x": sonic.Flat("pt", "splits", batch="row")}, {"y": None})
    packed = model.pack(ak.Array([{"pt": [1.0, 2.0]}, {"pt": []}, {"pt": [3.0]}]))
    assert packed["splits"].tolist() == [0, 2, 2, 3]
    assert packed["row"].tolist() == [0, 0, 2]


def test_no_rows_are_packed() -> None:
    model = sonic.Model("m", {"x": sonic.Bucketed("pf", (2, 4)), "mask": sonic.Mask()}, {"y": None})
    packed = model.pack(ak.Array([{"pf": [1.0]}])[:0])
    assert {name: tensor.shape for name, tensor in packed.items()} == {
        "x": (0, 1, 2),
        "mask": (0, 1, 2),
    }


def test_variations_are_packed_one_by_one() -> None:
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": None})
    jets = ak.Array([{"pt": 1.0}])
    with pytest.raises(errors.InputError, match="pack variations one by one"):
        model.pack(sonic.Variations(nominal=jets))
    with pytest.raises(errors.InputError, match="in memory"):
        model.pack(ak.Array(jets.layout.to_typetracer()))
