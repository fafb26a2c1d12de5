"""From files to plots: a local Triton, a dask cluster, and a coffea Runner."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import sonic_coffea as sonic
from sonic_coffea import provenance
from sonic_coffea._extras import needed
from sonic_coffea.demo import analysis
from sonic_coffea.demo.features import SUBSTRUCTURE_FIELDS
from sonic_coffea.demo.plots import draw
from sonic_coffea.demo.samples import DATA, sample_files
from sonic_coffea.errors import ConfigError, FieldError, require
from sonic_coffea.processor import located
from sonic_coffea.reporting import Report
from sonic_coffea.scoring import write_files

_JETS = "jets.parquet"
# What the extra `demo` adds to the package's own requirements.
_PACKAGES = "bokeh cryptography matplotlib mplhep onnx pyarrow sklearn uproot uv"


def run(
    files: Sequence[str | os.PathLike[str]] = (),
    *,
    output: str | os.PathLike[str] = "sonic-demo",
    workers: int = 2,
    chunksize: int = 500,
) -> tuple[dict[str, Any], Report]:
    """Score the large-radius jets of NanoAOD files, those of the committed sample by default.

    Parameters
    ----------
    files : sequence of path
        NanoAOD files, v9 to v15, MC or data; a dataset is named after its file.
    output : path
        A folder for the results, which is created; one that holds files must be that of an earlier
        run, whose results are replaced.
    workers : int
        Worker processes of the dask cluster.
    chunksize : int
        Events a chunk.

    Returns
    -------
    dict
        What JSON holds: ``directory``, ``jets`` (a Parquet file) and ``plots`` (PNG files),
        ``area_under_roc`` of merged tops against other jets (None for data), ``network``, the
        numbers ``events``, ``n_jets`` and ``n_scored``, and ``wall_s``, how long the cluster took.
    Report
        What happened to the requests.

    Raises
    ------
    FieldError
        If a file lacks jets.
    ConfigError
        If a package is missing, a file cannot be read or is given twice, or `output` holds files
        of others or cannot be written in.
    SonicError
        If jets could not be scored; no output is left then.
    """
    console = Console(stderr=True)
    with needed("demo", "the demo"):
        for package in _PACKAGES.split():
            importlib.import_module(package)

    datasets, has_constituents, is_simulated = _datasets(files)
    features: Any
    network, features, by = analysis.toptagger(), analysis.toptagger_inputs, "constituents"
    if not has_constituents:
        network, features = analysis.substructure(), None
        by = "substructure, as these files have no constituents (NanoAOD has them since v15)"
    directory = Path(output)
    jets = directory / _JETS
    if any(directory.glob("[!.]*")) and not provenance.is_own(jets):
        raise ConfigError(
            f"the folder {directory} has files that the demo has not written; name a new one"
        )
    names = ", ".join(f"{name} ({len(paths)} files)" for name, paths in datasets.items())
    console.print(f"scoring every FatJet of {names} by their {by}")
    kept = (*analysis.KEPT, *(["is_top"] if is_simulated else []))
    parts = directory.absolute() / f".{_JETS}.{secrets.token_hex(4)}"
    tagging = analysis.TopTagging(network, parts, "FatJet", features, kept)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, parts, ignore_errors=True)
        server = stack.enter_context(_server(console))
        client = stack.enter_context(sonic.dask.cluster(workers))
        console.print(f"dask cluster of {workers} workers; dashboard at {client.dashboard_link}")
        pool = stack.enter_context(sonic.connect(server, client=client))
        console.print(f"connected to {pool.settings.servers[0]} from {workers} workers")
        how = {"client": client, "chunksize": chunksize, "progress": True}
        done = write_files(tagging, datasets, jets, **how)
    console.print("drawing")
    plots, area = draw(jets, network=network.name)
    result = {
        "directory": str(directory),
        "jets": str(jets),
        "plots": plots,
        "area_under_roc": area,
        "report": done.report.to_dict(),
        "events": done.events,
        "n_jets": done.rows,
        "n_scored": done.scored,
        "network": network.name,
        "wall_s": done.report.wall_s,
    }
    (directory / "report.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    done.report.save(directory / "report.html")
    return result, done.report


def _datasets(files: Sequence[str | os.PathLike[str]]) -> tuple[dict[str, list[str]], bool, bool]:
    """Return the files of each dataset, and whether they have constituents and are simulated.

    The fields of the jets are checked.
    """
    sample = {str(p.resolve()): name for name, paths in sample_files().items() for p in paths}
    datasets: dict[str, list[str]] = {}
    kinds, simulated = {}, {}
    for path, branches in located(files or sample).items():
        name = re.sub(r"[^\w.+-]", "_", Path(path).stem) if files else sample[path]
        datasets.setdefault(name, []).append(path)
        has = any({f"FatJet{pf}_jetIdx", f"{pf}_pt"} <= branches for pf in ("PFCand", "PFCands"))
        kinds[has] = simulated["GenPart_pdgId" in branches] = Path(path).name
        fields = "pt", "eta", "phi", "mass", "msoftdrop", *(() if has else SUBSTRUCTURE_FIELDS)
        needs = [f"FatJet_{field}" for field in fields]
        require(needs, branches, f"{kinds[has]} has no branch", FieldError)
    for what, files_of in (("constituents of FatJet", kinds), ("GenPart", simulated)):
        if len(files_of) > 1:
            both = f"{files_of[True]} has {what}, {files_of[False]} has no {what}"
            raise ConfigError(f"{both}; score them apart")
    return datasets, True in kinds, True in simulated


@contextlib.contextmanager
def _server(console: Console) -> Iterator[sonic.LocalServer]:
    with tempfile.TemporaryDirectory(prefix="sonic-demo-") as scratch:
        repository = Path(scratch) / "repository"
        models = {name: DATA / f"{name}.onnx" for name in ("toptagger", "substructure")}
        sonic.build_repository(repository, models, threads=1)
        console.print("starting Triton")
        with sonic.LocalServer(repository) as server:
            console.print(f"Triton {server.metadata.version} is ready at {server.url}")
            yield server
