"""``sonic-coffea serve``, ``status``, ``server`` and ``repository``: on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import sonic_coffea as sonic
from sonic_coffea.cli._command import OptionalNumber
from sonic_coffea.cli._options import pairs
from sonic_coffea.cli._output import show, tensors, working
from sonic_coffea.errors import ServerError, SonicError, printable, require
from sonic_coffea.reporting import tables
from sonic_coffea.transport import ConnectionOptions, connect_transport

_NONE = "no local server of yours runs on this machine"
_STOP_TIMEOUT_S = 30.0


def serve(
    repository: Path,
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    threads: OptionalNumber = None,
    runtime: str | None = None,
    image: str | None = None,
) -> None:
    """Serve a model repository to your processes on this machine, until Ctrl-C or `status --stop`.

    With --port, serve it to all who can connect to the port.

    Parameters
    ----------
    repository : REPOSITORY
        A Triton model repository.
    port : PORT
        Listen at a port, 0 for a free one, for users and machines that cannot reach the Unix
        socket: all who can connect to it can use the server.
    host : HOST
        Address of the port; 0.0.0.0 for all.
    threads : N
        CPU threads of the models.
    runtime : NAME
        auto, pip, apptainer, singularity, podman or docker.
    image : IMAGE
        Image of the container: a name, file or folder.
    """
    options: dict[str, Any] = {"threads": threads, "runtime": runtime, "image": image}
    with working("starting Triton") as progress:
        local = sonic.LocalServer(repository, port=port, host=host, **options)
        server = local.start(progress=progress)
    with server:
        models = [f"{m.name} v{m.version}" for m in server.metadata.models]
        shown = printable(", ".join(models)) or "no model"
        plain = {"url": server.url, "models": models}
        show(plain, f"{shown} at {server.url}; Ctrl-C stops it")
        server.wait()
        if not server.ended_on_request:
            raise ServerError(f"the server has ended; its log: {server.log_path}")
        typer.echo(f"{server.url} was stopped on request", err=True)


def status(*, stop: str | None = None) -> None:
    """List, or stop, your local servers on this machine.

    Parameters
    ----------
    stop : URL|all
        Stop this server, or all of them.
    """
    records = sonic.server.local_servers()
    if stop is not None:
        stopped = _stop(records, stop)
        lines = [f"stopped {url}" for url in stopped] or [_NONE]
        show({"stopped": stopped}, *lines)
        return
    servers, lines = [_described(record) for record in records], []
    for server in servers:
        # Not a table: paths are to be copied, and a terminal is narrow.
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(server["started"]))
        models = ", ".join(server["models"]) if server["ready"] else "(not ready)"
        shown = {**server, "models": models}
        lines.append(f"{server['url']}  pid {server['pid']}, since {since}")
        names = ("models", "repository", "log")
        lines += [f"  {name:<10}  {printable(shown[name])}" for name in names]
    show(servers, *(lines or [_NONE]))


def _stop(records: Sequence[Mapping[str, Any]], which: str) -> list[str]:
    if which != "all":
        urls = [record["url"] for record in records]
        require([which], urls, "no local server of yours at", ServerError)
        records = [records[urls.index(which)]]
    for record in records:
        # The supervisor ends its server, and removes the server's files.
        pid = record["supervisor_pid"]
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"supervisor" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                problem = f"process {pid} is not its supervisor; stop it in its own container"
                raise ServerError(problem, server=record["url"])
            os.kill(pid, signal.SIGTERM)
    stopped = {record["url"] for record in records}
    until = time.monotonic() + _STOP_TIMEOUT_S
    while alive := stopped & {record["url"] for record in sonic.server.local_servers()}:
        if time.monotonic() > until:
            raise ServerError(f"{', '.join(alive)} did not end within {_STOP_TIMEOUT_S:g} s")
        time.sleep(0.05)
    return sorted(stopped)


def _described(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's record, and the state and models of the server."""
    options, models, ready = ConnectionOptions(metadata_timeout_s=5.0), [], False
    connecting = connect_transport(record["url"], options=options)
    with connecting as connection, contextlib.suppress(SonicError):
        models = [f"{m.name} v{m.version}" for m in connection.index() if m.state == "READY"]
        ready = connection.ready()
    return {**record, "models": models, "ready": ready}


def install(*, with_: list[str] | None = None) -> None:
    """Install Triton in an environment of its own, so that your packages stay as they are.

    Parameters
    ----------
    with_ : PACKAGE
        Also install a package that models need, such as xgboost; may be repeated.
    """
    with working("installing Triton") as progress:
        installed = sonic.server.ensure(progress=progress, extras=with_ or ())
    added = with_ or []
    beside = f" with {', '.join(added)}" if added else ""
    plain = {"version": installed.version, "root": str(installed.root), "extras": added}
    text = printable(f"Triton {installed.version}{beside} is in {installed.root}")
    show(plain, text)


def build(
    path: Path,
    models: list[str],
    *,
    version: str | None = None,
    max_batch_size: Annotated[int | None, {"min": 0}] = None,
    labels: list[str] | None = None,
    no_user: bool = False,
    overwrite: bool = False,
) -> None:
    """Write models into a repository, and create the repository if it does not exist.

    Parameters
    ----------
    path : PATH
        The model repository.
    models : NAME=FILE
        Models: ONNX (.onnx), TorchScript (.pt), XGBoost (.json, .ubj) or LightGBM (.txt).
    version : N|next
        Write this version, or the one after the latest; keep all others.
    max_batch_size : N
        Greatest number of rows in a batch; 0: no batching.
    labels : NAME=A,B
        Labels of a model's only output.
    no_user
        Leave your name out of the manifest.
    overwrite
        Replace models, or versions, of the same name.
    """
    sources = pairs(models, "NAME=FILE")
    sonic.build_repository(
        path,
        sources,
        version=int(version) if version and version.isdecimal() else version,  # type: ignore[arg-type]
        max_batch_size=max_batch_size,
        labels={name: text.split(",") for name, text in pairs(labels, "NAME=A,B").items()},
        record_user=not no_user,
        overwrite=overwrite,
    )
    _show([entry for entry in sonic.server.read_repository(path) if entry["model"] in sources])


def show_models(path: Path) -> None:
    """List models, versions and tensors, and verify that no file was changed.

    Parameters
    ----------
    path : PATH
        The model repository.
    """
    entries = sonic.server.read_repository(path)
    _show(entries)
    if changes := [change for entry in entries for change in entry["changes"]]:
        raise ServerError(f"{'; '.join(changes)} since it was built")


def _show(entries: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for entry in entries:
        cells: list[Any] = [*["?"] * 4, "no manifest"]
        if "kind" in entry:
            built = f"{entry['built'][:16].replace('T', ' ')} {entry.get('user') or ''}"
            cells = [
                [entry["kind"]],
                tensors(entry["inputs"]),
                tensors(entry["outputs"]),
                [built.strip()],
                f"{len(entry['changes'])} changed" if entry["changes"] else "as built",
            ]
        rows.append([[entry["model"]], str(entry["version"]), *cells])
    columns = ("model", "version", "kind", "inputs", "outputs", "built (UTC)", "files")
    show(entries, tables.described("", rows, header=columns))
