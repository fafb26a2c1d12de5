"""The fake server beside a real one, and the pool with all that it can do wrong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import awkward as ak
import grpc
import numpy as np
import onnxruntime
import pytest
from tests.waiting import until
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer, Wrong
from sonic_coffea.transport import ConnectionOptions, connect_transport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.scored import Scored

Code = grpc.StatusCode
MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})


def double(inputs: Any) -> dict[str, Any]:
    return {"y": 2 * inputs["x"]}


def objects(n: int) -> ak.Array:
    return ak.zip({"pt": np.arange(n, dtype=np.float32)})


def twice(scores: ak.Array) -> list[float]:
    return (scores.twice / 2).tolist()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer({"m": FakeModel.of(MODEL, double, max_rows=4)}) as server:
        yield server


def pool_of(*servers: FakeServer, **options: Any) -> Pool:
    return Pool(Settings.make([s.url for s in servers], **options))


def test_it_is_like_a_real_server(
    server: sonic.LocalServer,
    tagger: sonic.Model,
    tagger_path: Path,
    scored: Scored,
) -> None:
    session = onnxruntime.InferenceSession(tagger_path)
    function = lambda inputs: dict(  # noqa: E731
        zip(("scores", "weights"), session.run(None, dict(inputs)), strict=True)
    )
    model = FakeModel(
        inputs={"features": ("float32", (2, -1)), "mask": ("float32", (1, -1))},
        outputs={"scores": ("float32", (2,)), "weights": ("float32", (-1, 2))},
        function=function,
    )
    with FakeServer({"tagger": model}) as fake:
        urls = fake.url, server.url
        ours, real = (connect_transport(url).contract("tagger", None) for url in urls)
        assert (ours.inputs, ours.outputs) == (real.inputs, real.outputs)
        assert (ours.version, ours.max_rows) == (real.version, real.max_rows)
        with pool_of(fake) as pool:
            scored(pool)
        for name, version in (("taggr", None), ("tagger", "7")):
            messages = []
            for url in urls:
                with pytest.raises(errors.ModelNotFoundError) as caught:
                    connect_transport(url).contract(name, version)
                messages.append(caught.value.message)
            assert messages[0] == messages[1]
        counted = connect_transport(fake.url).statistics("tagger", None)
        assert counted.rows == fake.statistics["tagger", "rows"] > 1000


@pytest.mark.parametrize("version", [None, "1"])
def test_default_scores_are_those_that_are_documented(version: str | None) -> None:
    model = sonic.Model(
        "m",
        {"x": sonic.Padded(["pt", "eta"], 3), "mask": sonic.Mask(3)},
        {"y": ["a", "b"], "mass": None},
        version=version,
    )
    jets = ak.Array([[[{"pt": 1.0, "eta": 2.0}]], [], [[], [{"pt": 0.5, "eta": 0.0}] * 4]])
    with FakeServer({"m": FakeModel.of(model)}) as fake, pool_of(fake) as pool:
        scores = model(jets, pool=pool)
    means = [[3 / 6], [], [0.0, 1.5 / 6]]
    assert ak.num(scores).tolist() == [1, 0, 2]
    for k, scored in enumerate((scores.y.a, scores.y.b)):
        expected = (1 + np.sin(ak.Array(means) + k)) / 2
        np.testing.assert_allclose(ak.flatten(scored), ak.flatten(expected), rtol=1e-6)
    assert ak.all(scores.mass == scores.y.a)
    assert [r.model for r in fake.requests] == ["m"]
    assert fake.requests[0].rows == 3
    assert fake.requests[0].inputs["mask"].shape == (3, 1, 3)


def test_a_graph_needs_a_function() -> None:
    graph = sonic.Model(
        "g", {"x": sonic.Flat(["pt"])}, {"y": sonic.Output(["v"], per="constituent")}
    )
    with pytest.raises(errors.ConfigError, match="give a function"):
        FakeModel.of(graph)
    events = ak.Array([[{"pt": 1.0}, {"pt": 2.0}], [], [{"pt": 3.0}]])
    served = FakeModel.of(graph, lambda inputs: {"y": 3 * inputs["x"]})
    with FakeServer({"g": served}) as fake, pool_of(fake) as pool:
        assert graph(events, pool=pool).v.tolist() == [[3.0, 6.0], [], [9.0]]


# What becomes of a request for which a server has this status: the error, and whether it is sent
# again, here or elsewhere.
FATES = {
    Code.CANCELLED: (errors.ServerLostError, True),
    Code.UNKNOWN: (errors.InferenceError, True),
    Code.INVALID_ARGUMENT: (errors.RequestError, False),
    Code.DEADLINE_EXCEEDED: (errors.RouteTimeoutError, True),
    Code.NOT_FOUND: (errors.ModelNotFoundError, True),
    Code.ALREADY_EXISTS: (errors.RequestError, False),
    Code.PERMISSION_DENIED: (errors.AccessError, False),
    Code.RESOURCE_EXHAUSTED: (errors.OverloadError, True),
    Code.FAILED_PRECONDITION: (errors.RequestError, False),
    Code.ABORTED: (errors.ServerLostError, True),
    Code.OUT_OF_RANGE: (errors.RequestError, False),
    Code.UNIMPLEMENTED: (errors.RequestError, False),
    Code.INTERNAL: (errors.InferenceError, True),
    Code.UNAVAILABLE: (errors.ServerLostError, True),
    Code.DATA_LOSS: (errors.ServerLostError, True),
    Code.UNAUTHENTICATED: (errors.AccessError, False),
}


@pytest.mark.parametrize("code", [c for c in Code if c is not Code.OK])
def test_every_status_over_the_wire(fake: FakeServer, code: Any) -> None:
    kind, again = FATES[code]
    fake.fail(code, "the server's words")
    with pool_of(fake) as pool:
        if again:
            assert twice(MODEL(objects(3), pool=pool)) == [0, 1, 2]
            assert pool.statistics.total().retries == 1
            split = kind is errors.RouteTimeoutError
            assert sorted(r.rows for r in fake.requests) == ([1, 2, 3] if split else [3, 3])
            return
        with pytest.raises(kind) as caught:
            MODEL(objects(3), pool=pool)
        assert "the server's words" in str(caught.value)
        assert (caught.value.server, caught.value.model) == (fake.url, "m")
        assert caught.value.rows == (0, 3)
        assert len(fake.requests) == 1


def test_half_of_the_requests_are_refused(fake: FakeServer) -> None:
    fake.fail(Code.RESOURCE_EXHAUSTED, times=10_000, every=2)
    with pool_of(fake) as pool:
        assert twice(MODEL(objects(100), pool=pool)) == list(range(100))
        total = pool.statistics.total()
        assert total.rows == 100
        assert total.retries >= 10


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (Wrong.shape, r"came back with shape \[2, 1\] for 3 rows"),
        (Wrong.type, "output 'y' came back as INT32, the model declares FP32"),
        (Wrong.missing, "the answer lacks output 'y'"),
        (Wrong.cut, "cannot read the server's response"),
        (Wrong.without_data, "outputs without data"),
    ],
)
def test_wrong_answers(fake: FakeServer, how: Any, message: str) -> None:
    fake.answer_wrongly(how)
    with pool_of(fake) as pool:
        with pytest.raises(errors.ResponseError, match=message) as caught:
            MODEL(objects(3), pool=pool)
        assert (caught.value.server, caught.value.model) == (fake.url, "m")
        assert len(fake.requests) == 1
        assert twice(MODEL(objects(3), pool=pool)) == [0, 1, 2]


def test_a_fault_is_a_function_of_the_answer_and_the_call(fake: FakeServer) -> None:
    """Every third request of four rows ends with words about what would have been answered."""

    def full(answer: Any, context: Any) -> None:
        context.abort(Code.INVALID_ARGUMENT, f"no room for {list(answer.outputs[0].shape)}")

    fake.inject(full, times=1, every=3)
    with pool_of(fake) as pool:
        for _ in range(2):
            assert twice(MODEL(objects(4), pool=pool)) == [0, 1, 2, 3]
        with pytest.raises(errors.RequestError, match=r"no room for \[4, 1\]"):
            MODEL(objects(4), pool=pool)
        assert twice(MODEL(objects(12), pool=pool)) == list(range(12))


def test_a_server_that_is_not_there_yet(fake: FakeServer) -> None:
    fake.stop()
    with pool_of(fake, retry_timeout_s=60) as pool:
        scores: list[Any] = []
        thread = threading.Thread(target=lambda: scores.append(MODEL(objects(9), pool=pool)))
        thread.start()
        until(lambda: any(s.last_error for s in pool.servers))
        fake.start()
        thread.join(60)
        assert twice(scores[0]) == list(range(9))


def test_a_server_that_breaks_its_connections(fake: FakeServer) -> None:
    fake.hold()
    with pool_of(fake) as pool:
        pending = MODEL.submit(objects(40), pool=pool)
        until(lambda: len(fake.requests) >= 4)
        fake.stop()
        fake.start()
        assert twice(pending.result(timeout_s=60)) == list(range(40))
        assert pool.statistics.total().rows == 40


def test_a_model_that_is_unloaded_and_loaded(fake: FakeServer) -> None:
    with (
        FakeServer({"m": FakeModel.of(MODEL, double, max_rows=4)}) as other,
        pool_of(fake, other) as pool,
    ):
        assert twice(MODEL(objects(40), pool=pool)) == list(range(40))
        fake.unload("m")
        before = other.statistics["m", "rows"]
        assert twice(MODEL(objects(40), pool=pool)) == list(range(40))
        assert other.statistics["m", "rows"] == before + 40
        other.unload("m")
        threading.Timer(1.0, fake.load, ["m"]).start()
        assert twice(MODEL(objects(3), pool=pool)) == [0, 1, 2]


@pytest.mark.parametrize("typed", [False, True])
def test_a_minimal_server(typed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel.of(MODEL, double, max_rows=4)
    with (
        FakeServer({"m": model}, extensions=(), typed_contents=typed) as fake,
        pool_of(fake) as pool,
    ):
        with pytest.raises(errors.RequestError, match="batch size 9 is larger than"):
            MODEL(objects(9), pool=pool)  # it has no way to say its limit
        assert twice(MODEL(objects(4), pool=pool)) == [0, 1, 2, 3]
        assert "4 rows" in repr(sonic.report(pool))
        methods = {method for method, _ in fake.calls}
        expected = {"ModelMetadata", "ModelConfig", "ModelInfer", "RepositoryIndex"}
        # The report asks for statistics, and the pool for life if an answer is late.
        assert methods <= {*expected, "ModelStatistics", "ServerLive"}
    with FakeServer({"m": model}, extensions=()) as fake:
        connection = connect_transport(fake.url)
        assert connection.ready()
        assert connection.info().extensions == ()
        with pytest.raises(errors.RequestError, match="ModelStatistics is not implemented"):
            connection.statistics("m", None)
        with pytest.raises(errors.ModelNotFoundError):
            connection.contract("n", None)
        connection.close()


@pytest.mark.parametrize("kind", ["bool", "int8", "int32", "int64", "uint8", "uint64", "float64"])
def test_numbers_one_by_one(kind: str) -> None:
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": sonic.Output(["v"], kind)})
    served = FakeModel.of(model, lambda inputs: {"y": inputs["x"].astype(kind)})
    with FakeServer({"m": served}, typed_contents=True) as fake, pool_of(fake) as pool:
        values = model(objects(2), pool=pool).v
    assert values.tolist() == [0, 1]
    assert values.type.content.primitive == kind


def test_half_precision_has_no_numbers() -> None:
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": sonic.Output(["v"], "float16")})
    served = FakeModel.of(model, lambda inputs: {"y": inputs["x"].astype("float16")})
    with FakeServer({"m": served}) as fake, pool_of(fake) as pool:
        fake.answer_wrongly(Wrong.without_data)
        with pytest.raises(errors.ResponseError, match="outputs without data"):
            model(objects(2), pool=pool)


@pytest.mark.parametrize("way", ["string", "file", "function"])
def test_a_token_goes_with_every_call(tmp_path: Path, way: str) -> None:
    path = tmp_path / "token"
    path.write_text("secret-1\n")
    token: Any = {"string": "secret-1", "file": path, "function": lambda: path.read_text().strip()}
    options = Settings.make("grpc://s:1", token=token[way], headers={"x-one": "two"})
    model = FakeModel.of(MODEL, double)
    headers = {"authorization": "Bearer secret-1", "X-One": "two"}
    with FakeServer({"m": model}, headers=headers) as fake:
        connection = connect_transport(fake.url, options=options.connection_options())
        lived = threading.Event()
        connection.live(lambda error: lived.set() if error is None else None)
        assert lived.wait(20)
        assert connection.ready()
        connection.info()
        connection.models()
        connection.statistics("m", None)
        connection.close()
        with pool_of(fake, token=token[way], headers={"x-one": "two"}) as pool:
            assert twice(MODEL(objects(3), pool=pool)) == [0, 1, 2]
            methods = {method for method, _ in fake.calls}
            assert methods == {
                "ServerLive",
                "ServerReady",
                "ServerMetadata",
                "RepositoryIndex",
                "ModelStatistics",
                "ModelMetadata",
                "ModelConfig",
                "ModelInfer",
            }
            assert all(h["authorization"] == "Bearer secret-1" for _, h in fake.calls)
            if way == "string":
                return
            # It has expired, and there is a new one.
            path.write_text("secret-2")
            fake.headers["authorization"] = "Bearer secret-2"
            assert twice(MODEL(objects(3), pool=pool)) == [0, 1, 2]
    with FakeServer({"m": model}, headers=headers) as fake, pool_of(fake) as pool:
        with pytest.raises(errors.AccessError, match="token"):
            MODEL(objects(3), pool=pool)
        assert fake.requests == []


def test_a_function_for_the_token_that_fails(fake: FakeServer) -> None:
    def broken() -> str:
        raise KeyError("TRITON_TOKEN")

    for token, message in (
        (broken, r"the function that token= names failed: KeyError( \[|$)"),
        (lambda: None, "the function that token= names returned NoneType, expected str"),
    ):
        with (
            pool_of(fake, token=token) as pool,
            pytest.raises(errors.ConfigError, match=message),
        ):
            MODEL(objects(3), pool=pool)
        options = ConnectionOptions(token=token)  # type: ignore[arg-type]
        connection = connect_transport(fake.url, options=options)
        with pytest.raises(errors.ConfigError, match=message):
            connection.info()


def test_a_file_of_servers_that_changes_while_rows_are_out(
    fake: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "servers.txt"
    path.write_text(f"{fake.url}\n")
    with (
        FakeServer({"m": FakeModel.of(MODEL, double, max_rows=4)}) as other,
        Pool(Settings.make(path, max_in_flight=2)) as pool,
    ):
        fake.hold()
        pending = MODEL.submit(objects(40), pool=pool)
        until(lambda: len(fake.requests) == 2)
        path.write_text("nonsense\n")
        until(lambda: pool.servers[0].url == fake.url)
        path.write_text(f"{other.url}  # the new one\n")
        until(lambda: other.statistics["m", "requests"] == 8)
        fake.release()
        assert twice(pending.result(timeout_s=60)) == list(range(40))
        assert [s.url for s in pool.servers] == [other.url]


def test_a_configuration_that_cannot_be_had_for_the_moment(fake: FakeServer) -> None:
    """The size of its batches must be known: it is asked again."""
    fake.refuse("ModelConfig", Code.UNAVAILABLE, "for the moment")
    with pool_of(fake) as pool, ThreadPoolExecutor(1) as thread:
        scores = thread.submit(MODEL, objects(40), pool=pool)
        until(lambda: "ModelConfig" in [method for method, _ in fake.calls])
        fake.accept("ModelConfig")
        assert twice(scores.result()) == list(range(40))
    assert max(r.rows for r in fake.requests) == 4


def test_a_client_without_this_package(fake: FakeServer) -> None:
    with InferenceServerClient(fake.url.removeprefix("grpc://")) as client:
        assert client.is_model_ready("m")
        assert not client.is_model_ready("n")
        wide = InferInput("x", [1, 2], "FP32")
        wide.set_data_from_numpy(np.zeros((1, 2), np.float32))
        message = r"input 'x': expected FP32 \[-1, 1\], got float32 \[1, 2\]"
        with pytest.raises(InferenceServerException, match=message):
            client.infer("m", [wide])


def test_the_fixture(sonic_server: Any) -> None:
    server = sonic_server(MODEL, functions={"m": double}, retry_timeout_s=0.3)
    assert twice(MODEL(objects(3))) == [0, 1, 2]
    server.stop()
    assert MODEL(objects(3), on_error="mask").twice.tolist() == [None] * 3
