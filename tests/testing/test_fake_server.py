"""The fake server beside a real one, the pool with all that it can do wrong, and other servers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import awkward as ak
import grpc
import numpy as np
import onnxruntime
import pytest
from tests.cli.test_check import checked
from tests.commands import run
from tests.doubling import MODEL, jets, served, twice
from tests.network.toxics import ToxicProxy
from tests.scored import Scored
from tests.scripts import python
from tests.waiting import until
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.ml_tools import triton_wrapper
from sonic_coffea.model._declaration import warn_once
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer, Wrong
from sonic_coffea.transport import DATATYPES, connect_transport

Code = grpc.StatusCode


def pool_of(*servers: Any, **options: Any) -> Pool:
    return Pool(Settings.make([s.url for s in servers], **options))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rows: {"other": rows}, r"output 'y' is declared, but .* returned \['other'\]"),
        (lambda rows: rows, "output 'y' is declared, but the model returned ndarray"),
        (lambda rows: {"y": np.ma.masked_less(rows, 4)}, "output 'y' has masked values"),
        (lambda rows: {"y": np.array([None])}, r"'y' as numbers or strings, got \[None\]"),
        (lambda rows: pytest.fail("unexpected rows"), "unexpected rows"),
    ],
)
def test_functions_give_the_outputs_that_are_declared(function: Any, message: str) -> None:
    models = served(lambda inputs: function(inputs["x"]))
    with (
        FakeServer(models) as server,
        sonic.connect(server.url),
        pytest.raises(errors.InferenceError, match=message),
    ):
        MODEL(jets(3.0))


def test_functions_may_return_another_byte_order() -> None:
    with FakeServer(served(lambda inputs: {"y": inputs["x"].astype(">f4")})) as server:
        assert MODEL(jets(3.0), pool=pool_of(server)).twice.tolist() == [3.0]


def test_answers_are_those_of_a_real_server(
    server: sonic.LocalServer, tagger: sonic.Model, tagger_path: Path, scored: Scored
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
        ours, real = (connect_transport(url).metadata("tagger", None) for url in urls)
        assert (ours.inputs, ours.outputs) == (real.inputs, real.outputs)
        assert (ours.version, ours.max_rows) == (real.version, real.max_rows)
        with pool_of(fake) as pool:
            scored(pool)
        for name, version in (("taggr", None), ("tagger", "7")):
            messages = []
            for url in urls:
                with pytest.raises(errors.ModelNotFoundError) as caught:
                    connect_transport(url).metadata(name, version)
                messages.append(caught.value.message)
            assert messages[0] == messages[1]
        counted = connect_transport(fake.url).statistics("tagger", None)
        assert counted.rows == fake.statistics["tagger", "rows"] > 1000


@pytest.mark.parametrize("version", [None, 3])
def test_default_scores_are_those_that_are_documented(version: int | None) -> None:
    model = sonic.Model(
        "m",
        {"x": sonic.Padded(["pt", "eta"], 3), "mask": sonic.Mask(3)},
        {"y": ["a", "b"], "mass": None, "grid": sonic.Output(shape=(2, 3))},
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
    places = np.arange(6).reshape(2, 3)
    expected = (1 + np.sin(np.asarray([0.5, 0.0, 0.25])[:, None, None] + places)) / 2
    np.testing.assert_allclose(ak.flatten(scores.grid), expected, rtol=1e-6)
    assert [r.model for r in fake.requests] == ["m"]
    assert fake.requests[0].rows == 3
    assert fake.requests[0].inputs["mask"].shape == (3, 1, 3)


def test_outputs_have_the_axes_of_their_declaration() -> None:
    of_elements = partial(sonic.Output, ["a", "b"], per="constituent")
    outputs = {"y": of_elements(axes=("labels", "1+x")), "z": of_elements(axes=(3, "x"))}
    outputs["number"] = sonic.Output(shape=(), per="constituent")
    model = sonic.Model("m", {"x": sonic.Padded("pt", 4)}, outputs)
    assert FakeModel.of(model, dict).outputs == {
        "y": (np.float32, (2, -1)),
        "z": (np.float32, (3, -1, 2)),
        "number": (np.float32, (-1,)),
    }


# Requests that end with one of these statuses are not sent again.
DENIED = (Code.PERMISSION_DENIED, Code.UNAUTHENTICATED)
FINAL = (
    *(Code.INVALID_ARGUMENT, Code.ALREADY_EXISTS, Code.FAILED_PRECONDITION),
    *(Code.OUT_OF_RANGE, Code.UNIMPLEMENTED, *DENIED),
)


@pytest.mark.parametrize("code", [c for c in Code if c is not Code.OK])
def test_statuses_are_errors_or_another_try(fake: FakeServer, code: Any) -> None:
    fake.fail(code, "the server's words")
    # On a machine that is busy, an answer is late as if its server hung.
    with pool_of(fake, hedge_after_s=60.0) as pool:
        if code not in FINAL:
            assert twice(MODEL(jets(*range(3)), pool=pool)) == [0, 1, 2]
            assert pool.statistics.total().retries == 1
            split = code is Code.DEADLINE_EXCEEDED
            assert sorted(r.rows for r in fake.requests) == ([1, 2, 3] if split else [3, 3])
            return
        with pytest.raises(errors.SonicError, match="the server's words") as caught:
            MODEL(jets(*range(3)), pool=pool)
        assert type(caught.value) is (errors.AccessError if code in DENIED else errors.RequestError)
        where = caught.value.server, caught.value.model, caught.value.rows
        assert where == (fake.url, "m", (0, 3))
        assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (Wrong.shape, r"came back with shape \[2, 1\] for 3 rows"),
        (Wrong.type, "output 'y' came back as INT32, the model declares FP32"),
        (Wrong.missing, "the response has no output 'y'"),
        (Wrong.cut, "cannot read the server's response"),
        (Wrong.without_data, "outputs without data"),
    ],
)
def test_wrong_answers_are_errors(fake: FakeServer, how: Any, message: str) -> None:
    fake.answer_wrongly(how)
    with pool_of(fake) as pool:
        with pytest.raises(errors.ResponseError, match=message) as caught:
            MODEL(jets(*range(3)), pool=pool)
        assert (caught.value.server, caught.value.model) == (fake.url, "m")
        assert len(fake.requests) == 1
        assert twice(MODEL(jets(*range(3)), pool=pool)) == [0, 1, 2]


def test_faults_are_functions_of_the_answer_and_the_call(fake: FakeServer) -> None:
    """Every third request ends with words about what would have been answered."""

    def full(answer: Any, context: Any) -> None:
        context.abort(Code.INVALID_ARGUMENT, f"no room for {list(answer.outputs[0].shape)}")

    fake.inject(full, times=1, every=3)
    with pool_of(fake) as pool:
        for _ in range(2):
            assert twice(MODEL(jets(*range(4)), pool=pool)) == [0, 1, 2, 3]
        with pytest.raises(errors.RequestError, match=r"no room for \[4, 1\]"):
            MODEL(jets(*range(4)), pool=pool)
        assert twice(MODEL(jets(*range(12)), pool=pool)) == list(range(12))


def test_extensions_are_left_out() -> None:
    with FakeServer(served(max_rows=4), extensions=()) as fake, pool_of(fake) as pool:
        with pytest.raises(errors.RequestError, match="batch size 9 is larger than"):
            MODEL(jets(*range(9)), pool=pool)  # it has no way to say its limit
        assert twice(MODEL(jets(*range(4)), pool=pool)) == [0, 1, 2, 3]
        assert "4 rows" in repr(sonic.report(pool))
        methods = {method for method, _ in fake.calls}
        expected = {"ModelMetadata", "ModelConfig", "ModelInfer", "RepositoryIndex"}
        # The report asks for statistics, and the pool for life if an answer is late.
        assert methods <= {*expected, "ModelStatistics", "ServerLive"}
        with connect_transport(fake.url) as connection:
            assert connection.ready()
            assert connection.info().extensions == ()
            with pytest.raises(errors.RequestError, match="ModelStatistics is not implemented"):
                connection.statistics("m", None)
            with pytest.raises(errors.ModelNotFoundError):
                connection.metadata("n", None)


NO_DEFAULT = "output of strings, .* give a function"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FakeServer({"m": MODEL}), r"model 'm': expected FakeModel.of\(model\), got"),
        (lambda: FakeServer([MODEL]), "expected a dict of FakeModel by name, got"),
        (lambda: FakeModel.of("m"), "expected a sonic_coffea.Model, got 'm'"),
        (lambda: FakeModel.of(MODEL, {"y": 0}), "expected a function, got"),
        (lambda: default_of(sonic.Flat("pt"), per="constituent"), NO_DEFAULT),
        (lambda: default_of(sonic.Padded("pt", 2), per="constituent"), NO_DEFAULT),
        (lambda: default_of(sonic.Row("pt"), dtype="string"), NO_DEFAULT),
        (lambda: FakeServer({}).refuse("RepositryIndex", Code.INTERNAL), "'RepositoryIndex'"),
        (lambda: FakeServer(served()).unload("mm"), "no model 'mm'; did you mean 'm'"),
    ],
)
def test_models_and_faults_that_cannot_be_faked_are_refused(make: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        make()


def default_of(layout: Any, **output: Any) -> FakeModel:
    return FakeModel.of(sonic.Model("m", {"x": layout}, {"y": sonic.Output(**output)}))


def with_numbers(answer: Any) -> None:
    """Put the numbers into the message one by one, in place of their bytes."""
    (output,), (raw,) = answer.outputs, answer.raw_output_contents
    numbers = np.frombuffer(raw, DATATYPES[output.datatype])
    # Short integers share a field.
    kind = {"FP64": "fp64", "INT8": "int", "INT32": "int", "UINT8": "uint"}.get(output.datatype)
    field = getattr(output.contents, f"{kind or output.datatype.lower()}_contents")
    field.extend(numbers.tolist())
    del answer.raw_output_contents[:]


@pytest.mark.parametrize("kind", ["bool", "int8", "int64", "uint8", "uint64", "float64"])
def test_typed_contents_are_read(kind: str) -> None:
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": sonic.Output(["v"], kind)})
    served = FakeModel.of(model, lambda inputs: {"y": inputs["x"].astype(kind)})
    with FakeServer({"m": served}) as fake, pool_of(fake) as pool:
        fake.answer_wrongly(with_numbers)
        values = model(jets(*range(2)), pool=pool).v
    assert values.tolist() == [0, 1]
    assert values.type.content.primitive == kind


@pytest.mark.parametrize("way", ["file", "function"])
def test_tokens_go_with_every_call(tmp_path: Path, way: str) -> None:
    path = tmp_path / "token"
    path.write_text("secret-1\n")
    token: Any = path if way == "file" else lambda: path.read_text().strip()
    headers = {"authorization": "Bearer secret-1", "X-One": "two"}
    options = {"token": token, "headers": {"x-one": "two"}}
    with FakeServer(served(), headers=headers) as fake, pool_of(fake, **options) as pool:
        with connect_transport(fake.url, options=pool.settings.connection_options()) as connection:
            lived = threading.Event()
            connection.live(lambda error: lived.set() if error is None else None)
            assert lived.wait(20)
            assert connection.ready()
            connection.info()
            connection.index()
            connection.statistics("m", None)
        assert twice(MODEL(jets(0, 1, 2), pool=pool)) == [0, 1, 2]
        asked = {method for method, _ in fake.calls}
        assert asked == {
            *("ServerLive", "ServerReady", "ServerMetadata", "RepositoryIndex"),
            *("ModelStatistics", "ModelMetadata", "ModelConfig", "ModelInfer"),
        }
        assert all(h["authorization"] == "Bearer secret-1" for _, h in fake.calls)
        # It has expired, and there is a new one.
        path.write_text("secret-2")
        fake.headers["authorization"] = "Bearer secret-2"
        assert twice(MODEL(jets(0, 1, 2), pool=pool)) == [0, 1, 2]
        before = len(fake.requests)
        with pool_of(fake) as other, pytest.raises(errors.AccessError, match="token"):
            MODEL(jets(0, 1, 2), pool=other)
        assert len(fake.requests) == before


def test_configurations_are_asked_for_again(fake: FakeServer) -> None:
    """The size of its batches must be known: it is asked again."""
    fake.refuse("ModelConfig", Code.UNAVAILABLE, "for the moment")
    with pool_of(fake) as pool, ThreadPoolExecutor(1) as thread:
        scores = thread.submit(MODEL, jets(*range(40)), pool=pool)
        until(lambda: "ModelConfig" in [method for method, _ in fake.calls])
        fake.accept("ModelConfig")
        assert twice(scores.result()) == list(range(40))
    assert max(r.rows for r in fake.requests) == 4


def test_clients_of_others_are_answered(fake: FakeServer) -> None:
    with InferenceServerClient(fake.url.removeprefix("grpc://")) as client:
        assert client.is_model_ready("m")
        assert not client.is_model_ready("n")
        wide = InferInput("x", [1, 2], "FP32")
        wide.set_data_from_numpy(np.zeros((1, 2), np.float32))
        message = r"input 'x': expected FP32 \[-1, 1\], got float32 \[1, 2\]"
        with pytest.raises(InferenceServerException, match=message):
            client.infer("m", [wide])
        tensors = [InferInput(name, [1, 1], "FP32") for name in ("x", "z")]
        for tensor in tensors:
            tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
        with pytest.raises(InferenceServerException, match="unexpected inference input 'z'"):
            client.infer("m", tensors)


CUT = "upstream request timeout"
# On a machine that is busy, an answer is late as if its server hung.
PATIENT: dict[str, Any] = {"hedge_after_s": 60.0}
JETS = jets(*range(100))
TWICE = [2.0 * n for n in range(100)]


@pytest.fixture
def saturated(fake: FakeServer) -> FakeServer:
    """Its proxy refuses the index: status CANCELLED, no words."""
    fake.refuse("RepositoryIndex", grpc.StatusCode.CANCELLED)
    return fake


def test_inference_needs_no_index(saturated: FakeServer) -> None:
    with pool_of(saturated, **PATIENT) as pool:
        assert MODEL(JETS, pool=pool).twice.tolist() == TWICE
        assert pool.statistics.total().retries == 0
    saturated.unload("m")
    with pool_of(saturated) as pool, pytest.raises(errors.ModelNotFoundError, match="not have"):
        MODEL(JETS[:4], pool=pool)


def test_refused_indices_are_explained(saturated: FakeServer) -> None:
    with (
        connect_transport(saturated.url) as connection,
        pytest.raises(errors.OverloadError, match=r"no new clients .* SuperSONIC .* saturated"),
    ):
        connection.index()
    listed = run("models", saturated.url)
    assert listed.returncode == 1
    assert "admits no new clients at the moment" in listed.stderr.replace("\n", " ")
    assert "Traceback" not in listed.stderr
    assert "admits no new clients" in checked(saturated.url, ok=True)["models"]["detail"]
    checked(saturated.url, "m", ok=True)


@pytest.mark.parametrize("channels", [1, 3])
def test_few_connections_that_last(fake: FakeServer, channels: int) -> None:
    """However many calls, threads and pools' looks at the server there are."""
    options = {"channels": channels}
    with ToxicProxy(fake.url) as proxy, pool_of(proxy, **options) as pool:
        for _ in range(3):
            pendings = [MODEL.submit(JETS[:40], pool=pool) for _ in range(10)]
            assert [len(pending.result(timeout_s=60)) for pending in pendings] == [40] * 10
        assert proxy.connections == channels


def test_requests_that_are_always_cut_are_an_error(fake: FakeServer) -> None:
    fake.fail(grpc.StatusCode.UNAVAILABLE, CUT, times=1000)
    with (
        pool_of(fake, request_timeout_s=0.5) as pool,
        pytest.raises(errors.OverloadError, match=r"upstream request timeout; .*max_request_bytes"),
    ):
        MODEL(JETS[:4], pool=pool)


@pytest.fixture
def unlisted() -> Iterator[FakeServer]:
    """It does not list what its model takes and gives."""
    warn_once.cache_clear()
    with FakeServer(served(lists_tensors=False), extensions=()) as running:
        yield running


def test_the_declaration_is_trusted_with_one_warning(
    unlisted: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "sonic_coffea")
    with pool_of(unlisted) as pool:
        for _ in range(3):
            assert MODEL(JETS[:64], pool=pool).twice.tolist() == TWICE[:64]
        assert MODEL(JETS[:0], pool=pool).type.content.contents[0].primitive == "float32"
        assert [spec.name for spec in MODEL.check(pool).outputs] == ["y"]
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("sonic_coffea")]
    assert "does not list what model m takes and gives" in message
    steps = checked(unlisted.url, "m", ok=True)
    assert "lists no tensors" in steps["model m"]["detail"]
    assert "inference" not in steps


def test_unlisted_outputs_are_compared_when_they_come_back(unlisted: FakeServer) -> None:
    wide = sonic.Model("m", MODEL.inputs, {"y": sonic.Output(["twice"], "float64")})
    unlisted.models["m"] = FakeModel.of(
        wide, lambda inputs: {"y": (2 * inputs["x"]).astype(np.float64)}, lists_tensors=False
    )
    with (
        pool_of(unlisted) as pool,
        pytest.raises(errors.ResponseError, match="'y' came back as FP64, the model declares FP32"),
    ):
        MODEL(JETS[:4], pool=pool)


def test_a_server_beside_it_lists_the_tensors(unlisted: FakeServer, fake: FakeServer) -> None:
    with pool_of(unlisted, fake) as pool:
        for _ in range(5):
            assert MODEL(JETS[:64], pool=pool).twice.tolist() == TWICE[:64]
        wrong = sonic.Model("m", {"z": sonic.Row("pt")}, {"y": ["twice"]})
        with pytest.raises(errors.ContractError, match="has no input 'z'"):
            wrong(JETS[:4], pool=pool)


class Wrapper(triton_wrapper):
    def prepare_awkward(self, output_list: Any, x: Any) -> Any:
        return [], {"output_list": output_list, "input_dict": {"x": x}}


def test_wrappers_need_no_list_of_tensors(unlisted: FakeServer) -> None:
    url = unlisted.url.replace("grpc://", "triton+grpc://")
    wrapper = Wrapper(f"{url}/m", client_args={"ssl": False}, batch_size=8)
    x = np.arange(20, dtype=np.float32)[:, np.newaxis]
    assert wrapper(["y"], {"x": x})["y"][:, 0].tolist() == TWICE[:20]
    assert len(wrapper(["y"], {"x": x[:0]})["y"]) == 0
    assert ak.flatten(wrapper(["y"], ak.from_numpy(x))["y"]).tolist() == TWICE[:20]


HEAVY = ("awkward", "coffea", "dask", "distributed", "grpc", "numba", "numpy", "tritonclient")
SESSION = f"""
import sys


def test_nothing_heavy_is_loaded(request):
    assert request.config.pluginmanager.has_plugin("sonic_coffea._pytest_plugin")
    assert set({HEAVY!r}) & set(sys.modules) == set()
    ours = {{name for name in sys.modules if name.startswith("sonic_coffea.")}}
    assert ours == {{"sonic_coffea._pytest_plugin", "sonic_coffea._version", "sonic_coffea.errors"}}
"""


def test_a_session_of_others_loads_nothing_heavy(tmp_path: Path) -> None:
    (plugin,) = entry_points(group="pytest11", name="sonic_coffea")
    (tmp_path / "test_session.py").write_text(SESSION, encoding="utf-8")
    session = ("-m", "pytest", "-p", plugin.value, "-p", "no:cacheprovider", ".")
    # Other plugins of this environment load what they like.
    done = python(*session, cwd=tmp_path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "1 passed" in done.stdout


def test_functions_of_models_that_are_not_served_are_refused(sonic_server: Any) -> None:
    tagger = sonic.Model("tagger", {"x": sonic.Row("pt")}, {"y": None})
    with pytest.raises(sonic.errors.ConfigError, match="'tager'; did you mean 'tagger'"):
        sonic_server(tagger, functions={"tager": lambda inputs: {"y": inputs["x"]}})
