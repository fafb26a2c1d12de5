"""Models that take and give strings, and numbers that are computed after the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.onnx_files import save_onnx

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.errors import ContractError
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport import from_wire

MODEL = sonic.Model(
    "words",
    {"x": sonic.Padded("ids", 2, axis_order="L", dtype="string"), "mask": sonic.Mask()},
    {"joined": sonic.Output(dtype="string")},
)


def words(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {"joined": np.asarray([[b"+".join(row)] for row in inputs["x"].tolist()], object)}


def without_bytes(answer: Any) -> None:
    """Put the strings into the message one by one, as some servers do."""
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        strings = from_wire(raw, np.dtype(object), (-1,))
        output.contents.bytes_contents.extend(strings.tolist())
    del answer.raw_output_contents[:]


@pytest.fixture
def server(sonic_server: Any) -> Any:
    return sonic_server(MODEL, functions={"words": words})


@pytest.mark.parametrize("times", [0, 100])
def test_equal_strings_are_sent_once(server: FakeServer, times: int) -> None:
    server.answer_wrongly(without_bytes, times=times)
    jets = ak.Array([[{"ids": ["a", "b"]}, {"ids": ["ab", ""]}, {"ids": ["a", "b", "c"]}]])
    pending = MODEL.submit(jets, deduplicate=True)
    assert pending.result().tolist() == [["a+b", "ab+", "a+b"]]
    # Truncated, the third is the first.
    assert pending.statistics.total().rows == 2


def test_equal_strings_without_an_axis_are_sent_once(sonic_server: Any) -> None:
    model = sonic.Model("m", {"x": sonic.Row("id", dtype="string", axis_order="")}, {"y": None})
    server = sonic_server(model)
    jets = ak.Array({"id": ["a", "", "a"]})
    assert model(jets, deduplicate=True).tolist() == model(jets).tolist()
    assert [request.rows for request in server.requests] == [2, 3]


def test_numbers_for_strings_fail_before_a_row_leaves(server: FakeServer) -> None:
    numbers = sonic.Model("words", {"x": sonic.Row(["a", "b"])}, {"joined": None})
    with pytest.raises(errors.ContractError) as caught:
        numbers(ak.Array([{"a": 1.0, "b": 2.0}]))
    assert not server.statistics
    message = str(caught.value)
    assert "input 'x' is FP32 [N, 2], the model takes BYTES [N, 2]" in message
    assert "declared float32, the model gives string (BYTES)" in message
    assert '"x": sonic.Row(["a", "b"], dtype="string")' in message
    assert '"joined": sonic.Output(dtype="string")' in message


CODES = sonic.Model(
    "codes",
    {"words": sonic.Row(["a", "b"], dtype="string")},
    {
        "code": sonic.Output(["a", "b"], dtype="int64"),
        "echo": sonic.Output(["a", "b"], dtype="string"),
    },
)


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model repository with a network that takes, and gives, strings."""
    path = save_onnx(
        tmp_path_factory.mktemp("onnx") / "codes.onnx",
        """(string[N, 2] words) => (int64[N, 2] code, string[N, 2] echo) {
            code = ai.onnx.ml.LabelEncoder
                <keys_strings = ["e", "µ"], values_int64s = [11, 13], default_int64 = 0>(words)
            echo = Identity(words)
        }""",
    )
    sonic.build_repository(path.parent / "repository", {"codes": path}, max_batch_size=50_000)
    return path.parent / "repository"


def check_codes(pool: sonic.Pool, number: int) -> None:
    some = np.asarray(["e", "µ", "", "a longer word"])
    columns = np.random.default_rng(1).integers(0, 4, (2, number))
    rows = ak.zip({name: ak.Array(some[n]) for name, n in zip("ab", columns, strict=True)})
    scores = CODES(rows, pool=pool)
    assert scores.echo.tolist() == rows.tolist()
    np.testing.assert_array_equal(scores.code.a, np.asarray([11, 13, 0, 0])[columns[0]])
    assert CODES.check(pool).inputs[0].datatype == "BYTES"


def test_models_of_this_process_take_and_give_strings(codes: Path) -> None:
    with sonic.connect(codes) as pool:
        check_codes(pool, 100)


def test_real_servers_take_and_give_strings(codes: Path, installation: Any) -> None:
    """In requests that are large enough for shared memory."""
    with sonic.LocalServer(codes, stop_timeout_s=0.0) as server:
        for shared_memory in (True, False):
            with sonic.connect(server, shared_memory=shared_memory) as pool:
                check_codes(pool, 25_000)


LABELS = ["qcd", "top", "w", "mass"]
NUMBERS = np.asarray([[1, 3, 4, 9], [2, 2, 0, 8], [0, 0, 5, 7]], np.float32)
OBJECTS = ak.Array([[dict(zip(LABELS, row, strict=True)) for row in NUMBERS.tolist()], []])


def echo(output: sonic.Output) -> sonic.Model:
    return sonic.Model("m", {"x": sonic.Row(LABELS)}, {"y": output})


def same(inputs: Any) -> dict[str, Any]:
    return {"y": inputs["x"]}


@pytest.fixture
def echoes(sonic_server: Any) -> Any:
    """A server that answers with the numbers that are sent."""
    return sonic_server(echo(sonic.Output(LABELS)), functions={"m": same}, retry_timeout_s=0.1)


@pytest.mark.usefixtures("echoes")
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
    with FakeServer({"m": fake}) as running, sonic.connect(running.url):
        scores = model("p", "q")(events)
        with pytest.raises(ContractError, match="declared with shape"):
            model("p", "q", "r")(events)
    assert scores.tolist() == [[{"p": 1.0, "q": -1.0}, {"p": 2.0, "q": -2.0}], []]


@pytest.mark.parametrize("members", [slice(2, None), slice(-2, None), slice(0, 2), [0, 3]])
def test_groups_of_lost_rows_are_none(echoes: FakeServer, members: Any) -> None:
    """Whether the server has told how many values there are, or nobody has."""
    grouped = echo(sonic.Output(groups={"some": members}))
    assert grouped(OBJECTS).some[0].tolist() == NUMBERS[:, members].sum(axis=1).tolist()
    echoes.fail(grpc.StatusCode.INVALID_ARGUMENT, "no", times=100)
    assert grouped(OBJECTS, on_error="mask").tolist() == [[None] * 3, []]
    echoes.stop()
    with sonic.connect(echoes.url, retry_timeout_s=0.2):  # another pool, which knows no model
        assert grouped(OBJECTS, on_error="mask").tolist() == [[None] * 3, []]
