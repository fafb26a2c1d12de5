"""Several versions of a model: added beside each other, served, pinned, verified."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import threading

import awkward as ak
import pytest
from tests.onnx_files import save_onnx
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ModelNotFoundError, ServerError, ServerLostError
from sonic_coffea.server import build_repository, read_repository

from .support import configuration, files


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
        threading.Timer(5.5, os.kill, (server.pid, signal.SIGCONT)).start()
        server.wait_for("m")
    with pytest.raises(ServerError, match="expected a running server"):
        server.wait_for("m")


@pytest.mark.parametrize(("version", "written"), [(None, "m"), ("next", "m/2")])
def test_what_another_process_builds_at_the_same_time_is_left_as_it_is(
    tmp_path, monkeypatch, version, written
):
    one, theirs, ours = (times(tmp_path / f"{i}.onnx", i) for i in (1, 2, 3))
    path, copy, others = tmp_path / "r", shutil.copyfile, [theirs]
    if version:
        build_repository(path, {"m": one})

    def interrupted(source, target):
        if others:
            build_repository(path, {"m": others.pop()}, version=version)
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", interrupted)
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
