"""Models on dask-awkward arrays; these tests have an environment of their own."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from typing import Any

import awkward as ak
import cloudpickle
import dask
import dask_awkward as dak
import pytest
from distributed import Client
from tests.doubling import Doubling, multiplier
from tests.nanoaod import sample

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer


@pytest.fixture(scope="module")
def events(jets: ak.Array) -> ak.Array:
    """The jets, with columns that no model needs."""
    ht = ak.fill_none(ak.sum(jets.pt, axis=2), 0)
    constituents = ak.with_field(jets, jets.pt * 2, "mass")
    return ak.zip({"pf": constituents, "ht": ht, "other": ht}, depth_limit=2)


@pytest.fixture(scope="module")
def lazy(events: ak.Array, as_lazy: Any) -> Any:
    return as_lazy(ak.zip({"jets": events}, depth_limit=1), 300)


INPUTS = {"features": sonic.Padded(["pf.pt", "pf.eta"], 8), "mask": sonic.Mask(8)}
MODEL = sonic.Model("tagger", INPUTS, {"scores": ["qcd", "top"]})
WEIGHTS = sonic.Model(
    "tagger",
    INPUTS,
    {"scores": ["qcd", "top"], "weights": sonic.Output(["a", "b"], per="constituent")},
)


@pytest.fixture
def uncontacted() -> Iterator[str]:
    """The URL of the default server, which nothing may contact."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        with dask.config.set({"sonic.servers": url}):
            yield url
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_graphs_are_built_without_a_server(lazy: Any, uncontacted: str) -> None:
    with sonic.connect(uncontacted):
        scores = MODEL(lazy.jets)
    assert isinstance(scores, dak.Array)
    assert scores.npartitions == lazy.npartitions
    assert str(scores._meta.type) == "## * var * ?{qcd: float32, top: float32}"
    assert scores.top.ndim == 2
    needed = {"jets.pf.pt", "jets.pf.eta"}
    assert _columns(scores.top) == needed
    assert _columns(MODEL(lazy.jets[lazy.jets.ht > 1])) == {*needed, "jets.ht"}


def _columns(array: Any) -> set[str]:
    (columns,) = dak.report_necessary_columns(array).values()
    return set(columns)


def test_several_outputs_and_attaching(server: sonic.LocalServer, lazy: Any) -> None:
    with sonic.connect(server):
        jets = lazy.jets
        jets["found"] = WEIGHTS(jets)
        kept = jets[jets.found.scores.top > 0.5]
        assert _columns(kept.found.weights.a) == {"jets.pf.pt", "jets.pf.eta"}
        lazily = kept.found.weights.a.compute(scheduler="sync")
        whole = lazy.jets.compute(scheduler="sync")
        eager = WEIGHTS(whole)
        expected = eager.weights.a[ak.fill_none(eager.scores.top > 0.5, value=False)]
        assert ak.to_list(ak.drop_none(lazily)) == ak.to_list(ak.drop_none(expected))


def test_on_worker_processes(
    server: sonic.LocalServer, client: Client, lazy: Any, events: ak.Array
) -> None:
    with sonic.connect(server, client=client):
        scores = client.compute(MODEL(lazy.jets)).result()
        assert ak.array_equal(scores, MODEL(events), dtype_exact=True)


def test_equal_declarations_are_the_same_task(lazy: Any) -> None:
    assert MODEL(lazy.jets).name == MODEL(lazy.jets).name
    assert MODEL(lazy.jets).name != WEIGHTS(lazy.jets).name
    assert MODEL(lazy.jets).name != MODEL(lazy.jets[lazy.jets.ht > 1]).name
    keys = set()
    for port in (1, 2):  # what is persisted is of its servers
        with sonic.connect(f"grpc://127.0.0.1:{port}"):
            keys.update(MODEL(lazy.jets).name for _ in range(2))
    assert len(keys) == 2


def test_scores_are_those_of_the_model_as_it_was() -> None:
    model = sonic.Model("once", {"x": sonic.Row("pt")}, {"y": ["a"]})
    once = FakeModel.of(model, lambda inputs: {"y": inputs["x"]})
    twice = FakeModel.of(model, lambda inputs: {"y": 2 * inputs["x"]})
    jets = dak.from_awkward(ak.Array([{"pt": 1.0}, {"pt": 2.0}]), 1)
    with FakeServer({"once": once, "twice": twice}) as server, sonic.connect(server.url):
        scores = [model(jets).a]
        model.inputs["x"] = sonic.Row(sonic.Feature("pt", scale=10.0))
        scores += [model(jets).a]
        model.name = "twice"
        each = dask.compute(*scores, model(jets).a, scheduler="sync")
    assert [one.tolist() for one in each] == [[1.0, 2.0], [10.0, 20.0], [20.0, 40.0]]


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_scores_are_of_the_servers_that_the_model_was_called_with(scheduler: str) -> None:
    """Whatever is connected where, and in the thread by which, a partition is computed."""
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["a"]})
    twice = FakeModel.of(model, lambda inputs: {"y": 2 * inputs["x"]})
    thrice = FakeModel.of(model, lambda inputs: {"y": 3 * inputs["x"]})
    jets = dak.from_awkward(ak.Array([{"pt": 1.0}, {"pt": 2.0}]), 2)
    with FakeServer({"m": twice}) as one, FakeServer({"m": thrice}) as other:
        with sonic.connect(one.url):
            outer = model(jets).a
            with sonic.connect(other.url) as pool:
                inner = model(jets).a
                each = dask.compute(outer, inner, scheduler=scheduler)
            given = model(jets, pool=pool).a
        later = dask.compute(outer, inner, scheduler=scheduler)
        assert dask.compute(given, scheduler=scheduler)[0].tolist() == [3.0, 6.0]
    assert [scores.tolist() for scores in (*each, *later)] == 2 * [[2.0, 4.0], [3.0, 6.0]]


def test_lazy_arrays_that_are_pickled_with_others_connected_need_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are to keep their servers, unlike global models of a notebook's class."""
    jets = dak.from_awkward(ak.Array([{"pt": 1.0}]), 1)
    with multiplier(2) as one, multiplier(3) as other:
        with sonic.connect(one.url):
            pickle.dumps(Doubling.models["m"])
            scores = Doubling.models["m"](jets).twice
        with sonic.connect(other.url):
            sent = cloudpickle.loads(cloudpickle.dumps(dict(scores.__dask_graph__())))
            (computed,) = dask.get(sent, scores.__dask_keys__())
    assert computed.tolist() == [2]
    assert "as its pickle says" not in caplog.text


def test_models_that_change_servers_are_another_task() -> None:
    jets, models = dak.from_awkward(ak.Array([{"pt": 1.0}]), 1), []
    with multiplier(2) as one, multiplier(3) as other:
        for server in (one, other):
            with sonic.connect(server.url):
                models.append(pickle.loads(pickle.dumps(Doubling.models["m"])))
        each = [sonic.Folds(order, fold="pt - 1")(jets).twice for order in (models, models[::-1])]
        scores = dask.compute(*each, scheduler="sync")
    assert [of_one.tolist() for of_one in scores] == [[2], [3]]


@pytest.mark.parametrize("folds", [False, True], ids=["model", "folds"])
def test_classes_of_notebooks_use_the_servers_that_are_connected(*, folds: bool) -> None:
    """Also where an earlier run has unpickled the class, and its models with it."""
    model = Doubling.models["m"]

    class Local(Doubling):
        models = {"m": sonic.Folds([model, model], fold=None) if folds else model}  # noqa: RUF012

        def produce(self, events: Any, scores: Any) -> Any:
            return scores["m"].twice

    jets = ak.Array([{"pt": 1.0}])
    for factor in (2, 3):
        with multiplier(factor) as server, sonic.connect(server.url):
            assert Local().process(dak.from_awkward(jets, 1)).compute().tolist() == [factor]
            cloudpickle.loads(cloudpickle.dumps(Local())).process(jets)


def test_arrays_that_change_names_are_another_task() -> None:
    inputs = {name: sonic.Row("x") for name in ("first", "second")}
    model = sonic.Model("m", inputs, {"y": ["difference"]})
    one, other = (dak.from_awkward(ak.Array({"x": numbers}), 1) for numbers in ([3.0], [1.0]))

    def difference(tensors: Any) -> dict[str, Any]:
        return {"y": tensors["first"] - tensors["second"]}

    with FakeServer({"m": FakeModel.of(model, difference)}) as server, sonic.connect(server.url):
        swapped = [{"first": one, "second": other}, {"second": one, "first": other}]
        scores = dask.compute(*map(model, swapped))
    assert [each.difference.tolist() for each in scores] == [[2.0], [-2.0]]


def test_wrong_inputs_are_named_when_the_graph_is_built(lazy: Any) -> None:
    model = sonic.Model("tagger", {"x": sonic.Padded(["pf.ptt"], 8)}, {"scores": ["a"]})
    with pytest.raises(errors.FieldError, match="no field 'ptt'.*did you mean 'pt'"):
        model(lazy.jets)
    flat = sonic.Model("tagger", {"x": sonic.Padded(["ht"], 8)}, {"scores": ["a"]})
    with pytest.raises(errors.InputError, match="'ht' has one number where a list is needed"):
        flat({"ht": dak.sum(lazy.jets.ht, axis=1)})
    with pytest.raises(errors.InputError, match="'other' is not lazy"):
        MODEL({"pf": lazy.jets.pf, "other": ak.Array([1])})
    with pytest.raises(errors.InputError, match="'the objects' is not lazy"):
        MODEL(lazy.jets.compute(scheduler="sync"), mask=lazy.jets.ht > 1)
    with pytest.raises(errors.ConfigError, match="expected pool to be what sonic.connect returns"):
        MODEL(lazy.jets, pool="grpc://127.0.0.1:9")


def test_failures_of_a_partition_say_what_failed(lazy: Any) -> None:
    with (
        sonic.connect("grpc://127.0.0.1:9", retry_timeout_s=0.1),
        pytest.raises(errors.ServerLostError, match=r"127\.0\.0\.1:9.*model tagger"),
    ):
        MODEL(lazy.jets).compute(scheduler="sync")


class Varied(sonic.SonicProcessor):
    models = {"top": MODEL}  # noqa: RUF012
    block_size = 10

    def acquire(self, events: Any) -> dict[str, Any]:
        up = ak.with_field(events.jets, events.jets.ht * 2, "ht")
        return {"top": sonic.Variations(nominal=events.jets, up=up)}

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        return {name: ak.sum(output.top) for name, output in scores["top"].items()}


class OfNothing(Varied):
    def acquire(self, events: Any) -> dict[str, Any]:
        return {}

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        return {"ht": ak.sum(events.jets.ht)}


@pytest.fixture
def some(lazy: Any) -> Any:
    """Events whose number is only known when they are computed."""
    return lazy[dak.sum(lazy.jets.ht, axis=1) > 1]


def test_variations_are_as_lazy(some: Any, uncontacted: str) -> None:
    with sonic.connect(uncontacted):
        scores = MODEL(sonic.Variations(nominal=some.jets, up=some.jets))
        assert {name: type(array) for name, array in scores.items()} == dict.fromkeys(
            ("nominal", "up"), dak.Array
        )
        with pytest.raises(errors.InputError, match="variation 'up' is not lazy"):
            MODEL(sonic.Variations(nominal=some.jets, up=ak.Array([{"pf": []}])))


def test_a_processor_of_variations(server: sonic.LocalServer, some: Any) -> None:
    with sonic.connect(server):
        (out,) = dask.compute(Varied().process(some), scheduler="sync")
        top = ak.sum(MODEL(some.compute(scheduler="sync").jets).top)
    assert out == {"nominal": pytest.approx(top, rel=1e-5), "up": pytest.approx(top, rel=1e-5)}


@pytest.mark.usefixtures("uncontacted")
def test_a_processor_that_sends_nothing(some: Any) -> None:
    out = OfNothing().process(some)
    assert type(out) is dict
    expected = ak.sum(some.compute(scheduler="sync").jets.ht)
    assert out["ht"].compute(scheduler="sync") == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def nano() -> Any:
    return sample(mode="dask")


@pytest.mark.usefixtures("uncontacted")
def test_branches_of_a_nanoaod_file(nano: Any) -> None:
    model = sonic.Model("substructure", {"x": sonic.Row(["pt", "tau2"])}, {"softmax": ["a", "b"]})
    assert _columns(model(nano.FatJet)) == {"FatJet_pt", "FatJet_tau2", "nFatJet"}
    pt = sonic.Model("m", {"x": sonic.Padded(["pt"], 8)}, {"softmax": ["a", "b"]})
    tracks = sonic.within_cone(nano.FatJet, nano.PFCand, 0.8)
    directions = {f"{c}_{x}" for c in ("FatJet", "PFCand") for x in ("eta", "phi")}
    assert _columns(pt(tracks)) == {"nFatJet", "nPFCand", "PFCand_pt", *directions}
    links = {"nFatJet", "nFatJetPFCand", "FatJetPFCand_jetIdx", "FatJetPFCand_pfCandIdx"}
    assert _columns(pt(sonic.constituents(nano))) == {*links, "nPFCand", "PFCand_pt"}
    jets = ak.zip({"pt": nano.FatJet["pt"]})
    up = ak.zip({"pt": nano.FatJet["pt"] + nano.FatJet["msoftdrop"]})
    row = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["a", "b"]})
    scores = row(sonic.Variations(nominal=jets, up=up))
    assert _columns(scores["nominal"]) == {"FatJet_pt", "nFatJet"}
    assert _columns(scores["up"]) == {"FatJet_pt", "FatJet_msoftdrop", "nFatJet"}


@pytest.mark.usefixtures("uncontacted")
def test_partitions_are_chosen_of_the_result() -> None:
    """Dask would repeat a single partition for all others, such as those of the file."""
    from coffea.nanoevents import NanoEventsFactory
    from tests.nanoaod import Schema

    steps = {"object_path": "Events", "steps": [[0, 300], [300, 600], [600, 1000]]}
    file = {str(DATA / "TTbar_1.root"): steps}
    events = NanoEventsFactory.from_root(file, schemaclass=Schema, mode="dask").events()
    assert len(sonic.constituents(events).partitions[1].compute(scheduler="sync")) == 300
    model = sonic.Model("m", {"a": sonic.Row("pt"), "b": sonic.Row("pt")}, {"y": ["top"]})
    for call in (
        lambda: sonic.constituents(events.partitions[1]),
        lambda: model({"a": events.FatJet, "b": events.FatJet.partitions[1]}),
    ):
        with pytest.raises(errors.InputError, match=r"of partitions .*result.partitions\[0\]"):
            call()


def test_events_with_a_report_of_files_keep_their_constituents() -> None:
    """As `apply_to_fileset` reads files of which some may be missing."""
    options = {"allow_read_errors_with_report": True}
    events, report = sample(mode="dask", uproot_options=options)
    found, plain = [sonic.constituents(events).pt], sample()
    events["FatJet"] = events.FatJet[:, ::-1]
    found.append(sonic.constituents(events).pt)
    as_read, changed, report = dask.compute(*found, report, scheduler="sync")
    expected = sonic.constituents(plain).pt
    assert as_read.tolist() == expected.tolist()
    assert changed.tolist() == expected[:, ::-1].tolist()
    assert report.exception.tolist() == [None]


@pytest.mark.parametrize("is_copied", [False, True])
def test_changed_jets_keep_their_constituents(nano: Any, is_copied: bool) -> None:
    """Also where no column of the file is left, so that they are found by their direction."""
    jets = nano.FatJet
    jets = jets[dak.argsort(jets.msoftdrop, axis=1)]
    jets = jets[jets.pt > 300]
    if is_copied:
        jets = dak.zip({name: jets[name] * 1 for name in ("pt", "eta", "phi", "msoftdrop")})
    events = dak.with_field(nano[nano.event % 2 == 0], jets[nano.event % 2 == 0], "FatJet")
    read = _columns(sonic.constituents(events).pt)
    assert ("FatJet_phi" in read, "run" in read) == (is_copied, is_copied)
    found, changed = sonic.constituents(events).pt.compute(scheduler="sync"), events.FatJet
    whole = nano.compute(scheduler="sync")
    plain = ak.with_field(whole.FatJet, sonic.constituents(whole).pt, "parts")
    plain = plain[ak.argsort(plain.msoftdrop, axis=1)]
    assert found.tolist() == plain[plain.pt > 300][whole.event % 2 == 0].parts.tolist()
    assert ak.num(found).tolist() == ak.num(changed.pt.compute(scheduler="sync")).tolist()


def test_indices_of_the_file_lead_to_changed_objects(nano: Any) -> None:
    """Where no column of the file is left, what tells the objects apart is read, too."""
    jet = sonic.Feature("FatJet.msoftdrop", index="FatJetPFCand.jetIdx")
    model = sonic.Model("m", {"x": sonic.Padded(jet, 100, missing=-1.0)}, {"y": ["sum"]})
    served = FakeModel.of(model, lambda inputs: {"y": inputs["x"].sum(axis=2)})
    names, (lazily, plain) = ("pt", "eta", "phi", "msoftdrop"), (nano, sample())
    jets = dak.zip({name: lazily.FatJet[name] * 1 for name in names})[:, ::-1]
    lazily = dak.with_field(lazily, jets[jets.pt > 300], "FatJet")
    plain = ak.with_field(plain, plain.FatJet[plain.FatJet.pt > 300], "FatJet")
    with FakeServer({"m": served}) as server, sonic.connect(server.url):
        assert {"FatJet_phi", "run"} <= _columns(model(lazily))
        assert model(lazily).compute(scheduler="sync").tolist() == model(plain).tolist()


def test_events_with_columns_of_another_file_are_scored(nano: Any) -> None:
    """Which of both is theirs, only an index of the file has to know."""
    nano["other"] = sample("QCD_1", mode="dask").run
    sonic.Model("m", {"x": sonic.Row("FatJet[0].pt", missing=0.0)}, {"y": None})(nano)
    candidate = sonic.Feature("PFCand.pt", index="FatJetPFCand.pfCandIdx")
    with pytest.raises(errors.InputError, match="have columns of other files"):
        sonic.Model("m", {"x": sonic.Padded(candidate, 9, missing=0.0)}, {"y": None})(nano)


def test_the_file_is_known_after_changes_in_place(nano: Any) -> None:
    """Though they change what coffea keeps as the events of the file."""
    candidate = sonic.Feature("PFCand.pt", index="FatJetPFCand.pfCandIdx")
    inputs = {"x": sonic.Padded(candidate, 100, missing=-1.0)}
    model = sonic.Model("m", inputs, {"y": ["sum"]})
    served = FakeModel.of(model, lambda inputs: {"y": inputs["x"].sum(axis=2)})
    plain = sample()
    for events in (nano, plain):
        jets, candidates = events.FatJet, events.PFCand
        events["FatJet"] = jets[abs(jets.eta) < 1.0][:, ::-1]
        events["PFCand"] = candidates[candidates.pt > 1.0][:, ::-1]
    with FakeServer({"m": served}) as server, sonic.connect(server.url):
        lazily, expected = ([model(e)["sum"], sonic.constituents(e).pt] for e in (nano, plain))
        assert [e.tolist() for e in dask.compute(*lazily)] == [e.tolist() for e in expected]
