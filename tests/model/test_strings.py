"""Models that take strings, and answer with strings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.onnx_files import save_onnx

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeServer
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
