"""The names of offsets and row numbers: none replaces another tensor of the request."""

from __future__ import annotations

from typing import Any

import awkward as ak
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, InputError

EVENTS = ak.Array({"a": [[1.0], [2.0, 3.0]], "b": [[4.0, 5.0], [6.0]], "c": [[7.0], [8.0, 9.0]]})


@pytest.mark.parametrize("per", [None, "row", "event"])
@pytest.mark.parametrize(
    "inputs",
    [
        {"x": sonic.Flat("a", "x")},
        {"x": sonic.Flat("a", None, batch="x")},
        {"x": sonic.Flat("a", "y"), "y": sonic.Flat("b", "z")},
        {"y": sonic.Padded("b", 2), "x": sonic.Flat("a", batch="y")},
    ],
)
def test_names_of_offsets_are_no_other_input(inputs: dict[str, Any], per: str | None) -> None:
    with pytest.raises(ConfigError, match="name of its offsets or row numbers, is an input's"):
        sonic.Model("m", inputs, {"y": ["a"]}, one_request_per=per)


def test_offsets_and_row_numbers_have_two_names() -> None:
    with pytest.raises(ConfigError, match="two inputs, got 's' for both"):
        sonic.Flat("a", "s", batch="s")


@pytest.mark.parametrize("option", ["splits", "batch"])
def test_inputs_of_the_same_elements_may_share_their_offsets(option: str) -> None:
    names: dict[str, Any] = {"splits": None, option: "s"}
    inputs = {"x": sonic.Flat("a", **names), "z": sonic.Flat("c", **names)}
    packed = sonic.Model("m", inputs, {"y": ["a"]}).pack(EVENTS)
    assert packed["x"][:, 0].tolist() == [1.0, 2.0, 3.0]
    assert packed["z"][:, 0].tolist() == [7.0, 8.0, 9.0]
    assert packed["s"].tolist() == ([0, 1, 3] if option == "splits" else [0, 1, 1])


@pytest.mark.parametrize("option", ["splits", "batch"])
def test_inputs_of_other_elements_do_not_share_their_offsets(option: str) -> None:
    names: dict[str, Any] = {"splits": None, option: "s"}
    inputs = {"x": sonic.Flat("a", **names), "z": sonic.Flat("b", **names)}
    with pytest.raises(InputError, match=r"'s'.*a name of its own"):
        sonic.Model("m", inputs, {"y": ["a"]}).pack(EVENTS)
