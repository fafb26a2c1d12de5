"""``sonic-coffea status``: this user's local servers on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonic_coffea.cli._options import AsJson
from sonic_coffea.errors import ServerError, SonicError, nearest, printable
from sonic_coffea.transport import ConnectionOptions, Timeouts, connect_transport, local_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sonic_coffea.transport import ServerRecord

_ENDS_WITHIN_S = 30.0
_NONE = "no local server of yours runs on this machine"


def status(
    *,
    stop: Annotated[
        str | None, typer.Option(metavar="URL|all", help="Stop this server, or all of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List, or stop, your local servers on this machine."""
    records = local_state.records()
    if stop is not None:
        stopped = _stop(records, stop)
        shown = "\n".join(f"stopped {url}" for url in stopped) or _NONE
        typer.echo(json.dumps({"stopped": stopped}) if as_json else shown)
        return
    servers = [_described(record) for record in records]
    if as_json:
        typer.echo(json.dumps(servers))
        return
    for server in servers:
        # Not a table: paths are to be copied, and a terminal is narrow.
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(server["started"]))
        models = ", ".join(server["models"]) if server["ready"] else "(not ready)"
        typer.echo(f"{server['url']}  pid {server['pid']}, since {since}")
        typer.echo(f"  models      {printable(models)}")
        typer.echo(f"  repository  {printable(server['repository'])}")
        typer.echo(f"  log         {printable(server['log'])}")
    if not servers:
        typer.echo(_NONE)


def _stop(records: Sequence[ServerRecord], which: str) -> list[str]:
    if which != "all":
        named = {record.url: record for record in records}
        if which not in named:
            raise ServerError(f"no local server of yours at {which!r}; {nearest(which, named)}")
        records = [named[which]]
        if named[which].supervisor_pid is None:
            pid = named[which].pid
            raise ServerError(f"{which} is a part of process {pid}, and ends with it")
    chosen = []
    for record in records:
        # Its supervisor ends it, and removes what it leaves.
        if record.supervisor_pid is not None:
            chosen.append(record)
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.supervisor_pid, signal.SIGTERM)
    until = time.monotonic() + _ENDS_WITHIN_S
    while any(record.alive for record in chosen):
        if time.monotonic() > until:
            alive = ", ".join(record.url for record in chosen if record.alive)
            raise ServerError(f"{alive} did not end within {_ENDS_WITHIN_S:g} s")
        time.sleep(0.05)
    return [record.url for record in chosen]


def _described(record: ServerRecord) -> dict[str, Any]:
    """Return what a server's record and the server itself say; never its secret."""
    options, models, ready = ConnectionOptions(timeouts=Timeouts(metadata_s=5.0)), [], False
    connection = connect_transport(record.url, options=options)
    with contextlib.closing(connection), contextlib.suppress(SonicError):
        models = [f"{m.name} v{m.version}" for m in connection.models() if m.state == "READY"]
        ready = connection.ready()
    names = ("url", "pid", "repository", "log", "started")
    return {**{name: getattr(record, name) for name in names}, "models": models, "ready": ready}
