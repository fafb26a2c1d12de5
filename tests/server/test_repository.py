"""Model repositories: what is written, versions and ensembles, and what is refused."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path

import awkward as ak
import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc as grpc_client
from onnx import numpy_helper
from tests.onnx_files import save_onnx
from tests.waiting import until
from tritonclient.utils import np_to_triton_dtype

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ModelNotFoundError, ServerError, ServerLostError
from sonic_coffea.server import Ensemble, Served, build_repository, read_repository

from .support import configuration, files, function, infer


def identity(path, shape):
    """Save a network of x to y, with a shape such as ``N, 8``."""
    return save_onnx(path, f"(float[{shape}] x) => (float[{shape}] y) {{ y = Identity(x) }}")


def dims(tensor):
    return [int(n) for n in tensor["dims"]]


@pytest.mark.parametrize(
    ("platform", "backend", "group", "threads"),
    [
        (None, "onnxruntime", {"count": 2}, "intra_op_thread_count"),
        ("python", "python", {"count": 2, "kind": "KIND_CPU"}, "intra_op_threads"),
    ],
)
def test_configurations_are_written(tmp_path, classifier, platform, backend, group, threads):
    path = build_repository(
        tmp_path / "deep" / "repository",
        {"top": classifier},
        platform=platform,
        max_batch_size=32,
        instances=2,
        threads=3,
        labels={"top": {"scores": ["qcd", "top"]}},
    )
    found = configuration(path, "top")
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


def test_each_output_has_a_file_of_labels(tmp_path):
    rows = ("float32", ["N", 1])
    outputs = {"a/b": rows, "a:b": rows, "a_b": rows}
    source = function(tmp_path / "f.py", "def f(x): return {}\n", outputs=outputs)
    labels = {"m": {name: [f"label of {name}"] for name in outputs}}
    folder = build_repository(tmp_path / "r", {"m": source}, labels=labels) / "m"
    for output in configuration(folder.parent)["output"]:
        text = (folder / output["label_filename"]).read_text()
        assert text == f"label of {output['name']}\n"


@pytest.mark.parametrize(
    ("shape", "rows"), [("N", 65_536), ("N, 8", 15_625), ("N, 17, 128", 1024), ("N, 3, L", 1024)]
)
def test_small_rows_raise_the_batch_size(tmp_path, shape, rows):
    file = identity(tmp_path / "m.onnx", shape)
    assert configuration(build_repository(tmp_path / "r", {"m": file}))["max_batch_size"] == rows


def test_files_in_place_of_dicts_or_repositories_are_named(tmp_path):
    file = identity(tmp_path / "m.onnx", "N, 8")
    with pytest.raises(ConfigError, match=r"a dict, such as \{'m': .*m.onnx"):
        build_repository(tmp_path / "r", file)
    with pytest.raises(
        ConfigError, match=r"no models; .*build_repository\('repository', {'m': .*m.onnx"
    ):
        read_repository(file)


# By name: type and shape, and what is sent. They are inputs of one model.
CASES = {
    "rows": ("float[N, 3]", np.ones((2, 3), "f4")),
    "doubles": ("double[N, 3]", np.ones((2, 3))),
    "integers": ("int64[N, 3, L]", np.arange(12).reshape(2, 3, 2)),
    "flags": ("bool[N, 2]", np.eye(2, dtype=bool)),
    "halves": ("float16[N, 2]", np.eye(2, dtype="f2")),
    "numbers": ("float[N]", np.array([[1.5], [2.5]], "f4")),
    "words": ("string[N, 2]", np.array([[b"a", b"bc"]] * 2, dtype=object)),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, serve):
    """Of a model of every type, one without rows, and one that fails on some rows."""
    folder = tmp_path_factory.mktemp("cases")
    inputs = ", ".join(f"{kind} {name}" for name, (kind, _) in CASES.items())
    outputs = ", ".join(f"{kind} {name}_out" for name, (kind, _) in CASES.items())
    nodes = "\n".join(f"{name}_out = Identity({name})" for name in CASES)
    models = {
        "every": save_onnx(folder / "every.onnx", f"({inputs}) => ({outputs}) {{ {nodes} }}"),
        "fixed": Served(identity(folder / "fixed.onnx", "4, 2"), max_batch_size=0),
    }
    table = save_onnx(
        folder / "table.onnx",
        """(int64[N, 1] x) => (float[N, 1] y) <float[5] table = {0, 1, 2, 3, 4}> {
            y = Gather(table, x)
        }""",
    )
    path = build_repository(folder / "r", models)
    together = {"preferred_batch_size": [20], "max_queue_delay_microseconds": 5_000_000}
    build_repository(path, {"table": table}, dynamic_batching=together, warmup=False)
    graph = "(float[N, 1] x) => (float[N, 1] y, float[N, 1] z) { y = Neg(x) z = Identity(x) }"
    both = save_onnx(folder / "both.onnx", graph)
    together = {**together, "preferred_batch_size": [2]}
    code = "def exits(x):\n    if (x > 1).any(): raise SystemExit('enough')\n    return {'y': x}\n"
    models = {"both": both, "exits": function(folder / "exits.py", code, width=1)}
    build_repository(path, models, dynamic_batching=together, warmup=False)
    with serve(path) as running:
        yield running


@pytest.fixture
def networks(tmp_path):
    """Return the files of a network, and of another one that cannot be a version of the same."""
    return [identity(tmp_path / f"{axis}.onnx", f"N, {axis}") for axis in ("2", "M")]


@pytest.mark.parametrize("options", [{"overwrite": True}, {"version": "next"}], ids=str)
def test_errors_leave_a_repository_as_it_was(tmp_path, networks, options):
    """The second model cannot be moved to its place, where a broken link is."""
    old, new = networks[0], networks["overwrite" in options]
    path = build_repository(tmp_path / "r", {"a": old})
    before = files(path)
    (path / "b").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot write the model repository"):
        build_repository(path, {"a": new, "b": new}, **options)
    assert files(path) == before
    assert sorted(p.name for p in path.iterdir()) == ["a", "b"]
    (path / "b").unlink()
    build_repository(path, {"a": new, "b": new}, **options)
    assert sorted(p.name for p in path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("method", ["rename", "replace"])
def test_ctrl_c_as_a_folder_is_moved_leaves_a_repository_as_it_was(
    tmp_path, networks, monkeypatch, method
):
    path = build_repository(tmp_path / "r", {"a": networks[0]})
    before, move = files(path), getattr(Path, method)
    with monkeypatch.context() as slow:

        def interrupted(place, target):
            slow.undo()
            move(place, target)
            raise KeyboardInterrupt

        slow.setattr(Path, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_repository(path, {"a": networks[1]}, overwrite=True)
    assert files(path) == before


@pytest.fixture
def before_copies(monkeypatch):
    """Return a function that takes what is to be done before each file is copied."""
    copy = shutil.copyfile

    def set_work(work):
        monkeypatch.setattr(shutil, "copyfile", lambda *files: [work(files[0]), copy(*files)][1])

    return set_work


def test_sources_that_are_replaced_as_they_are_copied_are_refused(
    tmp_path, networks, before_copies
):
    old, new = networks
    path = build_repository(tmp_path / "r", {"a": old})
    before = files(path)
    before_copies(lambda source: source == old and old.write_bytes(new.read_bytes()))
    with pytest.raises(ConfigError, match="'b' were replaced while they were copied"):
        build_repository(path, {"b": old})
    assert files(path) == before


def test_builds_go_on_when_others_in_the_same_repository_end(tmp_path, networks, before_copies):
    """Only models are left: Triton would not start with another folder."""
    path, first, second = tmp_path / "r", *networks
    copies, goes_on = threading.Event(), threading.Event()
    build = threading.Thread(target=build_repository, args=(path, {"a": first}))

    def in_turns(source):
        if source == first:
            copies.set()
            assert goes_on.wait(60)
        else:
            goes_on.set()
            build.join()

    before_copies(in_turns)
    build.start()
    assert copies.wait(60)
    build_repository(path, {"b": second})
    assert sorted(p.name for p in path.iterdir()) == ["a", "b"]


def test_repositories_may_be_on_another_file_system_than_their_parent(tmp_path):
    memory = Path("/dev/shm")  # noqa: S108
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    network = identity(tmp_path / "m.onnx", "N, 2")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = tmp_path / "r"
        path.symlink_to(folder)
        build_repository(path, {"a": network})
        build_repository(path, {"a": network, "b": network}, version=2, overwrite=True)
        assert sorted(p.name for p in path.iterdir()) == ["a", "b"]
        assert sorted(p.name for p in (path / "a").iterdir()) == ["1", "2", "config.pbtxt"]
        assert [p.name for p in tmp_path.iterdir()] == ["m.onnx", "r"]


def test_the_extra_that_reads_networks_is_named(tmp_path, classifier, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r'pip install "\.\[onnx\]"'):
        build_repository(tmp_path / "r", {"m": classifier})


@pytest.mark.parametrize("rows", [96, 1])
def test_networks_of_a_fixed_number_of_rows_are_refused(tmp_path, rows):
    """With what its exporter has to be told."""
    network = identity(tmp_path / "fixed.onnx", f"{rows}, 2")
    message = rf"input 'x' has .* fixed length, {rows}.*\[model m"
    with pytest.raises(ConfigError, match=message) as caught:
        build_repository(tmp_path / "r", {"m": network})
    assert "dynamic_axes={'x': {0: 'rows'}, 'y': {0: 'rows'}}" in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_every_shape_and_type_is_served(server):
    answer = infer(server, "every", **{name: sent for name, (_, sent) in CASES.items()})
    for name, (_, sent) in CASES.items():
        assert answer[f"{name}_out"].dtype == sent.dtype, name
        np.testing.assert_array_equal(answer[f"{name}_out"], sent, err_msg=name)
    whole = np.arange(8, dtype="f4").reshape(4, 2)
    np.testing.assert_array_equal(infer(server, "fixed", x=whole)["y"], whole)


def answers_of_one_batch(server, model, rows, outputs):
    """Send rows at the same time, each for one output; return the answers, or errors."""
    answers = {}
    with contextlib.closing(grpc_client.InferenceServerClient(server.url)) as client:
        for number, (row, output) in enumerate(zip(rows, outputs, strict=True)):
            tensor = grpc_client.InferInput("x", [1, 1], np_to_triton_dtype(row.dtype))
            tensor.set_data_from_numpy(row)

            def done(result, error, number=number):
                tensors = () if error else result.get_response().outputs
                answers[number] = error or {t.name: result.as_numpy(t.name).item() for t in tensors}

            asked = [grpc_client.InferRequestedOutput(output)]
            client.async_infer(model, [tensor], done, outputs=asked)

        def counted():
            return client.get_inference_statistics(model).model_stats[0]

        # Triton counts after it answers.
        until(lambda: len(answers) == counted().inference_count == len(rows))
        assert counted().execution_count == 1
    return [answers[number] for number in range(len(rows))]


def test_requests_of_one_batch_fail_alone_and_get_the_outputs_they_asked_for(server):
    """Of twenty look-ups, one is beyond the end of the table."""
    indices = [*range(5)] * 3 + [99] + [*range(4)]
    rows = [np.array([[index]]) for index in indices]
    for index, answer in zip(
        indices, answers_of_one_batch(server, "table", rows, ["y"] * 20), strict=True
    ):
        assert answer == {"y": index} if index < 99 else "out of data bounds" in str(answer)
    one = np.ones((1, 1), np.float32)
    assert answers_of_one_batch(server, "both", [one, one], ["y", "z"]) == [{"y": -1.0}, {"z": 1.0}]
    answer, error = answers_of_one_batch(server, "exits", [one, 2 * one], ["y", "y"])
    assert (answer, "SystemExit: enough" in str(error)) == ({"y": 1.0}, True)


def test_unchanged_models_are_not_written_again(tmp_path, classifier):
    file = tmp_path / "double.py"
    models = {
        "one": classifier,
        "double": function(file, "def double(x):\n    return {'y': 2 * x}\n"),
        "both": Ensemble(steps=[("double", {"x": "X"}, {"y": "Y"})]),
    }
    options = {"labels": {"one": ["a", "b"]}, "metadata": {"epochs": 3, "layers": (16, 2)}}
    path = build_repository(tmp_path / "r", models, **options)
    written = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}
    build_repository(path, models, **options)
    build_repository(path, {**models, "more": classifier}, **options)
    assert {p: p.stat().st_mtime_ns for p in written} == written

    def refused(models, name="one", **options):
        message = f"already has {name}, of other files or options; the option"
        with pytest.raises(ConfigError, match=message):
            build_repository(path, models, **options)

    for changed in ({"max_batch_size": 8}, {"labels": {}}, {"metadata": {}}):
        refused(models, **{**options, **changed})
    file.write_text("def double(x):\n    return {'y': x + x}\n")
    refused({**models, "new": classifier}, "double", **options)
    (path / "more" / "config.pbtxt").write_text("")
    refused({"more": classifier}, "more", metadata={"epochs": 3})
    build_repository(path, {"one": classifier}, version="next")
    refused({"one": classifier}, **options)
    assert sorted(p.name for p in path.iterdir()) == ["both", "double", "more", "one"]
    wide = identity(tmp_path / "wide.onnx", "N, 5")
    build_repository(path, {"one": wide}, overwrite=True)
    assert dims(configuration(path, "one")["input"][0]) == [5]
    assert [p.name for p in (path / "one").iterdir() if p.is_dir()] == ["1"]


def save_branch(path):
    """A network whose weights are those of branches."""
    graph = """(bool[N] x) => (float[1] y) {
        y = If(x) <
            then_branch = one () => (float[1] a) <float[1] first = {1}> { a = Identity(first) },
            else_branch = two () => (float[1] b) <float[1] second = {2}> { b = Identity(second) }
        >
    }"""
    network = onnx.load(save_onnx(path, graph))
    for branch in network.graph.node[0].attribute:
        (weight,) = branch.g.initializer
        # As bytes, which alone can be in another file.
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight), weight.name))
    onnx.save(network, path)
    return path


def test_paths_may_begin_with_the_home_directory(tmp_path, monkeypatch):
    """A folder called ~ would be a trap."""
    monkeypatch.setenv("HOME", str(tmp_path))
    identity(tmp_path / "m.onnx", "N, 8")
    model = sonic.Model.from_onnx("~/m.onnx", inputs={"x": [*"abcdefgh"]})
    assert build_repository("~/r", {"m": "~/m.onnx"}) == tmp_path / "r"
    assert [entry["model"] for entry in read_repository("~/r")] == ["m"]
    assert sonic.LocalServer("~/r").repository == tmp_path / "r"
    model.export(ak.Array([dict.fromkeys("abcdefgh", 1.0)]), "~/m.parquet", labels={})
    model.check_export("~/m.parquet")
    (tmp_path / "m.yaml").write_text(
        "{model: m, inputs: {x: {layout: Row, fields: [a]}}, outputs: {y: }}"
    )
    assert sonic.Model.from_yaml("~/m.yaml").name == "m"


@pytest.mark.parametrize("kind", ["plain", "branch"])
def test_external_weights_are_copied(tmp_path, classifier, kind):
    file, weights = tmp_path / "m.onnx", tmp_path / "m.weights"
    network = classifier if kind == "plain" else save_branch(tmp_path / "branch.onnx")
    options = {"save_as_external_data": True, "location": weights.name, "size_threshold": 0}
    onnx.save(onnx.load(str(network)), str(file), **options)
    path = build_repository(tmp_path / "r", {"m": file})
    assert (path / "m" / "1" / "m.weights").read_bytes() == weights.read_bytes()
    # Clients are told of other weights, too, by the checksum.
    weights.write_bytes(weights.read_bytes()[::-1])
    build_repository(path, {"n": file})
    first, other = (configuration(path, name)["parameters"]["sha256.1"] for name in ("m", "n"))
    assert first["string_value"] != other["string_value"]
    weights.unlink()
    with pytest.raises(ConfigError, match=r"expected the weights file 'm\.weights' beside"):
        build_repository(tmp_path / "s", {"m": file})
    weights.symlink_to(classifier)  # as in the folders of model hubs
    with pytest.raises(ConfigError, match="or a link that leads out of this folder; copy"):
        build_repository(tmp_path / "s", {"m": file})


def test_external_weights_are_copied_nowhere_else(tmp_path, classifier):
    """Beside the file, the link leads back; in the copy, where there is no link, it leads out."""
    folder = tmp_path / "of_a_stranger"
    (folder / "a" / "b" / "c" / "d").mkdir(parents=True)
    (folder / "link").symlink_to("a/b/c/d")
    name = "link/../../../../w"
    assert (folder / name).resolve() == folder / "w"
    options = {"save_as_external_data": True, "location": "w", "size_threshold": 0}
    network = onnx.load(str(classifier))
    onnx.save(network, str(folder / "m.onnx"), **options)
    file = folder / "m.onnx"
    network = onnx.load(str(file), load_external_data=False)
    for weight in network.graph.initializer:
        next(e for e in weight.external_data if e.key == "location").value = name
    file.write_bytes(network.SerializeToString())
    with pytest.raises(ConfigError, match="expected the weights file 'link/"):
        build_repository(tmp_path / "r", {"m": file})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {}, "expected a model name") for name in ("", "a/b", "..", "-x", "a b", "ä", 3)),
        *(("m", {"versions": each}, "expected versions as 'all'") for each in (1, "al", [])),
        *(("m", {"versions": [v]}, "each of versions to be an integer >= 1") for v in (0, "1")),
        (
            "m",
            {"labels": {"m": ["a", "b", "c"]}},
            r"expected 2 labels .* 'scores', got .'a', 'b', 'c'.*\[model m",
        ),
        ("m", {"labels": {"m": {"score": ["a", "b"]}}}, "did you mean 'scores'"),
        ("m", {"labels": {"n": ["a", "b"]}}, "a model that is not built: 'n'"),
        ("m", {"labels": {"m": "ab"}}, "mapping of output name to labels"),
        ("m", {"labels": {"m": ["a\rb", "c"]}}, r"without line breaks, got \['a\\rb', 'c'\]"),
        ("m", {"labels": {"m": ["a\nb", "c"]}}, r"without line breaks, got \['a\\nb', 'c'\]"),
        ("m", {"labels": ["a", "b"]}, "labels as a mapping of model name to labels, got .'a', 'b'"),
        *(
            ("m", {"labels": {"m": {"scores": names}}}, "'scores' as a list of names")
            for names in (None, 3, "ab", {"a"}, [1, 2])
        ),
        ("m", {"max_batch_size": -1}, r"max_batch_size to be an integer >= 0, got -1 \[model m"),
        ("m", {"instances": 0}, "instances to be an integer >= 1"),
        ("m", {"threads": 0}, "threads to be an integer >= 1"),
        (
            "m",
            {"platform": "tensorrt"},
            r"platform 'tensorrt' cannot run a model of kind onnx.*\[model m",
        ),
        ("m", {"dynamic_batching": {"prefered": [1]}}, 'no field named "prefered"'),
        *(("m", {"dynamic_batching": v}, "dynamic_batching as True, False") for v in ("yes", 1)),
        ("m", {"metadata": {"model": len}}, "metadata that JSON can hold"),
    ],
    ids=str,
)
def test_impossible_names_and_options_are_refused(tmp_path, classifier, name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_repository(tmp_path / "r", {name: classifier}, **options)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(("names", "stacked"), [("NN", True), ("TN", False)])
def test_graphs_are_not_stacked(tmp_path, names, stacked):
    first, second = (f"float[{rows}, 2]" for rows in names)
    nodes = "ya = Identity(xa) yb = Identity(xb)"
    graph = f"({first} xa, {second} xb) => ({first} ya, {second} yb) {{ {nodes} }}"
    file = save_onnx(tmp_path / "m.onnx", graph)
    found = configuration(build_repository(tmp_path / "r", {"m": file}))
    assert (found.get("max_batch_size", 0) > 0) == stacked
    assert dims(found["input"][0]) == ([2] if stacked else [-1, 2])


def test_unusable_files_and_places_leave_nothing(tmp_path, classifier):
    unreadable = function(
        tmp_path / "f.py", "def f(x): return {'y': x}\n", files=["/proc/self/mem"]
    )
    for place, model, message in (
        ("r", unreadable, "cannot write the model repository .*/r: "),
        ("f.py/r", classifier, "cannot write .*Not a directory"),
        ("r", tmp_path / "none.onnx", r"No such file.*\[model bad"),
    ):
        with pytest.raises(ConfigError, match=message) as e:
            build_repository(tmp_path / place, {"good": classifier, "bad": model})
        # Coffea takes an OSError in the chain of causes for a broken file and skips the chunk.
        assert e.value.__cause__ is None
        assert [path.name for path in tmp_path.iterdir()] == ["f.py"]


STEPS = """
import numpy as np

def scale(raw):
    return {"features": (raw / np.float32(10)).astype("float32")}

def calibrate(scores, sum):
    return {"prob": scores[:, 1] ** 2 * sum}

def total(raw):
    return {"sum": raw.sum(axis=1)}
"""
CHAIN = [
    ("scale", {"raw": "RAW"}, {"features": "X"}),
    ("total", {"raw": "RAW"}, {"sum": "SUM"}),
    ("network", {"x": "X"}, {"scores": "S"}),
    ("calibration", {"scores": "S", "sum": "SUM"}, {"prob": "PROB"}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory, classifier):
    file = tmp_path_factory.mktemp("steps") / "steps.py"
    file.write_text(STEPS)

    def step(name, inputs, outputs):
        return Served(f"{file}:{name}", inputs=inputs, outputs=outputs)

    raw, number = {"raw": ("float32", ["N", 8])}, ("float32", ["N"])
    return {
        "scale": step("scale", raw, {"features": ("float32", ["N", 8])}),
        "total": step("total", raw, {"sum": number}),
        "network": classifier,
        "calibration": step(
            "calibrate", {"scores": ("float32", ["N", 2]), "sum": number}, {"prob": number}
        ),
    }


@pytest.fixture(scope="module")
def ensembles(tmp_path_factory, models, serve):
    """Of two ensembles, one of them with a step that is not batched."""
    folder = tmp_path_factory.mktemp("ensembles")
    (folder / "f.py").write_text("def f(a, b): return {'y': a.sum() + b.sum(axis=0)}\n")
    fold = Served(
        f"{folder}/f.py:f",
        inputs={"a": ("float32", [-1, 2]), "b": ("float32", [-1, 8])},
        outputs={"y": ("float32", [8])},
    )
    steps = [
        ("network", {"x": "RAW"}, {"scores": "S"}),
        ("fold", {"a": "S", "b": "RAW"}, {"y": "Y"}),
    ]
    # Declared before what they are made of, part of which is there already.
    path = build_repository(folder / "r", {k: v for k, v in models.items() if k == "scale"})
    rest = {k: v for k, v in models.items() if k != "scale"}
    ensembles = {"chain": Ensemble(steps=CHAIN), "folding": Ensemble(steps=steps)}
    build_repository(path, {**ensembles, **rest, "fold": fold}, max_batch_size=64)
    with serve(path) as running:
        yield running


def test_ensembles_answer_as_their_steps_in_turn(ensembles, classifier):
    config = configuration(ensembles.repository, "chain")
    assert config["max_batch_size"] == 64
    raw = np.random.default_rng(1).normal(size=(50, 8)).astype("f4")
    answer = infer(ensembles, "chain", RAW=raw)
    session = onnxruntime.InferenceSession(str(classifier))
    (scores,) = session.run(["scores"], {"x": raw / np.float32(10)})
    assert list(answer) == ["PROB"]
    np.testing.assert_allclose(
        answer["PROB"].ravel(), scores[:, 1] ** 2 * raw.sum(axis=1), rtol=1e-5
    )


def test_steps_without_batching_see_whole_requests(ensembles):
    raw = np.arange(24, dtype="f4").reshape(3, 8)
    answer = infer(ensembles, "folding", RAW=raw)
    # The two scores of each row add up to one.
    np.testing.assert_allclose(answer["Y"], 3 + raw.sum(axis=0), rtol=1e-6)


def changed(index, step):
    return [step if i == index else s for i, s in enumerate(CHAIN)]


@pytest.mark.parametrize(
    ("ensemble", "message"),
    [
        ({"steps": []}, r"expected steps with a tensor to begin and .*\[model chain"),
        ({"steps": [("scale", "RAW")]}, "expected steps as"),
        (
            {"steps": changed(2, ("netwrk", {"x": "X"}, {"scores": "S"}))},
            "no model is called 'netwrk'; did you mean 'network'",
        ),
        (
            {"steps": changed(2, ("network", {"x": "X"}, {"score": "S"}))},
            "no output of 'network' is called 'score'; did you mean 'scores'",
        ),
        ({"steps": CHAIN, "inputs": ["RAWW"]}, "no input .* is called 'RAWW'; did you mean 'RAW'"),
        ({"steps": CHAIN, "outputs": ["PROBE"]}, "no output .* is called 'PROBE'; did you mean"),
    ],
)
def test_unknown_tensors_of_ensembles_are_named(tmp_path, models, ensemble, message):
    with pytest.raises(ConfigError, match=message):
        build_repository(tmp_path / "r", {**models, "chain": Ensemble(**ensemble)})
    assert list(tmp_path.iterdir()) == []


def times(path, factor, *, features=2):
    """y = factor * x, so that a version can be told by its answer."""
    rows = f"float[N, {features}]"
    return save_onnx(
        path, f"({rows} x) => ({rows} y) <float factor = {{{factor}}}> {{ y = Mul(x, factor) }}"
    )


def model(version=None):
    return sonic.Model("m", {"x": sonic.Row(["a", "b"])}, {"y": ["a", "b"]}, version=version)


def test_versions_are_added_while_rows_are_scored(tmp_path, serve):
    repository = build_repository(tmp_path / "r", {"m": times(tmp_path / "a.onnx", 1.0)})
    jets = ak.Array([[{"a": 1.0, "b": 2.0}] * 3, [], [{"a": 3.0, "b": 4.0}]] * 50)
    sent = ak.flatten(jets).a.to_numpy()
    server = serve(repository, poll=True)
    seen = set()

    def factors():
        model().check()  # a pool that is never idle asks again only then
        scores = model()(jets)
        made_by = scores.attrs["sonic"]
        config = configuration(repository)
        digest = config["parameters"].get(f"sha256.{made_by['version']}", {}).get("string_value")
        assert made_by["digest"] in (None, digest)
        assert ak.num(scores).tolist() == ak.num(jets).tolist()
        got = ak.flatten(scores).a.to_numpy() / sent
        # A call that is out when the version comes may see both, never anything else.
        assert set(got.tolist()) <= {1.0, 2.0}
        seen.update(got.tolist())
        return seen

    with server, sonic.connect(server, retry_timeout_s=1e-3):
        assert factors() == {1.0}
        build_repository(repository, {"m": times(tmp_path / "b.onnx", 2.0)}, version="next")
        try:
            until(lambda: factors() == {1.0, 2.0}, what="the second version")
        except ServerLostError:
            # Seen once in fifty runs on a busy machine: Triton itself ends as it loads the version.
            until(lambda: not server.running, 5, what="the end of Triton, which lost the rows")
            pytest.skip(f"Triton ended by itself: {server.logs[-1000:]}")
        server.wait_for("m", 2)
        assert model()(jets).a.tolist() == (jets.a * 2).tolist()
        assert model(version=1)(jets).a.tolist() == jets.a.tolist()
        assert model(version=2)(jets).a.tolist() == (jets.a * 2).tolist()
        states = {(m.version, m.state) for m in server.metadata.models}
        assert states == {("1", "READY"), ("2", "READY")}
        with pytest.raises(ModelNotFoundError, match=r"after 0 s; the server says: nothing"):
            server.wait_for("n", timeout_s=0)
        # A server that stands still answers later.
        os.kill(server.pid, signal.SIGSTOP)
        going_on = threading.Timer(5.5, os.kill, (server.pid, signal.SIGCONT))
        going_on.start()
        server.wait_for("m")
        going_on.join()  # it may have answered just before it stood still
    with pytest.raises(ServerError, match="expected a running server"):
        server.wait_for("m")


@pytest.mark.parametrize(("version", "written"), [(None, "m"), ("next", "m/2")])
def test_what_another_process_builds_at_the_same_time_is_left_as_it_is(
    tmp_path, before_copies, version, written
):
    one, theirs, ours = (times(tmp_path / f"{i}.onnx", i) for i in (1, 2, 3))
    path, others = tmp_path / "r", [theirs]
    if version:
        build_repository(path, {"m": one})
    before_copies(lambda _: others and build_repository(path, {"m": others.pop()}, version=version))
    with pytest.raises(ConfigError, match=f"another process has just written .*/{written}"):
        build_repository(path, {"m": ours}, version=version)
    *_, last = read_repository(path)
    assert (path / "m" / str(last["version"]) / "model.onnx").read_bytes() == theirs.read_bytes()
    assert last["changes"] == []
    build_repository(path, {"m": ours}, version="next")
    assert read_repository(path)[-1]["version"] == last["version"] + 1


def test_new_versions_leave_the_others_as_they_are(tmp_path):
    one, two, wide = (
        times(tmp_path / f"{i}.onnx", i, features=n) for i, n in ((1, 2), (2, 2), (3, 5))
    )
    path = build_repository(tmp_path / "r", {"m": one, "n": one}, labels={"m": ["p", "q"]})
    before = files(path / "m" / "1")
    build_repository(path, {"m": two}, version="next")
    build_repository(path, {"m": two}, version=7)
    assert files(path / "m" / "1") == before
    assert sorted(p.name for p in (path / "m").iterdir() if p.is_dir()) == ["1", "2", "7"]
    config = configuration(path)
    assert config["version_policy"] == {"all": {}}
    assert set(config["parameters"]) == {"sha256.1", "sha256.2", "sha256.7"}
    assert config["output"][0]["label_filename"] == "y_labels.txt"
    assert [entry["changes"] for entry in read_repository(path)] == [[]] * 4

    with pytest.raises(ConfigError, match=r"already has version 7; the option overwrite replaces"):
        build_repository(path, {"m": one}, version=7)
    with pytest.raises(ConfigError, match=r"'x' is .*\[5\].*, there it is .*\[2\]"):
        build_repository(path, {"m": wide}, version="next")
    with pytest.raises(ConfigError, match="labels are those of all versions"):
        build_repository(path, {"m": two}, version="next", labels={"m": ["p", "q"]})
    with pytest.raises(ConfigError, match="there it is onnxruntime"):
        build_repository(path, {"m": two}, version="next", platform="python")
    with pytest.raises(ConfigError, match="unless 'next', to be an integer >= 1, got 'latest'"):
        build_repository(path, {"m": two}, version="latest")
    assert files(path / "m" / "1") == before

    build_repository(path, {"m": one}, version=7, versions=[1, 7], overwrite=True)
    config = configuration(path)
    assert config["version_policy"] == {"specific": {"versions": ["1", "7"]}}
    assert (path / "m" / "7" / "model.onnx").read_bytes() == one.read_bytes()
    assert files(path / "m" / "1") == before
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["r"]


def test_new_versions_have_the_inputs_of_the_others_whatever_outputs_are_called(tmp_path):
    rows, wide = (("float32", ["N", width]) for width in (2, 5))
    one, other = (
        function(tmp_path / "f.py", "def f(x): return {}\n", inputs={"x": x}, outputs={"x": rows})
        for x in (rows, wide)
    )
    path = build_repository(tmp_path / "r", {"m": one})
    with pytest.raises(ConfigError, match=r"input 'x' is .*\[5\].*, there it is .*\[2\]"):
        build_repository(path, {"m": other}, version="next")


def test_models_without_a_configuration_get_no_version(tmp_path):
    file = times(tmp_path / "a.onnx", 1)
    (tmp_path / "r" / "m" / "1").mkdir(parents=True)
    for message in ("expected a model configuration in", "no field named"):
        with pytest.raises(ConfigError, match=message):
            build_repository(tmp_path / "r", {"m": file}, version="next")
        (tmp_path / "r" / "m" / "config.pbtxt").write_text("nam: 1")
    build_repository(tmp_path / "r", {"n": file})


def test_the_first_version_need_not_be_one(tmp_path):
    file = times(tmp_path / "a.onnx", 1)
    path = build_repository(tmp_path / "r", {"m": file}, version=3, versions="latest")
    build_repository(path, {"n": file}, version="next")
    assert [(e["model"], e["version"]) for e in read_repository(path)] == [("m", 3), ("n", 1)]
    config = configuration(path)
    assert config["version_policy"] == {"latest": {"num_versions": 1}}


def test_the_manifest_says_where_a_version_comes_from(tmp_path):
    file = times(tmp_path / "a.onnx", 1)
    path = build_repository(tmp_path / "r", {"m": file}, metadata={"auc": 0.93, "epochs": 20})
    manifest = json.loads((path / "m" / "1" / "sonic-manifest.json").read_text())
    assert manifest["metadata"] == {"auc": 0.93, "epochs": 20}
    assert manifest["source"] == str(file)
    assert manifest["user"] == getpass.getuser()
    assert manifest["package"] == f"sonic-coffea {sonic.__version__}"
    assert set(manifest["files"]) == {"model.onnx"}
    build_repository(path, {"m": file}, record_user=False, overwrite=True)
    manifest = json.loads((path / "m" / "1" / "sonic-manifest.json").read_text())
    assert manifest["source"] == "a.onnx"
    assert "user" not in manifest


def test_models_without_a_manifest_are_listed(tmp_path):
    (tmp_path / "r" / "m" / "4").mkdir(parents=True)
    (entry,) = read_repository(tmp_path / "r")
    assert entry == {"model": "m", "version": 4, "changes": []}
