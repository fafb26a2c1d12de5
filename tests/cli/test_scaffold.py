"""Declarations written from what a server says."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
from tests.commands import json_of, run

import sonic_coffea as sonic
from sonic_coffea import errors, tools
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer

FIELDS = ["a", "b", "c"]
MODELS = {
    "weaver": sonic.Model(
        "weaver",
        {
            "pf_features": sonic.Bucketed(FIELDS, (16, 32)),
            "pf_mask": sonic.Mask(beside="pf_features"),
            "sv_features": sonic.Bucketed(FIELDS, (1, 4), axis_order="LF"),
            "sv_mask": sonic.Mask(beside="sv_features"),
            "jet_features": sonic.Row(FIELDS[:2], axis_order="FL"),
        },
        {"softmax": [f"a label of {k}" for k in range(20)]},
    ),
    "fixed": sonic.Model(
        "fixed",
        {
            "long_features": sonic.Padded([f"variable_{k}" for k in range(30)], 7),
            "long_mask": sonic.Mask(7, beside="long_features"),
            "row": sonic.Row(FIELDS, dtype="float16"),
            "token": sonic.Row(FIELDS, axis_order="LF"),
            "image": sonic.Dense("image", shape=(1, 4, 4)),
            "one": sonic.Row("one", axis_order="", dtype="int64"),
            "words": sonic.Row(FIELDS, dtype="string"),
            "names": sonic.Padded(FIELDS[:2], 7, dtype="string"),
        },
        {"number": None, "which": sonic.Output(["a", "b"], "int64")},
    ),
    "orders": sonic.Model(
        "orders",
        {
            "Jet_data": sonic.Padded([*FIELDS, *FIELDS, "d"], 7, axis_order="LF"),
            "Jet_mask": sonic.Mask(7, beside="Jet_data", axis_order="L", dtype="bool"),
            "track_data": sonic.Bucketed("a", (2, 4), axis_order="L"),
            "track_mask": sonic.Mask(beside="track_data", axis_order="LF"),
            "pairs": sonic.Pairwise(["px", "py", "pz", "energy"], 5),
        },
        {"y": None},
    ),
}


@pytest.fixture(scope="module")
def server() -> Any:
    with FakeServer({name: FakeModel.of(model) for name, model in MODELS.items()}) as running:
        yield running


def declared(text: str) -> sonic.Model:
    """Return what the text of a declaration makes."""
    names: dict[str, Any] = {}
    exec(text, names)  # noqa: S102
    model = names["model"]
    assert isinstance(model, sonic.Model)
    return model


@pytest.mark.parametrize("name", list(MODELS))
def test_printed_declarations_fit(server: FakeServer, name: str) -> None:
    text = run("scaffold", server.url, name).stdout
    said = "# FP32 [N, ?, 3]: 3 fields of each constituent, of any length"
    assert (said in text) == (name == "weaver")
    model = declared(text)
    assert list(model.inputs) == list(MODELS[name].inputs)
    for tensor, layout in model.inputs.items():
        expected = MODELS[name].inputs[tensor]
        assert type(layout) is type(expected)
        assert getattr(layout, "beside", None) == getattr(expected, "beside", None)
    with sonic.connect(server.url):
        model.check()


def test_printed_declarations_score(tmp_path: Path) -> None:
    model = sonic.Model("m", {"x": sonic.Row(["pt", "mass"])}, {"y": ["a", "b"]})
    with FakeServer({"m": FakeModel.of(model, lambda inputs: {"y": inputs["x"]})}) as fake:
        text = json_of("scaffold", fake.url, "m")["declaration"]
        (tmp_path / "analysis.py").write_text(
            text.replace("field_1", "pt").replace("field_2", "eta")
        )
        arguments = ["--declare", "analysis:model", "--collection", "FatJet", "--keep", "pt"]
        arguments += [DATA / "QCD_1.root", "-o", "s.parquet", "--server", fake.url]
        json_of("score", *arguments, cwd=tmp_path)
        wrong = run("score", *arguments, "--declare", "analysis:sonic", cwd=tmp_path)
        assert wrong.stderr == (
            "error: --declare: expected a Model or a processor's models, got 'module'\n"
        )
        (tmp_path / "m.yaml").write_text(
            "{model: m, inputs: {x: {layout: Row, fields: [pt]}}, outputs: {y: [a]}}"
        )
        against = run("check", fake.url, "m", "--declare", "m.yaml", cwd=tmp_path)
        assert "✗ declaration of m: " in against.stdout
    scores = ak.from_parquet(tmp_path / "s.parquet")
    assert scores.label_1.tolist() == scores.pt.tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weavr", "did you mean 'weaver'"),
        ("weaver", "does not list what the model takes and gives"),
    ],
)
def test_models_that_cannot_be_declared_are_named(name: str, message: str) -> None:
    unlisted = FakeModel.of(MODELS["weaver"], lists_tensors=False)
    with FakeServer({"weaver": unlisted}) as server:
        done = run("scaffold", server.url, name)
    assert done.returncode == 1
    assert message in done.stderr


def test_errors_show_the_declaration_that_would_fit(server: FakeServer) -> None:
    pt = sonic.Feature("pt", scale=0.1)
    wrong = sonic.Model(
        "weaver",
        {
            "pf_features": sonic.Bucketed([pt, "eta"], (16, 32)),
            "pf_masks": sonic.Mask(beside="pf_features"),
            "sv_features": sonic.Bucketed(FIELDS, (1, 4)),
            "sv_mask": sonic.Mask(beside="sv_features"),
            "jet_features": sonic.Row(["a", ("Jet.PT",)]),
        },
        {"softmax": ["a", "b"], "mass": None},
    )
    with sonic.connect(server.url), pytest.raises(errors.ContractError) as caught:
        wrong.check()
    fits = " ".join(str(caught.value).partition("what would fit:\n")[2].split())
    for line in (
        """"pf_features": sonic.Bucketed([sonic.Feature('pt', scale=0.1), "eta", "field_3"],""",
        '"pf_mask": sonic.Mask(beside="pf_features"),',
        '"sv_features": sonic.Bucketed(["a", "b", "c"], (16, 32, 64, 128), axis_order="LF"),',
        """"jet_features": sonic.Row(["a", sonic.Feature(('Jet.PT',))], axis_order="FL"),""",
        '"softmax": ["a", "b", "label_3",',
    ):
        assert line in fits


class Described(FakeServer):
    """A server that describes its model as it likes, by what changes an answer of a method."""

    def __init__(self, **changes: Any) -> None:
        configured = ("model_configuration",) if "ModelConfig" in changes else ()
        super().__init__({"m": PLAIN}, extensions=configured)
        self.changes = changes

    def answer(self, method: str, request: Any, context: Any) -> Any:
        answer = super().answer(method, request, context)
        self.changes.get(method, lambda _: None)(answer)
        return answer


PLAIN = FakeModel.of(sonic.Model("m", {"x": sonic.Row(FIELDS)}, {"y": FIELDS}))


@pytest.mark.parametrize("end", ["\n", "\r", "\x0c", "\u2028"])
def test_declarations_hold_no_code_of_the_server(end: str) -> None:
    code = f"1{end}raise SystemExit{end}#\u202e"

    def metadata(answer: Any) -> None:
        answer.versions[:] = [code]
        for tensor in (*answer.inputs, *answer.outputs):
            tensor.name = tensor.datatype = code

    with Described(ModelMetadata=metadata) as server:
        text = tools.scaffold(server.url, "m")
    tree = ast.parse(text)
    assert [type(line) for line in tree.body] == [ast.Import, ast.Assign]
    assert text.replace("\n", "").isprintable()
    assert code in [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]


@pytest.mark.parametrize("shape", [(20_000,), (3, 2**40)])
def test_tensors_of_any_size_are_declared(shape: tuple[int, ...]) -> None:
    sized = FakeModel(
        inputs={"x": (np.float32, shape)},
        outputs={"y": (np.float32, shape[:1])},
        function=lambda inputs: inputs,
    )
    with FakeServer({"m": sized}) as server, sonic.connect(server.url):
        text = tools.scaffold(server.url, "m")
        with pytest.raises(errors.ContractError) as caught:
            sonic.Model("m", {"x": sonic.Row(FIELDS)}, {"y": ["a"]}).check()
        *_, tried = tools.check(server.url, "m")
    assert len(text) < 1000
    assert len(str(caught.value)) < 2000
    assert ("holds less than 2 GiB" in tried.detail) == (len(shape) > 1)
    assert declared(text).inputs["x"].row_shape(-1) == shape


def test_descriptions_that_make_no_sense_are_errors_of_the_server() -> None:
    def unknown(answer: Any) -> None:
        answer.config.input.add(name="x", data_type=99)

    with Described(ModelConfig=unknown) as server:
        with pytest.raises(errors.ResponseError, match="no name defined for value 99"):
            tools.scaffold(server.url, "m")
        assert [step.ok for step in tools.check(server.url, "m")] == [True, True, False]


@pytest.mark.parametrize(
    ("raw", "label"),
    [
        (b"\x09\0\0\x000.5:0:top", "top"),
        (b"\x0b\0\0\x000.5:99:top..", "label_1"),
        (b"\x0a\0\0\x000.5:\xc2\xb2:top", "label_1"),
        (b"\xff\xff\xff\xff", "label_1"),
        (b"", "label_1"),
    ],
)
def test_labels_that_make_no_sense_are_left_to_be_filled_in(raw: bytes, label: str) -> None:
    def labelled(answer: Any) -> None:
        answer.config.output.add(name="y", data_type=11, dims=[3], label_filename="labels.txt")

    def classes(answer: Any) -> None:
        answer.raw_output_contents[:] = [raw]

    with Described(ModelConfig=labelled, ModelInfer=classes) as server:
        text = tools.scaffold(server.url, "m")
    assert declared(text).outputs["y"].labels == (label, "label_2", "label_3")
