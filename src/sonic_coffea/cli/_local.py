"""``sonic-coffea serve``, ``status`` and ``server install``: on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonic_coffea.cli._options import AsJson, option
from sonic_coffea.cli._output import show, working
from sonic_coffea.errors import ServerError, SonicError, nearest, printable
from sonic_coffea.transport import ConnectionOptions, connect_transport

if TYPE_CHECKING:
    from sonic_coffea.server import ServerRecord

_ENDS_WITHIN_S = 30.0
_NONE = "no local server of yours runs on this machine"

server_app = typer.Typer(no_args_is_help=True, help="Install the Triton that local servers run.")


def serve(
    repository: Annotated[
        Path, typer.Argument(metavar="REPOSITORY", help="A Triton model repository.")
    ],
    *,
    port: Annotated[
        int | None,
        option(
            "PORT",
            "Listen at a port, 0 for a free one, for users and machines that cannot reach the "
            "Unix socket: all who can connect to it can use the server.",
        ),
    ] = None,
    host: Annotated[
        str | None, option("HOST", "Address of the port: by default loopback; 0.0.0.0 for all.")
    ] = None,
    threads: Annotated[int | None, option("N", "CPU threads of the models.", min=1)] = None,
    runtime: Annotated[
        str | None,
        option(
            "NAME",
            "auto, pip, apptainer, singularity, podman or docker.",
        ),
    ] = None,
    image: Annotated[
        str | None, option("IMAGE", "Image of the container: a name, file or folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model repository to your processes on this machine, until Ctrl-C or `status --stop`.

    With --port, serve it to all who can connect to the port.
    """
    from sonic_coffea.server import LocalServer

    options: dict[str, Any] = {"port": port, "threads": threads, "runtime": runtime, "image": image}
    with working("starting Triton") as progress:
        options |= {} if host is None else {"host": host}
        server = LocalServer(repository, **options, progress=progress).start()
    with server:
        models = [f"{m.name} v{m.version}" for m in server.metadata.models]
        shown = printable(", ".join(models)) or "no model"
        plain = {"url": server.url, "models": models}
        show(plain, f"{shown} at {server.url}; Ctrl-C stops it", as_json=as_json)
        server.wait()
        if not server.ended_on_request:
            raise ServerError(f"the server ended again and again; its log: {server.log_path}")
        typer.echo(f"{server.url} was stopped on request", err=True)


def status(
    *,
    stop: Annotated[str | None, option("URL|all", "Stop this server, or all of them.")] = None,
    as_json: AsJson = False,
) -> None:
    """List, or stop, your local servers on this machine."""
    from sonic_coffea.server import local_servers

    records = local_servers()
    if stop is not None:
        stopped = _stop(records, stop)
        lines = [f"stopped {url}" for url in stopped] or [_NONE]
        show({"stopped": stopped}, *lines, as_json=as_json)
        return
    servers, lines = [_described(record) for record in records], []
    for server in servers:
        # Not a table: paths are to be copied, and a terminal is narrow.
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(server["started"]))
        models = ", ".join(server["models"]) if server["ready"] else "(not ready)"
        lines.append(f"{server['url']}  pid {server['pid']}, since {since}")
        lines.append(f"  models      {printable(models)}")
        lines.append(f"  repository  {printable(server['repository'])}")
        lines.append(f"  log         {printable(server['log'])}")
    show(servers, *(lines or [_NONE]), as_json=as_json)


def _stop(records: Sequence[ServerRecord], which: str) -> list[str]:
    from sonic_coffea.server import local_servers

    if which != "all":
        urls = [record.url for record in records]
        if which not in urls:
            raise ServerError(f"no local server of yours at {which!r}; {nearest(which, urls)}")
        records = [records[urls.index(which)]]
    for record in records:
        # The supervisor ends its server, and removes the server's files.
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.supervisor_pid, signal.SIGTERM)
    stopped = {record.url for record in records}
    until = time.monotonic() + _ENDS_WITHIN_S
    while alive := stopped & {record.url for record in local_servers()}:
        if time.monotonic() > until:
            raise ServerError(f"{', '.join(alive)} did not end within {_ENDS_WITHIN_S:g} s")
        time.sleep(0.05)
    return sorted(stopped)


def _described(record: ServerRecord) -> dict[str, Any]:
    """Return the server's record, and the state and models of the server."""
    options, models, ready = ConnectionOptions(metadata_timeout_s=5.0), [], False
    connecting = connect_transport(record.url, options=options)
    with connecting as connection, contextlib.suppress(SonicError):
        models = [f"{m.name} v{m.version}" for m in connection.models() if m.state == "READY"]
        ready = connection.ready()
    names = ("url", "pid", "repository", "log", "started")
    return {**{name: getattr(record, name) for name in names}, "models": models, "ready": ready}


@server_app.command()
def install(
    *,
    extras: Annotated[
        list[str] | None,
        option(
            "PACKAGE",
            "Also install a package that models need, such as xgboost; may be repeated.",
            "--with",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Install Triton in an environment of its own, so that your packages stay as they are."""
    from sonic_coffea.server import ensure

    with working("installing Triton") as progress:
        installed = ensure(progress=progress, extras=extras or ())
    added = list(installed.extras)
    beside = f" with {', '.join(added)}" if added else ""
    plain = {"version": installed.version, "root": str(installed.root), "extras": added}
    text = printable(f"Triton {installed.version}{beside} is in {installed.root}")
    show(plain, text, as_json=as_json)
