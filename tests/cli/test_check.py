"""`check` names the step that fails; `models` and `status` say what servers have."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.commands import run
from tests.ports import held_port
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer

MODEL = sonic.Model("m", {"x": sonic.Row(["pt", "eta"])}, {"y": ["a", "b"]})
DECLARATIONS = """
import sonic_coffea as sonic

tagger = sonic.Model(
    "tagger",
    inputs={"features": sonic.Padded(["pt", "eta"], 8), "mask": sonic.Mask(8)},
    outputs={"scores": ["qcd", "top"]},
)
other = sonic.Model("tagger", {"features": sonic.Row("pt")}, {"score": ["top"]})


class Analysis(sonic.SonicProcessor):
    models = {"tagger": tagger}
"""


def checked(*arguments: object, ok: bool, cwd: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the steps by name."""
    done = run("check", *arguments, "--json", cwd=cwd)
    assert done.returncode == (0 if ok else 1), done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] is ok
    return {step["name"]: step for step in result["steps"]}


def failed(*arguments: object, cwd: Path | None = None) -> dict[str, Any]:
    """Return the step that failed, after which nothing is tried."""
    steps = list(checked(*arguments, ok=False, cwd=cwd).values())
    assert [step["ok"] for step in steps] == [True] * (len(steps) - 1) + [False]
    assert steps[-1]["remedy"]
    return dict(steps[-1])


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer({"m": FakeModel.of(MODEL)}) as server:
        yield server


def test_terminals_show_a_step_as_one_line(fake: FakeServer) -> None:
    shown = re.sub(r"\x1b\[[\d;]*m", "", run("check", fake.url, "m", FORCE_COLOR="1").stdout)
    assert "\x1b[2K" in shown  # of the status, which is drawn anew below each line
    for line in ("✓ connection: ", "✓ model m: version 1"):
        assert line in shown


def test_every_step_of_a_good_server_passes(server: sonic.LocalServer, tmp_path: Path) -> None:
    (tmp_path / "analysis.py").write_text(DECLARATIONS)
    steps = checked(server.url, "tagger", "--declare", "analysis:Analysis", ok=True, cwd=tmp_path)
    expected = {
        "connection": ["triton"],
        "readiness": [],
        "declaration of tagger": [],
        "model tagger": ["features FP32 [2, -1]", "at most 64 rows"],
        "inference": ["scores [1, 2]", "the same beside another row"],
    }
    assert list(steps) == list(expected)
    for name, details in expected.items():
        assert all(detail in steps[name]["detail"] for detail in details)
    shown = run("check", server.url)
    assert shown.returncode == 0
    assert "✓ models: tagger v1 READY" in shown.stdout


@pytest.mark.parametrize(
    ("command", "arguments", "shown"),
    [
        ("check", ["tagger"], r"connection: in-process(?s:.*)scores \[1, 2\]"),
        ("models", [], "tagger"),
        ("scaffold", ["tagger"], r"sonic\.Model\("),
        ("bench", ["tagger", "--seconds", "0.01"], "rows"),
    ],
)
def test_commands_take_repositories_whose_models_run_in_this_process(
    repository: Path, command: str, arguments: list[str], shown: str
) -> None:
    done = run(command, repository, *arguments)
    assert done.returncode == 0, done.stderr
    assert re.search(shown, done.stdout)


def test_a_folder_that_is_gone_hides_no_other_server(repository: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with sonic.connect([gone, repository]) as pool:
        gone.rmdir()
        ((bad, good),) = [list(host.servers.values()) for host in pool.check("tagger")]
    assert [step.name for step in bad] == ["connection"]
    assert "expected a model repository, a folder of this machine" in bad[0].detail
    assert good[-1].name == "inference"
    assert good[-1].ok


def test_declarations_and_names_are_compared_with_the_server(
    server: sonic.LocalServer, tmp_path: Path
) -> None:
    (tmp_path / "analysis.py").write_text(DECLARATIONS)
    step = failed(server.url, "--declare", "analysis:other", cwd=tmp_path)
    assert step["name"] == "declaration of tagger"
    assert "did you mean 'scores'" in step["detail"]
    preprocess = json.loads((DATA / "toptagger.preprocess.json").read_text())
    del preprocess["output_names"]
    (tmp_path / "preprocess.json").write_text(json.dumps(preprocess))
    (tmp_path / "labels.txt").write_text("QCD\nTop\n")
    named = ["--weaver", tmp_path / "preprocess.json", "--labels", tmp_path / "labels.txt"]
    assert "no input 'pf_points'" in failed(server.url, "tagger", *named)["detail"]
    step = failed(server.url, "taggr")
    assert "did you mean 'tagger'" in step["detail"]
    assert "sonic-coffea models" in step["remedy"]
    assert "has version 1" in failed(server.url, "tagger", "--version", "7")["detail"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        *(
            (f"grpc://{host}:8001", "no address is known for this name")
            for host in ("no-such-host.invalid", "a..b", "a" * 64 + ".example")
        ),
        ("grpc://127.0.0.1:{port}", "nothing listens at this port"),
        ("unix:{folder}/grpc:1", "another machine, where only its own processes"),
        ("grpcs{fake}", "did you mean grpc://?"),
    ],
)
def test_addresses_without_such_a_server_are_named(
    fake: FakeServer, address: str, reason: str, tmp_path: Path
) -> None:
    with held_port() as port:
        address = address.format(port=port, folder=tmp_path, fake=fake.url.removeprefix("grpc"))
        step = failed(address)
    assert step["name"] == "connection"
    assert reason in step["detail"]


@pytest.mark.server
def test_http_ports_are_recognised(repository: Path) -> None:
    with held_port() as port:
        arguments = ["--allow-http=true", "--http-address=127.0.0.1", f"--http-port={port}"]
        with sonic.LocalServer(repository, extra_args=arguments), socket.socket() as probe:
            # Triton opens it after the port of gRPC.
            until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, what="the port of HTTP")
            step = failed(f"grpc://127.0.0.1:{port}")
    assert "8001" in step["remedy"]
    assert "HTTP" in step["remedy"]


@pytest.mark.parametrize("option", ["root", "cert", "key"])
def test_unreadable_files_for_tls_are_named(option: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("client@example.org")
    pems = {"root": authority.cert_pem, "cert": issued.cert_chain_pems[0]}
    pems |= {"key": issued.private_key_pem, option: trustme.Blob(b"no certificate")}
    for name, pem in pems.items():
        pem.write_to_path(str(tmp_path / name))
    options = [part for name in pems for part in (f"--tls-{name}", tmp_path / name)]
    step = failed("grpcs://127.0.0.1:1", *options)
    for words in ("cannot read tls_", str(tmp_path / option), "PEM"):
        assert words in step["detail"]


def test_tokens_and_headers_open_a_server(fake: FakeServer, tmp_path: Path) -> None:
    fake.headers["authorization"] = "Bearer let-me-in"
    step = failed(fake.url, "m")
    assert step["name"] == "connection"
    assert "--token-file" in step["remedy"]
    (tmp_path / "token").write_text("let-me-in\n")
    checked(fake.url, "m", "--token-file", tmp_path / "token", ok=True)
    checked(fake.url, "m", "--header", "authorization=Bearer let-me-in", ok=True)
    for header in ("authorization: Bearer hush", "authorization: Bearer hush==", "=hush", "hush"):
        done = run("models", fake.url, "--header", header)
        assert done.returncode == 2
        assert "hush" not in done.stdout + done.stderr
        assert "expected --header NAME=VALUE, got something else" in " ".join(done.stderr.split())
    assert run("models", fake.url, "--header", "a=", "--token-file", tmp_path / "token").stdout
    assert fake.calls[-1][1]["a"] == ""


def normalised(inputs: Any) -> Any:
    (x,) = inputs.values()
    return {"y": (x - x.mean(axis=0)).astype("f4")}


def only_zeros(inputs: Any) -> Any:
    (x,) = inputs.values()
    assert not x.any()
    return {"y": x[:, :2]}


def broken(inputs: Any) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("function", "max_rows", "ok", "detail"),
    [
        (normalised, 64, False, "output 'y' depends on the other rows of a request"),
        (normalised, 64, False, "[0., 0.] alone, and [-0.5, -0.5] beside"),
        (only_zeros, 64, True, "a row of ones could not be tried"),
        (only_zeros, 1, True, "it takes one row a request"),
        (broken, 64, False, "ZeroDivisionError"),
    ],
)
def test_rows_are_tried_alone_and_beside_another(
    function: Any, max_rows: int, ok: bool, detail: str
) -> None:
    with FakeServer({"m": FakeModel.of(MODEL, function, max_rows=max_rows)}) as fake:
        step = checked(fake.url, "m", ok=ok)["inference"]
    assert detail in step["detail"]
    assert ("model.eval()" in step["remedy"]) == (function is normalised)


MODULES = {
    "analysis": "class A:\n    models = property(lambda self: {})\n",
    "open": "x = (",
    "lacks": "import no_such_package",
    "exits": "raise SystemExit('no arguments')",
    "json": "dumps = 1",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("triton:8001",), "expected a server as grpc://host:port"),
        (("grpc://h:1", "--declare", "nowhere"), "expected a YAML file or FILE.py:NAME"),
        (("grpc://h:1", "--declare", "nowhere:there"), "No module named 'nowhere'"),
        (("grpc://h:1", "--declare", "json:dumps"), "expected a Model or a processor's models"),
        (("grpc://h:1", "--declare", "analysis:A"), "expected a Model or a processor's models"),
        (("grpc://h:1", "--declare", "json.py:dumps"), "json.py has the name of another module"),
        (("grpc://h:1", "--declare", "none.py:x"), "no file 'none.py'"),
        (("grpc://h:1", "--declare", "json:"), "expected FILE.py:NAME or MODULE:NAME"),
        (("grpc://h:1", "--declare", ":x"), "expected FILE.py:NAME or MODULE:NAME"),
        (("grpc://h:1", "--declare", ".json:dumps"), "cannot import .json"),
        (("grpc://h:1", "--declare", "open:x"), "open:x: SyntaxError: '(' was never closed"),
        (("grpc://h:1", "--declare", "lacks:x"), "lacks:x: ModuleNotFoundError: No module named"),
        (("grpc://h:1", "--declare", "exits:x"), "cannot import exits:x: SystemExit: no arguments"),
        (("grpc://h:1", "--weaver", DATA / "toptagger.preprocess.json"), "needs the name"),
        (("grpc://h:1", "m", "--trained-on", "x.parquet"), "--trained-on compares a declaration"),
        (("grpc://h:1,grpc://h:2", "m"), "expected one server, got ('grpc://h:1', 'grpc://h:2')"),
        (("grpc://h:1", "--version", "2"), "--version is of the model that is tried"),
        (("grpc://h:1", "--header", "a=b", "--header", "a=c"), "'a' is given twice"),
    ],
)
def test_wrong_usage_is_said(arguments: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    done = run("check", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_models_are_listed(server: sonic.LocalServer) -> None:
    (model,) = json.loads(run("models", server.url, "--json").stdout)
    expected = {"model": "tagger", "version": "1", "state": "READY", "max_rows": 64}
    assert expected.items() <= model.items()
    features = {"name": "features", "datatype": "FP32", "shape": [2, -1], "rows": -1}
    assert model["inputs"][0] == features
    shown = run("models", server.url, COLUMNS="200").stdout
    assert "features FP32 [2, -1]" in shown


@pytest.mark.server
def test_local_servers_are_listed_and_stopped(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both that of `serve`, which does not start it again, and that of a session."""
    # With records of its own: it stops all that it finds.
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "state"))
    command = [sys.executable, "-m", "sonic_coffea", "serve", str(repository), "--json"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **piped) as serving, sonic.LocalServer(repository) as server:
        try:
            url = json.loads(serving.stdout.readline())["url"]
            records = {row["url"]: row for row in json.loads(run("status", "--json").stdout)}
            assert set(records) == {url, server.url}
            assert records[server.url]["models"] == ["tagger v1"]
            assert records[server.url]["pid"] == server.pid
            assert url in run("status").stdout.replace("\n", "")
            assert run("status", "--stop", url).stdout == f"stopped {url}\n"
            assert serving.wait(30) == 0
            assert f"{url} was stopped on request" in serving.stderr.read()
            (left,) = json.loads(run("status", "--json").stdout)
            assert left["url"] == server.url
            wrong = run("status", "--stop", "grpc://127.0.0.1:1")
            assert wrong.returncode == 1
            assert "no local server of yours" in wrong.stderr
            # As of a container that shares /tmp: others have the ids of its processes.
            record = Path(server.url.removeprefix("unix:")).with_name("server.json")
            here = record.read_text()
            record.write_text(here.replace(str(left["supervisor_pid"]), str(os.getpid())))
            assert "is not its supervisor" in run("status", "--stop", "all").stderr
            record.write_text(here)
            stopped = json.loads(run("status", "--stop", "all", "--json").stdout)
            assert stopped == {"stopped": [server.url]}
            until(lambda: not server.running, what="the end of the other")
        finally:
            serving.kill()
