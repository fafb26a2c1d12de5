"""The demo scores every jet of users' files, names what it cannot use, and ends at Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import onnxruntime
import psutil
import pytest
import uproot
from rich.console import Console
from tests.commands import json_of, run
from tests.direct import direct_scores
from tests.waiting import until

from sonic_coffea import errors
from sonic_coffea.dask import cluster
from sonic_coffea.demo import workflow
from sonic_coffea.demo.samples import DATA

pytestmark = pytest.mark.server


def rewrite(
    target: Path,
    keep: Any,
    rename: Any = lambda name: name,
    *,
    events: int = 300,
    jets: int | None = None,
) -> Path:
    """Write the first events of a sample file with some of its branches, under other names.

    Of each event, so many of the first large-radius jets are kept.
    """
    with uproot.open(DATA / "TTbar_1.root") as source:
        names = [b for b in source["Events"].keys() if keep(b) and not b.startswith("n")]  # noqa: SIM118
        arrays = {b: source["Events"][b].array(entry_stop=events) for b in names}
    single = {b: a for b, a in arrays.items() if a.ndim == 1}
    jagged: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        if array.ndim > 1:
            collection, _, field = rename(name).partition("_")
            kept = array[:, :jets] if collection == "FatJet" else array
            jagged.setdefault(collection, {})[field] = kept
    branches = {**single, **{c: ak.zip(f) for c, f in jagged.items()}}
    types = {name: np.asarray(a).dtype if a.ndim == 1 else a.type for name, a in branches.items()}
    with uproot.recreate(target) as file:
        # Assigned as a dict, it would become an RNTuple.
        file.mktree("Events", {n: t if n in single else t.content for n, t in types.items()})
        file["Events"].extend(branches)
    return target


@pytest.fixture(scope="module")
def standing() -> Iterator[tuple[Any, Any]]:
    """A server and a cluster of the demo, which last for several runs."""
    console = Console(stderr=True)
    with workflow._server(console) as server, cluster(1) as client:
        yield server, client


@pytest.fixture(scope="module")
def _uses_standing(standing: tuple[Any, Any]) -> Iterator[None]:
    """Have runs in this process use what stands, in place of starting their own."""
    server, client = standing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workflow, "_server", lambda _: contextlib.nullcontext(server))
        patch.setattr("sonic_coffea.dask.cluster", lambda _: contextlib.nullcontext(client))
        yield


@pytest.fixture(scope="module")
def sample_run(_uses_standing: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The demo of the whole sample; a page of the documentation runs it in a process of its own."""
    return json_of("demo", "--output", tmp_path_factory.mktemp("demo"))


def test_sample_is_scored_whole(sample_run: dict[str, Any]) -> None:
    with_sample = {p: uproot.open(p)["Events"]["nFatJet"].array() for p in DATA.glob("*.root")}
    n_jets = int(sum(ak.sum(n) for n in with_sample.values()))
    assert sample_run["n_jets"] == sample_run["n_scored"] == n_jets
    assert sample_run["events"] == sum(len(n) for n in with_sample.values())
    assert sample_run["report"]["total"]["rows"] == n_jets
    jets = ak.from_parquet(sample_run["jets"])
    assert len(jets) == n_jets
    assert ak.all((jets.top >= 0) & (jets.top <= 1))
    first = np.diff(np.asarray(jets.event, np.int64), prepend=-1) != 0
    assert ak.all((jets.index == 0) == first)
    assert set(jets.dataset.tolist()) == {"TTbar", "QCD"}
    # The networks tell tops from other jets.
    assert sample_run["area_under_roc"] >= 0.93
    pictures = [Path(path) for path in sample_run["plots"]]
    assert [path.name for path in pictures] == ["score.png", "mass.png", "roc.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    left = {path.name for path in Path(sample_run["directory"]).iterdir()}
    others = {"jets.parquet", "report.json", "report.html"}
    assert left == {*others, *(path.name for path in pictures)}


def test_scores_equal_direct_inference(sample_run: dict[str, Any]) -> None:
    expected = direct_scores("TTbar_2")
    scored: dict[tuple[int, int], list[float]] = {}
    jets = ak.from_parquet(sample_run["jets"])
    for lumi, event, top in zip(jets.luminosityBlock, jets.event, jets.top, strict=True):
        scored.setdefault((int(lumi), int(event)), []).append(float(top))
    assert sum(map(len, expected.values())) > 500
    for where, tops in expected.items():
        np.testing.assert_allclose(scored.get(where, []), tops, rtol=0, atol=1e-6)


def bare(branch: str) -> bool:
    return "PFCand" not in branch


@pytest.mark.usefixtures("_uses_standing")
def test_files_without_constituents_are_scored_by_substructure(tmp_path: Path) -> None:
    """A copy of a file, of the same name, is another file."""
    path = rewrite(tmp_path / "nano_v9.root", bare)
    (tmp_path / "copy").mkdir()
    again = shutil.copy(path, tmp_path / "copy")
    result = json_of("demo", path, again, "--output", tmp_path / "out")
    assert result["network"] == "substructure"
    jets = ak.from_parquet(result["jets"])
    session = onnxruntime.InferenceSession(DATA / "substructure.onnx")
    with uproot.open(path) as file:
        fields = ("pt", "eta", "mass", "msoftdrop", "tau1", "tau2", "tau3", "tau4", "nConstituents")
        columns = [ak.flatten(file["Events"][f"FatJet_{f}"].array()) for f in fields]
    features = np.stack([np.asarray(c, np.float32) for c in columns], axis=1)
    (expected,) = session.run(None, {"features": features})
    assert result["n_jets"] == len(jets) == 2 * len(expected)
    np.testing.assert_allclose(jets.top, np.tile(expected[:, 1], 2), rtol=0, atol=1e-6)
    assert result["area_under_roc"] > 0.8


@pytest.mark.usefixtures("_uses_standing")
def test_pfnano_of_data_gives_the_scores_of_nanoaod_and_no_truth(
    tmp_path: Path, sample_run: dict[str, Any]
) -> None:
    def renamed(branch: str) -> str:
        branch = branch.replace("FatJetPFCand_pfCandIdx", "FatJetPFCand_pFCandsIdx")
        return branch.replace("PFCand_", "PFCands_")

    def measured(branch: str) -> bool:
        return not branch.startswith(("GenPart", "genWeight"))

    path = rewrite(tmp_path / "pfnano.root", measured, renamed)
    result = json_of("demo", path, "--output", tmp_path / "out")
    assert result["network"] == "toptagger"
    assert result["area_under_roc"] is None
    assert [Path(p).stem for p in result["plots"]] == ["score", "mass"]
    got = ak.from_parquet(result["jets"])
    assert result["n_scored"] == result["n_jets"] == len(got) > 300
    whole = ak.from_parquet(sample_run["jets"])
    both = {
        (e, round(float(p), 3)): s for e, p, s in zip(whole.event, whole.pt, whole.top, strict=True)
    }
    for event, pt, score in zip(got.event, got.pt, got.top, strict=True):
        assert abs(both[event, round(float(pt), 3)] - score) < 1e-6


def test_unusable_files_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "nano_tt.root").touch()
    notes, half, out = (tmp_path / name for name in ("notes.root", "half.root", "out"))
    notes.write_text("not a ROOT file at all\n" * 20)
    whole = (DATA / "TTbar_1.root").read_bytes()
    half.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "link.root").symlink_to(DATA / "TTbar_1.root")
    rewrite(tmp_path / "mc.root", bare, events=20)
    rewrite(tmp_path / "data.root", lambda b: bare(b) and not b.startswith("GenPart"), events=20)
    rewrite(tmp_path / "nano.root", lambda b: not b.startswith("FatJet_"), events=20)
    for files, code, message in (
        (["nano_t.root"], 2, "did you mean 'nano_tt.root'"),
        (["notes.root"], 2, "cannot read notes.root as a ROOT file"),
        (["half.root"], 2, f"half.root is truncated: it has {len(whole) // 2:,} of {len(whole):,}"),
        (["link.root", DATA / "TTbar_1.root"], 2, "expected each file once, got more than once"),
        (["data.root", "mc.root"], 2, "data.root has no GenPart; score them apart"),
        (["nano.root"], 1, "has no branch 'FatJet_pt'; did you mean 'Jet_pt'"),
    ):
        done = run("demo", *(tmp_path / file for file in files), "--output", out)
        assert message in done.stderr
        assert done.returncode == code
        assert len(done.stderr.splitlines()) == 1
        assert not out.exists()


def test_packages_of_the_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)  # as if it were not installed
    with pytest.raises(
        errors.ConfigError, match=r'the demo needs onnx; .*pip install "\.\[demo\]"'
    ):
        workflow.run()


@pytest.mark.usefixtures("_uses_standing")
def test_files_of_which_nothing_is_scored(tmp_path: Path) -> None:
    no_events = rewrite(tmp_path / "no_events.root", bare, events=0)
    no_jets = rewrite(tmp_path / "no_jets.root", bare, events=20, jets=0)
    out = tmp_path / "out"
    done = run("demo", no_events, no_jets, "--output", out, "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "there is nothing to plot" in done.stdout
    result = json.loads((out / "report.json").read_text())
    assert (result["events"], result["n_scored"]) == (20, 0)
    assert result["plots"] == []
    assert len(ak.from_parquet(result["jets"])) == 0


def test_results_cannot_be_written_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("as it was")
    assert "jets.parquet: Not a directory" in run("demo", "--output", tmp_path / "out").stderr
    assert (tmp_path / "out").read_text() == "as it was"


def test_results_replace_no_file_of_others(tmp_path: Path) -> None:
    mine = tmp_path / "report.json"
    mine.write_text("as it was")
    done = run("demo", "--output", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has files that the demo has not written; name a new one" in done.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["as it was"]


def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    """Of many small chunks, some are done and most are not."""
    command = [sys.executable, "-m", "sonic_coffea", "demo", "--chunksize", "20", "--workers", "1"]
    command += ["--output", str(tmp_path / "out")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            done = (tmp_path / "out").glob
            begun = ".jets.parquet.*/*.parquet"
            until(lambda: any(done(begun)) or process.poll() is not None, 200)
            assert process.poll() is None, process.communicate()
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) >= 4  # supervisor, server, its models, worker
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out == ""
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert list((tmp_path / "out").iterdir()) == []
