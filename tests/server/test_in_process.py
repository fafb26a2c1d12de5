"""Models of a repository in this process: the contracts and scores of a Triton, without one."""

from __future__ import annotations

import contextlib
import json
import os
import py_compile
import re
import shutil

import awkward as ak
import numpy as np
import onnx
import pytest
from tests.onnx_files import save_onnx
from tests.test_ml_tools import Raw

import sonic_coffea as sonic
from sonic_coffea.errors import (
    ConfigError,
    ContractError,
    InferenceError,
    ModelNotFoundError,
    ResponseError,
)
from sonic_coffea.server import InProcessTransport, Served, build_repository, read_repository
from sonic_coffea.transport import connect_transport

from .conftest import save_classifier
from .support import function

FIELDS = [f"x{i}" for i in range(8)]
TOP = sonic.Model("top", {"x": sonic.Row(FIELDS)}, {"scores": ["q", "t"]})


@pytest.fixture(scope="module")
def jets():
    rng = np.random.default_rng(3)
    return ak.unflatten(
        ak.zip({name: rng.normal(size=300).astype("float32") for name in FIELDS}),
        rng.multinomial(300, [0.01] * 100),
    )


@pytest.mark.server
def test_contract_and_scores_are_those_of_a_triton(repository, server, jets):
    with sonic.connect(server.url) as pool:
        there = TOP(jets, pool=pool)
    with sonic.connect(repository) as pool, connect_transport(server.url) as triton:
        here = TOP(jets, pool=pool)
        for name in ("top", "pinned"):
            ours, theirs = pool.contract(name, None), triton.metadata(name, None)
            assert (ours.version, ours.digest) == ("1", theirs.digest)
            for what in ("version", "inputs", "outputs", "max_rows", "digest", "stacks"):
                assert getattr(ours, what) == getattr(theirs, what)
            assert theirs.digest != ""
    assert ak.num(here).tolist() == ak.num(there).tolist()
    np.testing.assert_allclose(ak.flatten(here.t), ak.flatten(there.t), rtol=1e-6)


@pytest.mark.server
def test_rows_of_one_number_are_those_of_a_triton(tmp_path, serve):
    """Triton adds an axis of one to them, in batches: a fallback has the same contract."""
    for name, graph in {
        "squeezed": "(float[N, 2] x) => (float[N] y) { i = Constant<value_ints: ints = [1]>() y = "
        "ReduceSum<keepdims: int = 0>(x, i) }",
        "numbers": "(float[N] x) => (float[N] y) { y = Neg(x) }",
    }.items():
        save_onnx(tmp_path / f"{name}.onnx", graph)
        build_repository(tmp_path / "r", {name: tmp_path / f"{name}.onnx"})
    events = ak.Array([[{"a": 1.0, "b": 2.0}], [], [{"a": 3.0, "b": 4.0}]])
    squeezed = sonic.Model("squeezed", {"x": sonic.Row(["a", "b"])}, {"y": None})
    numbers = sonic.Model("numbers", {"x": sonic.Row(["a"])}, {"y": None})
    declared = sonic.Model.from_onnx(tmp_path / "numbers.onnx", inputs={"x": ["a"]})
    assert declared.inputs == numbers.inputs
    # Others may write `reshape` for any shape.
    (tmp_path / "r" / "pairs" / "1").mkdir(parents=True)
    save_onnx(
        tmp_path / "r" / "pairs" / "1" / "model.onnx",
        "(float[N, 2] x) => (float[N, 2] y) { y = Neg(x) }",
    )
    (tmp_path / "r" / "pairs" / "config.pbtxt").write_text("""
        backend: "onnxruntime" max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [1, 2] reshape: { shape: [2] } }
        output { name: "y" data_type: TYPE_FP32 dims: [2, 1] reshape: { shape: [2] } }
    """)
    row = sonic.Row(["a", "b"], axis_order="LF")
    pairs = sonic.Model("pairs", {"x": row}, {"y": sonic.Output(shape=(2, 1))})
    with serve(tmp_path / "r") as server:
        for servers in (server, tmp_path / "r", [server, str(tmp_path / "r")]):
            with sonic.connect(servers):
                assert squeezed(events).tolist() == [[3.0], [], [7.0]]
                assert numbers(events).tolist() == [[-1.0], [], [-3.0]]
                assert numbers.check().inputs[0].shape == (1,)
                assert pairs(events).tolist() == [[[[-1], [-2]]], [], [[[-3], [-4]]]]


FUNCTION = """
import numpy as np
import threading
import time

running = threading.Lock()

def twice(x):
    if (x > 1000).any():
        raise ValueError("too large")
    if not running.acquire(blocking=False):
        raise ValueError("called on two threads")
    time.sleep(0.01)
    running.release()
    return {"y": 2 * x}

def nothing(x):
    return {}

def masked(x):
    return {"y": np.ma.masked_greater(x, 1)}

def swapped(x):
    return {"y": (2 * x).astype(">f4")}

def listed(x):
    return [x]

def complexes(x):
    return {"y": x.astype("complex64")}

def flat(x):
    return {"y": x[:, 0]}

def nested(x):
    import sonic_coffea as sonic
    return sonic.Model("twice", {"x": sonic.Row(["pt"])}, {"y": ["y"]})({"pt": x[:, 0]})

def exits(x):
    raise SystemExit(3)

rows = np.zeros((4, 1), "float32")

def reusing(x):
    rows[: len(x)] = 2 * x
    return {"y": rows[: len(x)]}
"""

FUNCTIONS = re.findall(r"def (\w+)", FUNCTION)


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "f.py").write_text(FUNCTION)
    tensors = {"inputs": {"x": ("float32", [-1, 1])}, "outputs": {"y": ("float32", [-1, 1])}}
    return build_repository(
        tmp_path / "functions",
        {name: Served(f"{tmp_path / 'f.py'}:{name}", **tensors) for name in FUNCTIONS},
        max_batch_size=4,
    )


def model(name, **options):
    return sonic.Model(name, {"x": sonic.Row(["pt"])}, {"y": ["y"]}, **options)


MODEL, ONE = model("m"), ak.Array([{"pt": 1.0}])
TEXT = sonic.Model("m", MODEL.inputs, {"y": sonic.Output(dtype="string")})


def build(path, body, *, dtype="float32", **options):
    """A repository of model `m`, whose `y` is this expression of `x`, one number a row."""
    path.parent.mkdir(exist_ok=True)
    code = f"import numpy as np\ndef m(x):\n    return {{'y': {body}}}\n"
    served = function(path.parent / "m.py", code, width=1, outputs={"y": (dtype, ["N", 1])})
    return build_repository(path, {"m": served}, **options)


def test_functions_are_run_and_their_errors_name_model_and_rows(functions):
    with sonic.connect(functions):
        assert model("twice")(ak.Array([[{"pt": 1.5}], []])).y.tolist() == [[3.0], []]
        assert model("masked")(ak.Array([{"pt": 1.0}])).y.tolist() == [1.0]
        swapped = model("swapped")({"pt": np.asarray([1.5, 2.0], ">f4")})
        assert swapped["y"].tolist() == [3.0, 4.0]
        for name, message in (
            ("twice", "too large.*model twice"),
            ("nothing", "'y' is declared, but the model returned nothing"),
            ("listed", "expected listed to return a dict of arrays, got list"),
            ("masked", "output 'y' has masked values"),
            ("nested", "call the model in the analysis"),
            ("exits", r"the model failed: SystemExit\(3\)"),
            ("flat", r"is declared float32 \[-1, 1\], but the model returned float32 \[2\]"),
            (
                "complexes",
                r"is declared float32 \[-1, 1\], but the model returned complex64 \[2, 1\]",
            ),
        ):
            with pytest.raises((InferenceError, ResponseError), match=message):
                model(name)(ak.Array([{"pt": 1.0}, {"pt": 2000.0}]))


def test_files_that_exit_as_they_are_imported_do_not_end_this_process(tmp_path):
    source = function(tmp_path / "m.py", "exit()\ndef m(x): return {}\n")
    transport = InProcessTransport(build_repository(tmp_path / "r", {"m": source}).as_uri())
    with pytest.raises(ConfigError, match=r"cannot load .*m.py: SystemExit\("):
        transport.metadata("m", None)


def test_functions_are_called_once_at_a_time(functions):
    pt = np.arange(64, dtype="float32")
    with sonic.connect(functions) as pool:
        np.testing.assert_array_equal(model("twice")(ak.zip({"pt": pt})).y, 2 * pt)
        assert pool.statistics.total().requests == 16
        np.testing.assert_array_equal(model("reusing")(ak.zip({"pt": pt})).y, 2 * pt)


def test_slow_rows_are_scored_once(tmp_path):
    code = """
import pathlib, time
def slow(x):
    with pathlib.Path(__file__).with_name("rows").open("a") as rows:
        rows.write(f"{x[0, 0]:g} ")
    time.sleep(0.5 * (x[0, 0] == 3))
    return {"y": x}
"""
    served = function(tmp_path / "slow.py", code, width=1)
    path = build_repository(tmp_path / "r", {"slow": served}, max_batch_size=1)
    with sonic.connect(path, hedge_after_s=0.05) as pool:
        assert model("slow")(ak.zip({"pt": np.arange(5.0)})).y.tolist() == [0, 1, 2, 3, 4]
        assert pool.statistics.total().retries == 0
    rows = (path / "slow" / "1" / "source" / "rows").read_text()
    assert sorted(rows.split()) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("returned", ["[['é']]", "[['é'.encode()]]", "np.array([['é']], 'O')"])
def test_strings_of_functions_are_text_or_utf8(tmp_path, returned):
    with sonic.connect(build(tmp_path / "r", returned, dtype="bytes")):
        assert TEXT(ONE).tolist() == ["é"]


def test_models_take_inputs_in_their_own_order(tmp_path):
    one = ("float32", ["N", 1])
    source = Served(tmp_path / "f.py:f", inputs={"b": one, "a": one}, outputs={"y": one})
    (tmp_path / "f.py").write_text(
        "def f(**feed):\n    first, second = feed.values()\n    return {'y': first - second}\n"
    )
    path = build_repository(tmp_path / "r", {"m": source})
    inputs = {"a": sonic.Row(["a"]), "b": sonic.Row(["b"])}
    with sonic.connect(path):
        difference = sonic.Model("m", inputs, {"y": ["y"]})(ak.Array([{"a": 1.0, "b": 3.0}]))
    assert difference.y.tolist() == [2.0]


@pytest.fixture
def twins(tmp_path):
    """Return a function that serves two models of one code, each with a helper of its own."""

    def build_twins(code):
        models = {}
        for factor in (2, 3):
            helper = tmp_path / str(factor) / "helper_of_models.py"
            helper.parent.mkdir()
            helper.write_text(f"factor = {factor}\n")
            options = {"width": 1, "files": [helper]}
            models[f"times{factor}"] = function(helper.with_name("f.py"), code, **options)
        return build_repository(tmp_path / "r", models)

    return build_twins


def test_models_import_their_own_files_of_the_same_names(twins):
    code = """
import helper_of_models
import sys
def f(x):
    from helper_of_models import factor
    return {'y': x * factor * sys.modules[__name__].helper_of_models.factor}
"""
    with sonic.connect(twins(code)):
        for name, expected in (("times2", 4), ("times3", 9), ("times2", 4)):
            assert model(name)(ONE).y.tolist() == [expected]


def test_models_never_have_the_modules_of_others(twins):
    """Pickles import modules by their names alone, which several models may have."""
    code = """
from importlib import import_module
def f(x): return {'y': x * import_module('helper_of_models').factor}
"""
    with sonic.connect(twins(code)):
        for name in ("times2", "times3"):
            with pytest.raises(InferenceError, match="No module named 'helper_of_models'"):
                model(name)(ONE)


def test_rows_are_scored_by_no_file_that_replaced_the_one_of_their_contract(tmp_path):
    def built(body):
        return InProcessTransport(build(tmp_path / "r", body, overwrite=True).as_uri())

    def score(transport, contract):
        outcomes = []
        options = {"version": "1", "request_id": "", "done": outcomes.append}
        transport.infer(contract, {"x": np.ones((1, 1), "float32")}, ["y"], **options)
        return outcomes[0]

    first = built("x")
    contract = first.metadata("m", None)
    assert score(first, contract).outputs["y"] == 1
    second = built("-x")
    for transport in (first, second):
        assert isinstance(score(transport, contract), ContractError)
        assert score(transport, transport.metadata("m", None)).outputs["y"] == -1


def scores_next(expected):
    """Expect the next call to be scored by the files that are there, or to fail."""
    # For a second after an answer, nobody asks whether the model is still the same.
    with contextlib.suppress(ContractError):
        assert MODEL(ONE).y.tolist() == [expected]
    assert MODEL(ONE).y.tolist() == [expected]


def test_models_that_are_built_again_score_the_next_call_or_fail_it(tmp_path):
    with sonic.connect(build(tmp_path / "r", "2 * x")):
        assert MODEL(ONE).y.tolist() == [2.0]
        build(tmp_path / "r", "3 * x", overwrite=True)
        scores_next(3.0)
        build(tmp_path / "r", "4 * x", version="next")
        assert model("m", version=1)(ONE).y.tolist() == [3.0]
        MODEL.check()
        assert MODEL(ONE).y.tolist() == [4.0]


def test_a_version_that_was_copied_from_another_repository_has_no_digest(tmp_path):
    """Otherwise the scores of the file before would be found in a cache."""
    ours, theirs = (build(tmp_path / body / "r", body) for body in ("x", "-x"))
    with sonic.connect(ours, cache=tmp_path / "scores") as pool:
        assert MODEL(ONE).y.tolist() == [1.0]
        shutil.copytree(theirs / "m" / "1", ours / "m" / "1", dirs_exist_ok=True)
        scores_next(-1.0)
        assert pool.contract("m", None).digest == ""
    (entry,) = read_repository(ours)
    (change,) = entry["changes"]
    assert re.fullmatch("the digest of version 1 in .*config.pbtxt was changed", change)


def test_files_that_were_replaced_score_later_calls(tmp_path):
    """Also those that this package did not build, before it built others over them."""
    place, other = tmp_path / "r" / "m" / "1", tmp_path / "other.onnx"
    place.mkdir(parents=True)
    jets = ak.Array([{"pt": 2.0}])

    def save(path, function):
        save_onnx(path, f"(float[N, 1] x) => (float[N, 1] y) {{ y = {function}(x) }}")

    save(place / "model.onnx", "Neg")
    with sonic.connect(tmp_path / "r"):
        assert MODEL(jets).y.tolist() == [-2.0]
        save(place / "model.onnx", "Reciprocal")
        MODEL.check()
        assert MODEL(jets).y.tolist() == [0.5]
        save(other, "Identity")
        build_repository(tmp_path / "r", {"m": other}, overwrite=True)
        MODEL.check()
        assert MODEL(jets).y.tolist() == [2.0]
        build(tmp_path / "r", "3 * x", overwrite=True)
        MODEL.check()
        assert MODEL(jets).y.tolist() == [6.0]
        source = place / "source" / "m.py"
        py_compile.compile(str(source))  # as Python does when it imports a file
        before = source.stat()
        source.write_text(source.read_text().replace("3 * x", "-1* x"))
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))  # as archives may do
        MODEL.check()
        assert MODEL(jets).y.tolist() == [-2.0]
        weights = onnx.numpy_helper.from_array(np.float32([5]), "w")
        save_onnx(other, "(float[N, 1] x) => (float[N, 1] y) { y = Mul(x, w) }", (weights,))
        (tmp_path / "of").mkdir()
        options = {"save_as_external_data": True, "location": "of/weights", "size_threshold": 0}
        onnx.save(onnx.load(str(other)), str(other), **options)
        build_repository(tmp_path / "r", {"m": other}, overwrite=True)
        MODEL.check()
        assert MODEL(jets).y.tolist() == [10.0]
        (place / "of" / "weights").write_bytes(np.float32(7).tobytes())
        MODEL.check()
        scores = MODEL(jets)
        assert scores.y.tolist() == [14.0]
        assert scores.attrs["sonic"]["digest"] is None


def test_a_configuration_that_serves_no_version_has_no_model(tmp_path, classifier):
    config = build_repository(tmp_path / "r", {"c": classifier}) / "c" / "config.pbtxt"
    text = config.read_text()
    config.write_text(
        re.sub(r"version_policy \{\s+all \{\s+\}\s+\}", "version_policy { specific { } }", text)
    )
    with pytest.raises(ModelNotFoundError, match="does not have model 'c'"):
        InProcessTransport((tmp_path / "r").as_uri()).metadata("c", None)


def test_labels_are_compared_with_those_of_the_repository(tmp_path):
    """Only line feeds end a label."""
    names = ["light\u2028quark", "gluon\x0c"]
    save_onnx(tmp_path / "m.onnx", "(float[N, 2] x) => (float[N, 2] y) { y = Neg(x) }")
    build_repository(tmp_path / "r", {"m": tmp_path / "m.onnx"}, labels={"m": names})
    right, swapped = (
        sonic.Model("m", {"x": sonic.Row(FIELDS[:2])}, {"y": labels})
        for labels in (names, names[::-1])
    )
    with sonic.connect(tmp_path / "r"):
        right.check()
        with pytest.raises(ContractError, match="labels of output 'y' .* another order"):
            swapped.check()


def test_folders_that_are_no_versions_to_triton_are_passed_over(tmp_path, classifier, jets):
    path = build_repository(tmp_path / "r", {"top": classifier})
    for name in ("0", "03", "old", "²"):
        (path / "top" / name).mkdir()
    with sonic.connect(path):
        assert TOP.check().version == "1"
        for name, version, hint in (
            ("tpo", None, "did you mean 'top'"),
            ("top", 7, "has version 1"),
        ):
            unknown = sonic.Model(name, TOP.inputs, TOP.outputs, version=version)
            with pytest.raises(ModelNotFoundError, match=f"the repository does not have .*{hint}"):
                unknown(jets)
        assert len(TOP(jets)) == len(jets)
    assert [each["version"] for each in read_repository(path)] == [1]
    build_repository(path, {"top": classifier}, version="next")
    assert (path / "top" / "2").is_dir()


def test_optional_inputs_that_a_configuration_names_are_taken(tmp_path):
    place = tmp_path / "r" / "m" / "1"
    place.mkdir(parents=True)
    network = save_onnx(
        place / "model.onnx", "(float[N, 1] x, float[M, 1] w) => (float[N, 1] y) { y = Mul(x, w) }"
    )
    usual = onnx.numpy_helper.from_array(np.float32([[2]]), "w")
    graph = onnx.load(str(network))
    graph.graph.initializer.append(usual)
    onnx.save(graph, str(network))
    sides = {"x": "input", "w": "input", "y": "output"}
    tensors = (f'{s} {{ name: "{n}" data_type: TYPE_FP32 dims: 1 }}' for n, s in sides.items())
    (place.parent / "config.pbtxt").write_text("max_batch_size: 8\n" + "\n".join(tensors))
    weighted = sonic.Model("m", {"x": sonic.Row(["pt"]), "w": sonic.Row(["w"])}, {"y": ["y"]})
    with sonic.connect(tmp_path / "r"):
        assert weighted(ak.Array([{"pt": 3.0, "w": 5.0}])).y.tolist() == [15.0]


def test_inputs_and_outputs_of_one_name_have_shapes_of_their_own(tmp_path):
    (tmp_path / "f.py").write_text("def f(x):\n    return {'x': 2 * x}\n")
    number = {"x": ("float32", ["N"])}
    served = Served(f"{tmp_path / 'f.py'}:f", inputs=number, outputs=number)
    doubled = sonic.Model("m", {"x": sonic.Row("pt")}, {"x": None})
    with sonic.connect(build_repository(tmp_path / "r", {"m": served})):
        assert doubled(ak.Array([{"pt": 1.0}, {"pt": 3.0}])).tolist() == [2.0, 6.0]


@pytest.mark.parametrize("name", ["r?1", "r#1", os.fsdecode(b"r\xff1")])
def test_urls_of_folders_name_the_whole_folder(tmp_path, name):
    (tmp_path / "r").mkdir()
    (tmp_path / name).mkdir()
    for url in (f"file://{tmp_path / name}", (tmp_path / name).as_uri()):
        assert InProcessTransport(url).repository == tmp_path / name


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({}, r"sonic-manifest.json cannot be read: KeyError\('kind'\)"),
        ({"inputs": None}, "expected a list as inputs in .*, got None"),
        ({"built": 3}, "expected a str as built in .*, got 3"),
        ({"files": ["model.onnx"]}, "expected a dict as files in"),
        ({"file": "/dev/zero"}, "in the folder of .*, got '/dev/zero'"),
        ({"files": {"../../other/1/model.onnx": ""}}, "in the folder of .*other"),
    ],
)
def test_manifests_that_lack_something_or_say_something_odd_are_named(tmp_path, entries, problem):
    path = build(tmp_path / "r", "x")
    place = path / "m" / "1" / "sonic-manifest.json"
    whole = json.loads(place.read_text()) if entries else {}
    place.write_text(json.dumps({**whole, **entries}))
    with pytest.raises(ConfigError, match=problem):
        read_repository(path)
    with sonic.connect(path), pytest.raises(ConfigError, match=problem):
        MODEL.check()


def test_a_network_that_this_package_did_not_build(tmp_path, classifier, jets):
    folder = tmp_path / "r" / "theirs" / "3"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(classifier.read_bytes())
    (tmp_path / "r" / "code" / "1").mkdir(parents=True)
    with sonic.connect(tmp_path / "r") as pool:
        contract = pool.contract("theirs", None)
        assert (contract.max_rows, contract.inputs[0].shape) == (None, (8,))
        with pytest.raises(ConfigError, match="expected a model that build_repository wrote"):
            pool.contract("code", None)
    (folder / "model.onnx").write_text("no network")
    with sonic.connect(tmp_path / "r") as pool, pytest.raises(ConfigError, match="no ONNX graph"):
        pool.contract("theirs", None)
    other = save_classifier(folder / "theirs.onnx", features=3)
    (folder.parent / "config.pbtxt").write_text(f'default_model_filename: "{other.name}"')
    with sonic.connect(tmp_path / "r"):
        row = sonic.Row(FIELDS[:3])
        scores = sonic.Model("theirs", {"x": row}, {"scores": ["q", "t"]})(jets)
    assert len(scores) == len(jets)
    unreadable = r"expected a model configuration in .*config\.pbtxt"
    for config, message in (
        (b'default_model_filename: "other.onnx"', "or .*other.onnx for the backend onnxruntime"),
        (b'backend: "python"', r"or .*model.onnx .* got neither in .* \(backend python\)"),
        (b'platform: "ensemble"', "theirs is an ensemble, which only a server runs"),
        (b"nonsense {", unreadable),
        (b"\xff\xfe", unreadable),
    ):
        (folder.parent / "config.pbtxt").write_bytes(config)
        with sonic.connect(tmp_path / "r") as pool, pytest.raises(ConfigError, match=message):
            pool.contract("theirs", None)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("folder/that/is/not/there", "which is no folder here"),
        # The name would be that of a host, and the folder the current one.
        ("file://other", "expected a server as .* got 'file://other'"),
        ("{file}", r"is a file; expected .*build_repository\('repository', {'m': "),
    ],
)
def test_what_is_no_repository_says_what_to_type(tmp_path, server, message):
    file = tmp_path / "m.onnx"
    file.touch()
    with pytest.raises(ConfigError, match=message):
        sonic.connect(server.format(file=file))


def test_functions_that_write_to_their_inputs_leave_the_arrays_of_callers_alone(tmp_path):
    folder = build(tmp_path / "r", "np.multiply(x, 2, out=x)")
    x, nobody = np.ones((2, 1), "float32"), "grpc://127.0.0.1:1"
    with sonic.connect(nobody, fallback=folder, fallback_after_s=0.001):
        wrapper = Raw(f"triton+{nobody}/m", {"ssl": False})
        for _ in range(2):
            assert wrapper(["y"], {"x": x})["y"].tolist() == [[2.0], [2.0]]
    assert x.tolist() == [[1.0], [1.0]]
