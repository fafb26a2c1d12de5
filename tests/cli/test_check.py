"""`check`, `models` and `status`, with real servers."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trustme
from tests.commands import run
from tests.ports import held_port
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
    (at,) = [i for i, step in enumerate(steps) if step["ok"] is False]
    assert all(step["ok"] for step in steps[:at])
    assert all(step["ok"] is None for step in steps[at + 1 :])
    assert steps[at]["remedy"]
    return dict(steps[at])


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer({"m": FakeModel.of(MODEL)}) as server:
        yield server


def test_a_terminal_shows_a_step_as_one_line(fake: FakeServer) -> None:
    shown = re.sub(r"\x1b\[[\d;]*m", "", run("check", fake.url, "m", FORCE_COLOR="1").stdout)
    assert "\x1b[2K" in shown  # of the status, which is drawn anew below each line
    for line in ("✓ connection: ", "✓ model m: version 1"):
        assert line in shown


def test_all_is_well(server: sonic.LocalServer, tmp_path: Path) -> None:
    (tmp_path / "analysis.py").write_text(DECLARATIONS)
    steps = checked(server.url, "tagger", "--against", "analysis:Analysis", ok=True, cwd=tmp_path)
    assert list(steps) == [
        "connection",
        "readiness",
        "declaration of tagger",
        "model tagger",
        "inference",
    ]
    assert "triton" in steps["connection"]["detail"]
    assert "features FP32 [2, -1]" in steps["model tagger"]["detail"]
    assert "at most 64 rows" in steps["model tagger"]["detail"]
    assert "scores [1, 2]" in steps["inference"]["detail"]
    assert "the same beside another row" in steps["inference"]["detail"]
    shown = run("check", server.url)
    assert shown.returncode == 0
    assert "✓ models: tagger v1 READY" in shown.stdout


def test_a_declaration_that_does_not_fit(server: sonic.LocalServer, tmp_path: Path) -> None:
    (tmp_path / "analysis.py").write_text(DECLARATIONS)
    step = failed(server.url, "--against", "analysis:other", cwd=tmp_path)
    assert step["name"] == "declaration of tagger"
    assert "did you mean 'scores'" in step["detail"]
    preprocess = json.loads((DATA / "toptagger.preprocess.json").read_text())
    del preprocess["output_names"]
    (tmp_path / "preprocess.json").write_text(json.dumps(preprocess))
    (tmp_path / "labels.txt").write_text("QCD\nTop\n")
    named = ["--weaver", tmp_path / "preprocess.json", "--labels", tmp_path / "labels.txt"]
    weaver = failed(server.url, "tagger", *named)
    assert "no input 'pf_points'" in weaver["detail"]


def test_models_that_are_not_there(server: sonic.LocalServer) -> None:
    step = failed(server.url, "taggr")
    assert "did you mean 'tagger'" in step["detail"]
    assert "sonic-coffea models" in step["remedy"]
    assert "has version 1" in failed(server.url, "tagger", "--version", "7")["detail"]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "a" * 64 + ".example"])
def test_a_name_that_nobody_knows(host: str) -> None:
    step = failed(f"grpc://{host}:8001")
    assert step["name"] == "connection"
    assert "no address is known for this name" in step["detail"]
    assert host in step["detail"]


def test_nobody_listens(tmp_path: Path) -> None:
    with held_port() as port:
        step = failed(f"grpc://127.0.0.1:{port}")
    assert step["name"] == "connection"
    assert "nothing listens at this port" in step["detail"]
    step = failed(f"unix:{tmp_path}/grpc:1")
    assert "another machine, where only its own processes" in step["detail"]


@pytest.mark.server
def test_the_port_of_http(repository: Path) -> None:
    with held_port() as port:
        arguments = ["--allow-http=true", "--http-address=127.0.0.1", f"--http-port={port}"]
        with sonic.LocalServer(repository, extra_args=arguments), socket.socket() as probe:
            # Triton opens it after the port of gRPC.
            until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, what="the port of HTTP")
            step = failed(f"grpc://127.0.0.1:{port}")
    assert "8001" in step["remedy"]
    assert "HTTP" in step["remedy"]


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A port with TLS, and the certificate of who signed for it."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    root = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(root))
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        listening.settimeout(0.1)
        while not over.is_set():
            try:
                accepted, _ = listening.accept()
                with accepted, context.wrap_socket(accepted, server_side=True) as wrapped:
                    wrapped.recv(1)
            except OSError:
                continue

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        yield listening.getsockname()[1], root
        over.set()
        thread.join()


def test_tls_and_none(tls: tuple[int, Path], fake: FakeServer) -> None:
    port, _ = tls
    step = failed(f"grpc://127.0.0.1:{port}")
    assert f"the port wants TLS; did you mean grpcs://127.0.0.1:{port}?" in step["detail"]
    step = failed(f"grpcs://127.0.0.1:{port}")
    assert "tls_root= names the certificate authority to trust" in step["detail"]
    assert "--tls-root" in step["remedy"]
    assert "did you mean grpc://?" in failed(fake.url.replace("grpc", "grpcs"))["detail"]


@pytest.mark.parametrize("option", ["root", "cert", "key"])
def test_files_for_tls_that_cannot_be_used(
    option: str, tls: tuple[int, Path], tmp_path: Path
) -> None:
    issued = trustme.CA().issue_cert("client@example.org")
    files = {name: tmp_path / f"{name}.pem" for name in ("root", "cert", "key")}
    files["root"] = tls[1]
    issued.cert_chain_pems[0].write_to_path(str(files["cert"]))
    issued.private_key_pem.write_to_path(str(files["key"]))
    files[option] = tmp_path / "notes.txt"
    files[option].write_text("no certificate")
    options = [part for name, file in files.items() for part in (f"--tls-{name}", file)]
    step = failed(f"grpcs://127.0.0.1:{tls[0]}", *options)
    assert step["name"] == "connection"
    assert "cannot read the" in step["detail"]
    assert str(files[option]) in step["detail"]
    assert "PEM" in step["detail"]


def test_access(fake: FakeServer, tmp_path: Path) -> None:
    fake.headers["authorization"] = "Bearer let-me-in"
    step = failed(fake.url, "m")
    assert step["name"] == "connection"
    assert "--token-file" in step["remedy"]
    (tmp_path / "token").write_text("let-me-in\n")
    checked(fake.url, "m", "--token-file", tmp_path / "token", ok=True)
    checked(fake.url, "m", "--header", "authorization=Bearer let-me-in", ok=True)
    assert run("check", fake.url, "--header", "nothing").returncode == 2
    assert run("check", fake.url, "--header", "a=b", "--header", "a=c").returncode == 2
    for header in ("authorization: Bearer hush", "authorization: Bearer hush==", "=hush", "hush"):
        done = run("models", fake.url, "--header", header)
        assert done.returncode == 2
        assert "hush" not in done.stdout + done.stderr
        assert "expected --header NAME=VALUE" in done.stderr


def test_a_network_that_depends_on_its_batch() -> None:
    def normalised(inputs: Any) -> Any:
        (x,) = inputs.values()
        return {"y": (x - x.mean(axis=0)).astype("f4")}

    with FakeServer({"m": FakeModel.of(MODEL, normalised)}) as fake:
        step = failed(fake.url, "m")
    assert step["name"] == "inference"
    assert "output 'y' depends on the other rows of a request" in step["detail"]
    assert "[0., 0.] alone, and [-0.5, -0.5] beside" in step["detail"]
    assert "model.eval()" in step["remedy"]


def test_a_row_that_cannot_be_tried_beside_another() -> None:
    def careful(inputs: Any) -> Any:
        (x,) = inputs.values()
        assert not x.any()
        return {"y": x[:, :2]}

    for options in ({}, {"max_rows": 1}):
        with FakeServer({"m": FakeModel.of(MODEL, careful, **options)}) as fake:
            step = checked(fake.url, "m", ok=True)["inference"]
        expected = "it takes one row a request" if options else "a row of ones could not be tried"
        assert expected in step["detail"]


def test_a_model_that_fails() -> None:
    def broken(inputs: Any) -> Any:
        raise ZeroDivisionError

    with FakeServer({"m": FakeModel.of(MODEL, broken)}) as fake:
        step = failed(fake.url, "m")
    assert step["name"] == "inference"
    assert "ZeroDivisionError" in step["detail"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("triton:8001",),
        ("grpc://h:1", "--against", "nowhere"),
        ("grpc://h:1", "--against", "nowhere:there"),
        ("grpc://h:1", "--against", "json:dumps"),
        ("grpc://h:1", "--against", "json:"),
        ("grpc://h:1", "--against", ":x"),
        ("grpc://h:1", "--against", ".json:dumps"),
        ("grpc://h:1", "--weaver", DATA / "toptagger.preprocess.json"),
    ],
)
def test_wrong_usage(arguments: tuple[Any, ...]) -> None:
    done = run("check", *arguments)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("x = (", "SyntaxError: '(' was never closed"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit('no arguments')", "SystemExit: no arguments"),
    ],
)
def test_a_module_that_cannot_be_imported(tmp_path: Path, source: str, error: str) -> None:
    (tmp_path / "analysis.py").write_text(source)
    done = run("check", "grpc://h:1", "--against", "analysis:x", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot import {tmp_path / 'analysis.py'}: {error}")
    assert "Traceback" not in done.stderr


def test_models_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "analysis.py").write_text("class A:\n    models = property(lambda self: {})\n")
    done = run("check", "grpc://h:1", "--against", "analysis:A", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_service_is_woken(fake: FakeServer) -> None:
    done = run("wake", fake.url, "m")
    assert done.returncode == 0
    assert done.stdout == f"{fake.url} is ready, after 0 s\n"
    assert json.loads(run("wake", fake.url, "--json").stdout)["seconds"] < 60
    fake.refuse("ServerReady", grpc.StatusCode.UNAVAILABLE, "no healthy upstream")
    done = run("wake", fake.url, "--timeout", 1)
    assert done.returncode == 1
    assert "no server was ready within 1 s" in done.stderr


def test_models(server: sonic.LocalServer) -> None:
    (model,) = json.loads(run("models", server.url, "--json").stdout)
    assert (model["model"], model["version"], model["state"], model["max_rows"]) == (
        "tagger",
        "1",
        "READY",
        64,
    )
    assert model["inputs"][0] == {
        "name": "features",
        "datatype": "FP32",
        "shape": [2, -1],
        "rows": -1,
    }
    shown = run("models", server.url).stdout
    assert "features FP32 [2, ?]" in shown
    done = run("models", "grpc://127.0.0.1:9")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.server
def test_status_lists_and_stops(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With records of its own: it stops all that it finds.
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "state"))
    first, second = sonic.LocalServer(repository).start(), sonic.LocalServer(repository).start()
    with first, second:
        records = {record["url"]: record for record in json.loads(run("status", "--json").stdout)}
        assert records[first.url]["models"] == ["tagger v1"]
        assert records[first.url]["pid"] == first.pid
        assert first.url in run("status").stdout.replace("\n", "")
        done = run("status", "--stop", first.url, "--json")
        assert json.loads(done.stdout) == {"stopped": [first.url]}
        until(lambda: not first.running, what="the end of one")
        assert second.running
        wrong = run("status", "--stop", "grpc://127.0.0.1:1")
        assert wrong.returncode == 1
        assert "no local server of yours" in wrong.stderr
        assert json.loads(run("status", "--stop", "all", "--json").stdout)["stopped"]
        until(lambda: not second.running, what="the end of the other")
