"""``sonic-coffea status``: this user's local servers on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonic_coffea.cli._connection import AsJson
from sonic_coffea.errors import ServerError, SonicError, nearest
from sonic_coffea.transport import ConnectionOptions, connect_transport, local_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sonic_coffea.transport import ServerRecord

_ENDS_WITHIN_S = 30.0


def status(
    *,
    stop: Annotated[
        str | None, typer.Option(metavar="URL|all", help="End a server, or all of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the local servers of this user on this machine, and stop them."""
    records = local_state.records()
    if stop is not None:
        stopped = _stop(records, stop)
        if as_json:
            typer.echo(json.dumps({"stopped": stopped}))
        else:
            typer.echo("\n".join(f"stopped {url}" for url in stopped) or "there are none")
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
        for label, value in (
            ("models", models),
            ("repository", server["repository"]),
            ("log", server["log"]),
        ):
            typer.echo(f"  {label:<10}  {value}")
    if not servers:
        typer.echo("no local server of yours runs on this machine")


def _stop(records: Sequence[ServerRecord], which: str) -> list[str]:
    chosen = [r for r in records if which in ("all", r.url)]
    inside = [r for r in chosen if r.supervisor_pid is None]
    if inside and which != "all":
        raise ServerError(f"{which} is a part of process {inside[0].pid}, and ends with it")
    if not chosen and which != "all":
        raise ServerError(f"no local server of yours at {which!r}; {nearest(which, urls(records))}")
    chosen = [r for r in chosen if r not in inside]
    for record in chosen:
        # Its supervisor ends it, and removes what it leaves.
        if record.supervisor_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.supervisor_pid, signal.SIGTERM)
    until = time.monotonic() + _ENDS_WITHIN_S
    while any(record.alive for record in chosen):
        if time.monotonic() > until:
            alive = urls([record for record in chosen if record.alive])
            raise ServerError(f"{', '.join(alive)} did not end within {_ENDS_WITHIN_S:g} s")
        time.sleep(0.05)
    return urls(chosen)


def urls(records: Sequence[ServerRecord]) -> list[str]:
    """Return where servers are."""
    return [record.url for record in records]


def _described(record: ServerRecord) -> dict[str, Any]:
    """Return what is recorded of a server, and what it says; never its secret."""
    connection = connect_transport(record.url, options=ConnectionOptions(metadata_timeout_s=5.0))
    try:
        models = [f"{m.name} v{m.version}" for m in connection.models() if m.state == "READY"]
        ready = connection.ready()
    except SonicError:
        models, ready = [], False
    finally:
        connection.close()
    names = ("url", "pid", "repository", "log", "started")
    return {**{name: getattr(record, name) for name in names}, "models": models, "ready": ready}
