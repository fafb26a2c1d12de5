"""Numbers computed after the network are declared and hashed, and are float32 everywhere."""

from __future__ import annotations

from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ContractError
from sonic_coffea.testing import FakeModel, FakeServer

LABELS = ["qcd", "top", "w", "mass"]
NUMBERS = np.asarray([[1, 3, 4, 9], [2, 2, 0, 8], [0, 0, 5, 7]], np.float32)
OBJECTS = ak.Array([[dict(zip(LABELS, row, strict=True)) for row in NUMBERS.tolist()], []])


def echo(output: sonic.Output) -> sonic.Model:
    return sonic.Model("m", {"x": sonic.Row(LABELS)}, {"y": output})


def same(inputs: Any) -> dict[str, Any]:
    return {"y": inputs["x"]}


@pytest.fixture
def server(sonic_server: Any) -> Any:
    """A server that answers with the numbers that are sent."""
    return sonic_server(echo(sonic.Output(LABELS)), functions={"m": same}, retry_timeout_s=0.1)


@pytest.mark.usefixtures("server")
def test_discriminants_read_labels_that_hold_dots() -> None:
    dots = sonic.Output(["a.b", *LABELS[1:]], discriminants={"d": "a.b + top"})
    assert echo(dots)(OBJECTS)[0].d.tolist() == [4, 4, 0]


def test_discriminants_of_small_integers_do_not_wrap_around() -> None:
    output = sonic.Output(["a", "b"], "uint8", discriminants={"d": "a - b", "s": "a + b"})
    scores = ak.Array(output.content(np.asarray([[1, 255]], np.uint8)))
    assert scores.tolist() == [{"a": 1, "b": 255, "d": -254.0, "s": 256.0}]


@pytest.mark.parametrize("length", [3, -1])
def test_labels_are_compared_where_they_are_declared(length: int) -> None:
    """They need not be the last axis, nor the elements a free one."""
    fake = FakeModel(
        inputs={"x": ("float32", (3,))},
        outputs={"y": ("float32", (2, length))},
        function=lambda i: {"y": np.stack([i["x"], -i["x"]], axis=1)},
    )

    def model(*labels: str) -> sonic.Model:
        output = sonic.Output(list(labels), per="constituent", axes=("labels", "x"))
        return sonic.Model("m", {"x": sonic.Padded("x", 3, axis_order="L")}, {"y": output})

    events = ak.Array([{"x": [1.0, 2.0]}, {"x": []}])
    with FakeServer({"m": fake}) as server, sonic.connect(server.url):
        scores = model("p", "q")(events)
        with pytest.raises(ContractError, match="declared with shape"):
            model("p", "q", "r")(events)
    assert scores.tolist() == [[{"p": 1.0, "q": -1.0}, {"p": 2.0, "q": -2.0}], []]


@pytest.mark.parametrize("members", [slice(2, None), slice(-2, None), slice(0, 2), [0, 3]])
def test_groups_of_lost_rows_are_none(server: FakeServer, members: Any) -> None:
    """Whether the server has told how many values there are, or nobody has."""
    grouped = echo(sonic.Output(groups={"some": members}))
    assert grouped(OBJECTS).some[0].tolist() == NUMBERS[:, members].sum(axis=1).tolist()
    server.fail(grpc.StatusCode.INVALID_ARGUMENT, "no", times=100)
    assert grouped(OBJECTS, on_error="mask").tolist() == [[None] * 3, []]
    server.stop()
    with sonic.connect(server.url, retry_timeout_s=0.2):  # another pool, which knows no model
        assert grouped(OBJECTS, on_error="mask").tolist() == [[None] * 3, []]
