"""``sonic-coffea precompile``: compiled code for images, and for disks that cannot be written."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from sonic_coffea.cli._options import AsJson


def precompile(*, as_json: AsJson = False) -> None:
    """Compile the code that packs common inputs, for this and similar processors.

    For images and shared installations: processes that find the code do not compile it.
    """
    from sonic_coffea.layouts import compile_ahead

    with Console(stderr=True).status("compiling; this takes a minute or two"):
        kernels = compile_ahead()
    typer.echo(json.dumps({"kernels": kernels}) if as_json else f"{kernels} kernels are compiled")
