"""Model repositories built from ONNX files: what is written, and what is refused."""

from __future__ import annotations

import hashlib
import queue
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpc_client
from onnx import TensorProto, helper, numpy_helper
from tests.limits import without_room
from tests.waiting import until

from sonic_coffea.errors import ConfigError
from sonic_coffea.server import Ensemble, Served, build_repository, read_repository
from sonic_coffea.transport import read_model_config

from .support import infer


def save(path, nodes, inputs, outputs, initializers=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), str(path))
    return path


def value(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def identity(path, shape, dtype=TensorProto.FLOAT):
    node = helper.make_node("Identity", ["x"], ["y"])
    return save(path, [node], [value("x", shape, dtype)], [value("y", shape, dtype)])


def config(path, model="m"):
    return read_model_config((path / model / "config.pbtxt").read_text())


def dims(tensor):
    return [int(n) for n in tensor["dims"]]


@pytest.mark.parametrize(
    ("platform", "backend", "group", "threads"),
    [
        (None, "onnxruntime", {"count": 2}, "intra_op_thread_count"),
        ("python", "python", {"count": 2, "kind": "KIND_CPU"}, "intra_op_threads"),
    ],
)
def test_what_is_written(tmp_path, classifier, platform, backend, group, threads):
    path = build_repository(
        tmp_path / "deep" / "repository",
        {"top": classifier},
        platform=platform,
        max_batch_size=32,
        instances=2,
        threads=3,
        labels={"top": {"scores": ["qcd", "top"]}},
    )
    found = config(path, "top")
    assert (found["backend"], found["max_batch_size"]) == (backend, 32)
    assert found["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": ["8"]}]
    assert found["output"] == [
        {
            "name": "scores",
            "data_type": "TYPE_FP32",
            "dims": ["2"],
            "label_filename": "scores_labels.txt",
        }
    ]
    assert found["dynamic_batching"] == {}
    assert found["instance_group"] == [group]
    assert found["version_policy"] == {"all": {}}
    assert found["parameters"][threads]["string_value"] == "3"
    digest = hashlib.sha256(classifier.read_bytes()).hexdigest()
    assert found["parameters"]["sha256.1"]["string_value"] == digest
    (warmup,) = found["model_warmup"]
    assert warmup["inputs"] == {"x": {"data_type": "TYPE_FP32", "dims": ["8"], "zero_data": True}}
    assert (path / "top" / "scores_labels.txt").read_text() == "qcd\ntop\n"
    assert (path / "top" / "1" / "model.onnx").read_bytes() == classifier.read_bytes()
    assert (path / "top" / "1" / "model.py").exists() == (platform == "python")
    assert [p.name for p in path.parent.iterdir()] == ["repository"]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (False, None),
        (None, None),
        ({}, {}),
        (
            {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": 100},
            {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": "100"},
        ),
        ({"preserve_ordering": True}, {"preserve_ordering": True}),
    ],
)
def test_dynamic_batching(tmp_path, classifier, option, expected):
    found = config(build_repository(tmp_path / "r", {"m": classifier}, dynamic_batching=option))
    assert found.get("dynamic_batching") == expected


@pytest.mark.parametrize(
    ("shape", "rows"),
    [(["N"], 65_536), (["N", 8], 15_625), (["N", 17, 128], 1024), (["N", 3, "L"], 1024)],
)
def test_requests_of_small_rows_have_many(tmp_path, shape, rows):
    file = identity(tmp_path / "m.onnx", shape)
    assert config(build_repository(tmp_path / "r", {"m": file}))["max_batch_size"] == rows


def test_a_file_where_a_dict_or_a_repository_is_meant_is_said(tmp_path):
    file = identity(tmp_path / "m.onnx", ["N", 8])
    with pytest.raises(ConfigError, match=r"a dict, such as \{'m': .*m.onnx"):
        build_repository(tmp_path / "r", file)
    with pytest.raises(ConfigError, match="is a file; expected a model repository, which"):
        read_repository(file)


@pytest.mark.parametrize(
    ("shape", "batch", "sent"),
    [
        (["N", 8], 1024, [8]),
        (["N", 3, "L"], 1024, [3, -1]),
        (["N"], 1024, [1]),
        ([4, 8], 0, [4, 8]),
        ([4, "L"], 0, [4, -1]),
        ([], 0, [1]),
    ],
)
def test_shapes(tmp_path, shape, batch, sent):
    file = identity(tmp_path / "m.onnx", shape)
    found = config(build_repository(tmp_path / "r", {"m": Served(file, max_batch_size=batch)}))
    assert found.get("max_batch_size", 0) == batch
    for tensor in (*found["input"], *found["output"]):
        assert dims(tensor) == sent
        assert ("reshape" in tensor) == (sent == [1])
    assert ("dynamic_batching" in found) == (batch > 0)
    # Zeros of any length need not be what a model can run.
    assert ("model_warmup" in found) == (-1 not in sent)


# By name: shape, type, and what is sent. Those of rows are inputs of one model.
CASES = {
    "rows": (["N", 3], TensorProto.FLOAT, np.ones((2, 3), "f4")),
    "doubles": (["N", 3], TensorProto.DOUBLE, np.ones((2, 3))),
    "integers": (["N", 3, "L"], TensorProto.INT64, np.arange(12).reshape(2, 3, 2)),
    "flags": (["N", 2], TensorProto.BOOL, np.eye(2, dtype=bool)),
    "halves": (["N", 2], TensorProto.FLOAT16, np.eye(2, dtype="f2")),
    "numbers": (["N"], TensorProto.FLOAT, np.array([[1.5], [2.5]], "f4")),
    "words": (["N", 2], TensorProto.STRING, np.array([[b"a", b"bc"]] * 2, dtype=object)),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, serve):
    """Of a model of every type, one without rows, and one that fails on some rows."""
    folder = tmp_path_factory.mktemp("cases")
    every = save(
        folder / "every.onnx",
        [helper.make_node("Identity", [name], [f"{name}_out"]) for name in CASES],
        [value(name, shape, dtype) for name, (shape, dtype, _) in CASES.items()],
        [value(f"{name}_out", shape, dtype) for name, (shape, dtype, _) in CASES.items()],
    )
    files = {
        "every": every,
        "fixed": Served(identity(folder / "fixed.onnx", [4, 2]), max_batch_size=0),
    }
    table = save(
        folder / "table.onnx",
        [helper.make_node("Gather", ["table", "x"], ["y"])],
        [value("x", ["N", 1], TensorProto.INT64)],
        [value("y", ["N", 1])],
        [numpy_helper.from_array(np.arange(5, dtype="f4"), "table")],
    )
    path = build_repository(folder / "r", files)
    together = {"preferred_batch_size": [20], "max_queue_delay_microseconds": 5_000_000}
    build_repository(path, {"table": table}, dynamic_batching=together, warmup=False)
    with serve(path) as running:
        yield running


def contents(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("options", [{"overwrite": True}, {"version": "next"}], ids=str)
def test_after_an_error_a_repository_is_as_it_was(tmp_path, options):
    """The second model cannot be moved to its place, where a broken link is."""
    old, new = identity(tmp_path / "o.onnx", ["N", 2]), identity(tmp_path / "n.onnx", ["N", "M"])
    new = old if "version" in options else new
    path = build_repository(tmp_path / "r", {"a": old})
    before = contents(path)
    (path / "b").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot write the model repository"):
        build_repository(path, {"a": new, "b": new}, **options)
    assert contents(path) == before
    assert sorted(p.name for p in path.iterdir()) == ["a", "b"]
    (path / "b").unlink()
    build_repository(path, {"a": new, "b": new}, **options)
    assert sorted(p.name for p in path.iterdir()) == ["a", "b"]
    assert contents(path / "b") != contents(path / "a") != before


def test_a_repository_on_another_file_system_than_its_parent(tmp_path):
    memory = Path("/dev/shm")  # noqa: S108
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    network = identity(tmp_path / "m.onnx", ["N", 2])
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = tmp_path / "r"
        path.symlink_to(folder)
        build_repository(path, {"a": network})
        build_repository(path, {"a": network, "b": network}, version=2, overwrite=True)
        assert sorted(p.name for p in path.iterdir()) == ["a", "b"]
        assert sorted(p.name for p in (path / "a").iterdir()) == ["1", "2", "config.pbtxt"]
        assert [p.name for p in tmp_path.iterdir()] == ["m.onnx", "r"]


@pytest.mark.parametrize("rows", [96, 1])
def test_a_network_of_one_number_of_rows_is_refused(tmp_path, rows):
    """With what its exporter has to be told."""
    network = identity(tmp_path / "fixed.onnx", [rows, 2])
    message = f"input 'x' of model 'm' has .* fixed length, {rows}"
    with pytest.raises(ConfigError, match=message) as caught:
        build_repository(tmp_path / "r", {"m": network})
    assert "dynamic_axes={'x': {0: 'rows'}, 'y': {0: 'rows'}}" in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_every_shape_and_type_is_served(server):
    answer = infer(server, "every", **{name: sent for name, (_, _, sent) in CASES.items()})
    for name, (_, _, sent) in CASES.items():
        assert answer[f"{name}_out"].dtype == sent.dtype, name
        np.testing.assert_array_equal(answer[f"{name}_out"], sent, err_msg=name)
    whole = np.arange(8, dtype="f4").reshape(4, 2)
    np.testing.assert_array_equal(infer(server, "fixed", x=whole)["y"], whole)


def test_a_request_that_fails_fails_alone(server):
    """Twenty look-ups in one batch, one of them beyond the end of the table."""
    answers: queue.Queue = queue.Queue()
    client = grpc_client.InferenceServerClient(server.url)
    try:
        for index in [*range(5)] * 3 + [99] + [*range(4)]:
            tensor = grpc_client.InferInput("x", [1, 1], "INT64")
            tensor.set_data_from_numpy(np.array([[index]]))

            def done(result, error, index=index):
                answers.put((index, error if error is not None else result.as_numpy("y")))

            client.async_infer("table", [tensor], done)
        got = [answers.get(timeout=20.0) for _ in range(20)]

        def counted():
            return client.get_inference_statistics("table").model_stats[0]

        # Triton counts after it answers.
        until(lambda: counted().inference_count == 20)
        executions = counted().execution_count
    finally:
        client.close()
    assert executions == 1
    for index, answer in got:
        if index == 99:
            assert "out of data bounds" in str(answer)
        else:
            np.testing.assert_array_equal(answer, [[index]])


def test_a_model_that_is_there_as_it_would_be_written_stays(tmp_path, classifier):
    function = tmp_path / "double.py"
    function.write_text("def double(x):\n    return {'y': 2 * x}\n")
    rows = ("float32", ["N", 2])
    double = Served(f"{function}:double", inputs={"x": rows}, outputs={"y": rows})
    models = {
        "one": classifier,
        "double": double,
        "both": Ensemble(steps=[("double", {"x": "X"}, {"y": "Y"})]),
    }
    options = {"labels": {"one": ["a", "b"]}, "metadata": {"epochs": 3, "layers": (16, 2)}}
    path = build_repository(tmp_path / "r", models, **options)
    written = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}
    build_repository(path, models, **options)
    build_repository(path, {**models, "more": classifier}, **options)
    assert {p: p.stat().st_mtime_ns for p in written} == written
    assert (path / "more" / "1").is_dir()

    for changed in ({"max_batch_size": 8}, {"labels": {}}, {"metadata": {}}):
        with pytest.raises(
            ConfigError, match=r"already has .*one.*, of other files or options; the option"
        ):
            build_repository(path, models, **{**options, **changed})
    function.write_text("def double(x):\n    return {'y': x + x}\n")
    with pytest.raises(
        ConfigError, match=r"already has .*double.*, of other files or options; the option"
    ):
        build_repository(path, models, **options)
    (path / "more" / "config.pbtxt").write_text("")
    with pytest.raises(
        ConfigError, match="already has more, of other files or options; the option"
    ):
        build_repository(path, {"more": classifier}, metadata={"epochs": 3})
    build_repository(path, {"one": classifier}, version="next")
    with pytest.raises(ConfigError, match="already has one, of other files or options; the option"):
        build_repository(path, {"one": classifier}, **options)


def test_other_models_stay_and_the_same_one_is_not_replaced_unasked(tmp_path, classifier):
    path = build_repository(tmp_path / "r", {"one": classifier})
    build_repository(path, {"two": classifier})
    other = identity(tmp_path / "other.onnx", ["N", 5])
    with pytest.raises(ConfigError, match="already has two, of other files or options; the option"):
        build_repository(path, {"two": other, "three": other})
    assert sorted(p.name for p in path.iterdir()) == ["one", "two"]
    assert dims(config(path, "two")["input"][0]) == [8]
    build_repository(path, {"two": other}, overwrite=True)
    assert dims(config(path, "two")["input"][0]) == [5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.onnx", "r"]


def test_all_or_nothing(tmp_path, classifier):
    with pytest.raises(ConfigError, match="No such file.*model 'bad'"):
        build_repository(tmp_path / "r", {"good": classifier, "bad": tmp_path / "none.onnx"})
    assert list(tmp_path.iterdir()) == []


def test_weights_in_a_file_of_their_own_come_along(tmp_path, classifier):
    file = tmp_path / "m.onnx"
    onnx.save(
        onnx.load(str(classifier)),
        str(file),
        save_as_external_data=True,
        location="m.weights",
        size_threshold=0,
    )
    path = build_repository(tmp_path / "r", {"m": file})
    weights = tmp_path / "m.weights"
    assert (path / "m" / "1" / "m.weights").read_bytes() == weights.read_bytes()
    # Clients are told of other weights, too, by the checksum.
    weights.write_bytes(weights.read_bytes()[::-1])
    build_repository(path, {"n": file})
    first, other = (config(path, name)["parameters"]["sha256.1"] for name in ("m", "n"))
    assert first["string_value"] != other["string_value"]
    weights.unlink()
    with pytest.raises(ConfigError, match=r"expected the weights file 'm\.weights' beside"):
        build_repository(tmp_path / "s", {"m": file})


def test_weights_of_a_branch_come_along(tmp_path):
    def branch(name, number):
        weight = numpy_helper.from_array(np.full(100, number, "f4"), name)
        return helper.make_graph(
            [helper.make_node("Identity", [name], [f"{name}_out"])],
            name,
            [],
            [value(f"{name}_out", [100])],
            [weight],
        )

    nodes = [
        helper.make_node("If", ["x"], ["y"], then_branch=branch("a", 1), else_branch=branch("b", 2))
    ]
    file = save(tmp_path / "m.onnx", nodes, [value("x", [], TensorProto.BOOL)], [value("y", [100])])
    options = {"save_as_external_data": True, "location": "m.weights", "size_threshold": 0}
    onnx.save(onnx.load(str(file)), str(file), **options)
    path = build_repository(tmp_path / "r", {"m": file})
    assert (path / "m" / "1" / "m.weights").read_bytes() == (tmp_path / "m.weights").read_bytes()


@pytest.mark.parametrize("content", [b"", b"GIF89a not a model", b"\x08\x07"])
def test_not_an_onnx_file(tmp_path, content):
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ConfigError, match="expected an ONNX file, got"):
        build_repository(tmp_path / "r", {"m": tmp_path / "m.onnx"})


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a b", "ä"])
def test_illegal_names(tmp_path, classifier, name):
    with pytest.raises(ConfigError, match="expected a model name"):
        build_repository(tmp_path / "r", {name: classifier})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"m": ["a", "b", "c"]}, "expected 2 labels for output 'scores' of model 'm', got 3"),
        ({"m": {"score": ["a", "b"]}}, "did you mean 'scores'"),
        ({"n": ["a", "b"]}, "model 'n' that is not built"),
        ({"m": "ab"}, "mapping of output name to labels"),
    ],
)
def test_labels_that_do_not_fit(tmp_path, classifier, labels, message):
    with pytest.raises(ConfigError, match=message):
        build_repository(tmp_path / "r", {"m": classifier}, labels=labels)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": -1}, "max_batch_size of model 'm' to be an integer >= 0, got -1"),
        ({"instances": 0}, "instances to be an integer >= 1"),
        ({"threads": 0}, "threads to be an integer >= 1"),
        ({"platform": "tensorrt"}, "platform 'tensorrt' cannot run model 'm'"),
        (
            {"dynamic_batching": {"prefered_batch_size": [1]}},
            'no field named "prefered_batch_size"',
        ),
    ],
)
def test_options_that_cannot_be(tmp_path, classifier, options, message):
    with pytest.raises(ConfigError, match=message):
        build_repository(tmp_path / "r", {"m": classifier}, **options)


def test_without_onnx_the_error_tells_how_to_get_it(tmp_path, classifier, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r'pip install "sonic-coffea\[onnx\]"'):
        build_repository(tmp_path / "r", {"m": classifier})


@pytest.mark.parametrize(("names", "stacked"), [("NN", True), ("TN", False)])
def test_graphs_are_not_stacked(tmp_path, names, stacked):
    nodes = [helper.make_node("Identity", [f"x{i}"], [f"y{i}"]) for i in "ab"]
    file = save(
        tmp_path / "m.onnx",
        nodes,
        [value(f"x{i}", [n, 2]) for i, n in zip("ab", names, strict=True)],
        [value(f"y{i}", [n, 2]) for i, n in zip("ab", names, strict=True)],
    )
    found = config(build_repository(tmp_path / "r", {"m": file}))
    assert (found.get("max_batch_size", 0) > 0) == stacked
    assert dims(found["input"][0]) == ([2] if stacked else [-1, 2])


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that is there and unreadable")
def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "f.py").write_text("def f(x): return {'y': x}\n")
    row = {"x": ("float32", ["N", 1])}
    served = Served(f"{tmp_path}/f.py:f", inputs=row, outputs=row, files=["/proc/self/mem"])
    with pytest.raises(ConfigError, match="cannot write the model repository .*/r: ") as e:
        build_repository(tmp_path / "r", {"m": served})
    assert e.value.__cause__ is None
    assert [path.name for path in tmp_path.iterdir()] == ["f.py"]


def test_a_place_that_cannot_be_written(tmp_path, classifier):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write .*Not a directory") as e:
        build_repository(tmp_path / "file" / "r", {"m": classifier})
    assert e.value.__cause__ is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full(tmp_path, classifier):
    build_repository(tmp_path / "r", {"m": classifier})
    with without_room(), pytest.raises(ConfigError, match="File too large"):
        build_repository(tmp_path / "r", {"n": classifier})
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["m"]
