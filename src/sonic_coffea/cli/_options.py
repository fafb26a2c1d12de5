"""Options that commands share, and how they reach a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sonic_coffea.cli._output import usage
from sonic_coffea.pool import Settings

# Without a metavar, typer shows a flag as if it took a value.
FLAG = ""
AsJson = Annotated[
    bool, typer.Option("--json", metavar=FLAG, help="Print the result as JSON, and nothing else.")
]
Url = Annotated[str, typer.Argument(metavar="URL", help="grpc://host:port, or grpcs:// for TLS.")]
TokenFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="File with a bearer token.")
]
Headers = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="A header of each call.")
]
Pem = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A PEM file, for TLS.")]


def settings_of(
    url: str,
    token_file: Path | None,
    headers: list[str] | None,
    tls_root: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> Settings:
    """Return a server, and how it is connected."""
    named = {}
    for header in headers or ():
        name, equals, value = header.partition("=")
        if not equals:
            raise typer.BadParameter(f"expected NAME=VALUE, got {header!r}", param_hint="--header")
        named[name] = value
    files = {"tls_root": tls_root, "tls_cert": tls_cert, "tls_key": tls_key}
    pem = {name: str(path) for name, path in files.items() if path is not None}
    with usage():
        return Settings.make(url, token=token_file, headers=named, **pem)
