"""Our triton_wrapper returns what coffea's does, on the same server, and names what is wrong."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.ml_tools import triton_wrapper
from sonic_coffea.pool import current
from sonic_coffea.testing import FakeModel, FakeServer

PLAIN = {"ssl": False}


def padded(values: Any, length: int = 8) -> Any:
    filled = ak.fill_none(ak.pad_none(values, length, axis=1, clip=True), 0.0)
    return ak.values_astype(filled, np.float32)[:, np.newaxis]


def tensors(jets: Any) -> dict[str, Any]:
    """What the tagger takes, made with awkward's functions."""
    return {
        "features": ak.concatenate([padded(jets.pt), padded(jets.eta)], axis=1),
        "mask": padded(ak.ones_like(jets.pt)),
    }


class Tagger(triton_wrapper):
    def prepare_awkward(self, output_list: list[str], jets: Any) -> tuple[list[Any], Any]:
        return [], {"output_list": output_list, "input_dict": tensors(jets)}


class Raw(triton_wrapper):
    """One whose inputs are ready."""

    def prepare_awkward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs


@pytest.fixture(scope="module")
def flat(jets: ak.Array) -> ak.Array:
    return ak.drop_none(ak.flatten(jets), axis=0)


@pytest.fixture(scope="module")
def arrays(flat: ak.Array) -> dict[str, Any]:
    return {name: ak.to_numpy(tensor) for name, tensor in tensors(flat).items()}


@pytest.fixture(scope="module")
def server(repository: Path, installation: Any) -> Iterator[sonic.LocalServer]:
    """A server with a port, as coffea's class knows no sockets."""
    with sonic.LocalServer(repository, port=0, stop_timeout_s=0.0) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: sonic.LocalServer) -> str:
    return f"triton+{server.url}/tagger/1"


def test_certificates_are_those_of_the_folder_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"root_certificates": "ca.pem", "verbose": False, "private_key": None}
    wrapper = Raw("triton+grpc://h:1/m", options)
    monkeypatch.chdir("/")
    assert wrapper.pool.settings.tls_root == str(tmp_path / "ca.pem")


@contextmanager
def converting(takes: str, gives: Any = "float32", **options: Any) -> Iterator[Raw]:
    """Yield the wrapper of a model that returns its one number in another type."""
    model = FakeModel(
        inputs={"x": (takes, (1,))},
        outputs={"y": (gives, (1,))},
        function=lambda inputs: {"y": inputs["x"].astype(gives)},
        **options,
    )
    with FakeServer({"m": model}) as server:
        yield Raw(f"triton+{server.url}/m/1", PLAIN)
        assert all(request.inputs["x"].dtype == takes for request in server.requests)


def test_no_rows_have_the_type_of_rows() -> None:
    rows = np.ones((2, 1), np.float32)
    with converting("float32", np.dtype("bfloat16")) as wrapper:
        scores, nothing = (wrapper(["y"], {"x": x})["y"] for x in (rows, rows[:0]))
    assert scores.dtype == nothing.dtype
    assert nothing.shape == (0, 1)


@pytest.fixture(scope="module")
def coffeas(url: str) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        if not find_spec("gevent"):  # it imports tritonclient's HTTP half, which is not used here
            patch.setitem(sys.modules, "tritonclient.http", ModuleType("tritonclient.http"))
        from coffea.ml_tools import triton_wrapper as original

    class Original(original):
        prepare_awkward = Tagger.prepare_awkward

    # It cannot read the batch size of a server that batches dynamically, with no preference.
    return Original(url, client_args=PLAIN, batch_size=64)


def test_results_are_those_of_coffeas_class(url: str, coffeas: Any, flat: ak.Array) -> None:
    outputs = ["weights", "scores"]
    received, expected = Tagger(url, PLAIN)(outputs, flat), coffeas(outputs, flat)
    assert list(received) == list(expected) == outputs
    inputs = tensors(flat[:60])
    by_numpy = Raw(url, PLAIN)(["scores"], {n: ak.to_numpy(t) for n, t in inputs.items()})
    np.testing.assert_array_equal(by_numpy["scores"], received["scores"][:60])
    for name in outputs:
        assert received[name].type == expected[name].type
        np.testing.assert_allclose(received[name], expected[name], rtol=0, atol=1e-6)
    assert len(received["scores"]) > 1000


def test_servers_outside_the_pool_have_a_pool_of_their_own(url: str, flat: ak.Array) -> None:
    with sonic.connect("grpc://127.0.0.1:9") as pool:
        wrapper = Tagger(url, PLAIN)
        assert len(wrapper(["scores"], flat)["scores"]) == len(flat)
        assert wrapper.pool is not pool
        assert current() is pool
        assert pool.statistics.total().requests == 0


def test_wrappers_of_equal_options_share_a_pool(url: str, flat: ak.Array) -> None:
    class Patient(Tagger):
        max_retry_attempts = 9

    wrapper, patient = Tagger(url, PLAIN), Patient(url, PLAIN)
    copies = [pickle.loads(pickle.dumps(wrapper)) for _ in range(2)]
    assert {id(w.pool) for w in (*copies, Raw(url, PLAIN, 7))} == {id(wrapper.pool)}
    assert patient.pool is not wrapper.pool
    assert wrapper.pool.settings.retry_timeout_s == pytest.approx(6.3)
    assert patient.pool.settings.retry_timeout_s == pytest.approx(102.3)
    expected = wrapper(["scores"], flat[:50])["scores"].tolist()
    assert [c(["scores"], flat[:50])["scores"].tolist() for c in copies] == [expected] * 2
    assert wrapper.pool.statistics.total().rows == 3 * 50
    wrapper.pool.close()  # and replaced
    assert wrapper(["scores"], flat[:50])["scores"].tolist() == expected


def test_pickles_hold_names_only(server: sonic.LocalServer, url: str, flat: ak.Array) -> None:
    with sonic.connect(server, headers={"key": "secret-value"}):
        wrapper = Tagger(url, PLAIN, batch_size=32)
        before = pickle.dumps(wrapper)
        wrapper(["scores"], flat[:5])
        content = pickle.dumps(wrapper)
        copy = pickle.loads(content)
        assert (copy.model, copy.version, copy.batch_size) == ("tagger", "1", 32)
    assert content == before
    assert b"secret-value" not in content


def test_another_server_takes_over(server: sonic.LocalServer, flat: ak.Array) -> None:
    with sonic.connect(["grpc://127.0.0.1:9", server]) as pool:
        scores = Tagger("triton+grpc://127.0.0.1:9/tagger/1", PLAIN)(["scores"], flat)["scores"]
        assert len(scores) == len(flat)
        assert pool.statistics.total().rows == len(flat)


def test_lost_servers_and_missing_models_are_named(url: str, flat: ak.Array) -> None:
    class Impatient(Tagger):
        max_retry_attempts = 0

    with pytest.raises(errors.ServerLostError, match=r"127\.0\.0\.1:9") as caught:
        Impatient("triton+grpc://127.0.0.1:9/tagger/1", PLAIN)(["scores"], flat)
    assert caught.value.model == "tagger"
    for path, hint in (("taggr/1", "did you mean 'tagger'"), ("tagger/7", "it has version 1")):
        with pytest.raises(errors.ModelNotFoundError, match=hint):
            Tagger(url.replace("tagger/1", path), PLAIN)(["scores"], flat)


def test_versions_may_be_left_to_the_server(url: str, flat: ak.Array) -> None:
    free, pinned = Tagger(url.removesuffix("/1"), PLAIN), Tagger(url, PLAIN)
    assert free.version is None
    assert "model tagger, version 1 at grpc://" in repr(pinned)
    scores = [wrapper(["scores"], flat[:9])["scores"].tolist() for wrapper in (free, pinned)]
    assert scores[0] == scores[1]


ONES, SHORT = np.ones((3, 2, 8), "f4"), np.ones((3, 5, 8), "f4")
WITH_NONE = ak.to_numpy(ak.Array([[[1.0, None]]] * 3))
CONTRACT, INPUT = errors.ContractError, errors.InputError
OTHER_SHAPE = r"FP32 \[N, 5, 8\], the model takes FP32 \[N, 2, \?\]"


@pytest.mark.parametrize(
    ("changes", "outputs", "kind", "message"),
    [
        ({"feature": np.ones(3)}, ["scores"], CONTRACT, "did you mean 'features'"),
        ({"mask": None}, ["scores"], CONTRACT, "nothing is given .* 'mask'"),
        ({}, ["score"], CONTRACT, "did you mean 'scores'"),
        ({"features": SHORT}, ["scores"], CONTRACT, OTHER_SHAPE),
        ({"features": ONES[..., 0]}, ["scores"], CONTRACT, r"\[N, 2\], the"),
        ({"mask": np.ones((4, 1, 8), "f4")}, ["scores"], INPUT, "features 3, mask 4"),
        ({"mask": np.float32(1)}, ["scores"], INPUT, "an axis of rows"),
        ({"mask": [[[1.0]]] * 3}, ["scores"], INPUT, "is list; expected a numpy array"),
        ({"mask": np.array(["a"] * 3)}, ["scores"], INPUT, "expected numbers"),
        ({"mask": WITH_NONE}, ["scores"], INPUT, "has None in it; fill it with ak.fill_none"),
    ],
)
@pytest.mark.parametrize("call", [Raw.__call__, Raw.numpy_call])
def test_misfits_are_named_before_they_are_sent(
    connected: sonic.Pool, url: str, call: Any, changes: Any, outputs: Any, kind: Any, message: str
) -> None:
    inputs = {"features": ONES, "mask": ONES[:, :1], **changes}
    inputs = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    with pytest.raises(kind, match=message):
        call(Raw(url, PLAIN), outputs, inputs)
    assert connected.statistics.total().requests == 0


@pytest.mark.parametrize(
    ("takes", "dtype", "lists_tensors"),
    [
        ("float32", "float64", True),
        ("float32", ">f4", True),
        ("float32", ">f4", False),  # a server that does not say what it takes
        ("float32", "bool", True),
        ("object", "int64", True),  # a model of strings
    ],
)
def test_other_numbers_are_converted_with_a_warning(
    takes: str, dtype: str, lists_tensors: bool
) -> None:
    # A masked array in which no value is masked is as good as any.
    x = np.ma.MaskedArray(np.asarray([[0], [1]]).astype(dtype), mask=False)
    with (
        converting(takes, lists_tensors=lists_tensors) as wrapper,
        pytest.warns(UserWarning, match=f"'x' .* is {x.dtype} and is converted to {takes}"),
    ):
        assert wrapper(["y"], {"x": x})["y"].tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("int32", 2**40), ("int32", 1.5), ("int64", np.nan), ("uint8", -1), ("float32", 1e300)],
)
def test_numbers_that_the_model_cannot_hold_are_refused(dtype: str, number: float) -> None:
    message = f"'x' has .*, which {dtype} cannot hold"
    with converting(dtype) as wrapper, pytest.raises(errors.InputError, match=message):
        wrapper(["y"], {"x": np.asarray([[1], [number]])})


@pytest.mark.parametrize(("batch_size", "rows"), [(-1, 64), (10, 10), (64, 64), (1000, 64)])
def test_requests_of_the_batch_size_go_through_the_pool_of_the_process(
    connected: sonic.Pool, url: str, arrays: dict[str, Any], batch_size: int, rows: int
) -> None:
    wrapper = Raw(url, PLAIN, batch_size=batch_size)
    assert wrapper.batch_size == rows
    assert wrapper.pool is connected
    scores = wrapper(["scores"], arrays)["scores"]
    total = connected.statistics.total()
    # No row is sent twice to fill the last request.
    assert total.rows == len(arrays["mask"])
    assert total.requests == -(-total.rows // rows)
    np.testing.assert_allclose(scores, Raw(url, PLAIN)(["scores"], arrays)["scores"], atol=1e-6)


def test_no_row_is_no_request(connected: sonic.Pool, url: str, flat: ak.Array) -> None:
    nothing = Tagger(url, PLAIN)(["scores", "weights"], flat[:0])
    assert [str(a.type) for a in nothing.values()] == ["0 * 2 * float32", "0 * 0 * 2 * float32"]
    # Where there is no row, there may be no type either.
    untyped = ak.to_numpy(ak.Array([]))
    plain = Raw(url, PLAIN)(["scores"], {"features": untyped, "mask": untyped})["scores"]
    assert (plain.shape, plain.dtype) == ((0, 2), np.float32)
    assert connected.statistics.total().requests == 0


def test_results_can_be_given_another_structure(url: str, flat: ak.Array) -> None:
    class Jagged(Tagger):
        def prepare_awkward(self, jets: Any) -> tuple[list[Any], Any]:  # type: ignore[override]
            return super().prepare_awkward(["scores"], ak.flatten(jets))

        def postprocess_awkward(self, return_array: Any, jets: Any) -> Any:  # type: ignore[override]
            return ak.unflatten(return_array["scores"][:, 1], ak.num(jets))

    events = ak.unflatten(flat[:9], [4, 0, 5])
    top = Jagged(url, PLAIN)(events)
    expected = Tagger(url, PLAIN)(["scores"], flat[:9])["scores"][:, 1]
    assert top.tolist() == [expected[:4].tolist(), [], expected[4:].tolist()]


def test_client_arguments_become_settings() -> None:
    url = "triton+grpc://triton.example/m/1"
    assert Raw(url).pool.settings.servers == ("grpcs://triton.example:443",)
    assert Raw(url, PLAIN).pool.settings.servers == ("grpc://triton.example:8001",)
    with pytest.raises(errors.ConfigError, match="did you mean 'root_certificates'"):
        Raw(url, {"root_certificate": "ca.pem"})


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("triton+grpc://h:1", {}, "expected triton.grpc://host:port/model/version"),
        ("grpc://h:1", {}, "expected triton.grpc://host:port/model/version"),
        ("triton+http://h:8000/m/1", {}, "expected its gRPC endpoint"),
        *(
            ("triton+grpc://h:1/m/1", {"batch_size": size}, "batch_size: .* at least 1, or -1")
            for size in (0, 1.5, "64", None)
        ),
        ("triton+grpc://h:1/m/1", {"client_args": {"creds": 1}}, "no use for 'creds'; .*: .*ssl"),
    ],
)
def test_wrong_arguments_are_errors(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        Raw(url, **options)
