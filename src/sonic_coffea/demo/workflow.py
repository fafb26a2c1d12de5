"""From files to plots: a local Triton, a dask cluster, and a coffea Runner."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sonic_coffea as sonic
from sonic_coffea import provenance
from sonic_coffea._extras import needed
from sonic_coffea.demo.samples import DATA, sample_files
from sonic_coffea.errors import ConfigError, FieldError, nearest, printable
from sonic_coffea.processor import located, run_files

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator, Sequence

    from rich.console import Console

    from sonic_coffea.reporting import Report


# What the extra `demo` adds to the package's own requirements.
_PACKAGES = ("bokeh", "matplotlib", "mplhep", "onnx", "pyarrow", "sklearn", "uproot", "uv")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The results of the demo.

    Attributes
    ----------
    directory : Path
        Where everything is.
    jets : Path
        The scored jets, one Parquet file.
    plots : tuple of Path
        PNG files.
    area_under_roc : float or None
        Of merged tops against other jets; None for data.
    report : Report
        What happened to the requests.
    events, n_jets, n_scored : int
        What was read and scored.
    wall_s : float
        How long the cluster took.
    """

    directory: Path
    jets: Path
    plots: tuple[Path, ...]
    area_under_roc: float | None
    report: Report
    events: int
    n_jets: int
    n_scored: int
    network: str
    wall_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        paths = {"directory": str(self.directory), "jets": str(self.jets)}
        plots = [str(path) for path in self.plots]
        return {**plain, **paths, "plots": plots, "report": self.report.to_dict()}


def run(
    files: Sequence[str | os.PathLike[str]] = (),
    *,
    output: str | os.PathLike[str] = "sonic-demo",
    workers: int = 2,
    chunksize: int = 500,
    console: Console | None = None,
) -> DemoResult:
    """Score the large-radius jets of NanoAOD files, those of the committed sample by default.

    Parameters
    ----------
    files : sequence of path
        NanoAOD files, v9 to v15, MC or data; a dataset is named after its file.
    output : path
        A directory for what comes out; made if need be.
    workers : int
        Worker processes of the dask cluster.
    chunksize : int
        Events a chunk.
    console : rich.console.Console, optional
        Where progress is shown; by default on standard error.

    Raises
    ------
    FieldError
        If a file lacks jets.
    ConfigError
        If a package is missing, a file cannot be read or is given twice, or `output` cannot be
        written in.
    SonicError
        If jets could not be scored; no output is left then.
    """
    from rich.console import Console

    console = console or Console(stderr=True)
    with needed("demo", "the demo"):
        for package in _PACKAGES:
            importlib.import_module(package)
    import awkward as ak
    import pyarrow.parquet as pq

    from sonic_coffea.dask import cluster
    from sonic_coffea.demo.analysis import TopTagging
    from sonic_coffea.demo.plots import draw

    datasets, with_constituents = _datasets(files)
    network, how = "toptagger", "constituents"
    if not with_constituents:
        network = "substructure"
        how = "substructure, as these files have no constituents (NanoAOD has them since v15)"
    directory = _made_folder(output)
    names = ", ".join(f"{name} ({len(paths)} files)" for name, paths in datasets.items())
    console.print(f"scoring every FatJet of {names} by their {how}")
    with contextlib.ExitStack() as stack:
        scratch = tempfile.TemporaryDirectory(prefix=".jets-", dir=directory)
        parts = Path(stack.enter_context(scratch)).absolute()
        server = stack.enter_context(_server(console))
        client = stack.enter_context(cluster(workers))
        where = client.dashboard_link
        console.print(f"dask cluster of {workers} workers; dashboard at {where}")
        pool = stack.enter_context(sonic.connect(server, client=client))
        console.print(f"connected to {pool.settings.servers[0]} from {workers} workers")
        started = time.monotonic()
        out = run_files(
            TopTagging(parts), datasets, client=client, chunksize=chunksize, progress=True
        )
        wall_s = time.monotonic() - started
        console.print("drawing")
        chunks = sorted(parts.glob("*.parquet"))
        # Not by `ak.from_parquet`: its threads abort some processes that end soon after it.
        jets = ak.concatenate([ak.from_arrow(pq.read_table(chunk)) for chunk in chunks])
        provenance.to_parquet(jets, directory / "jets.parquet", *map(provenance.read, chunks))
    plots, area = draw(jets, directory, network=network)
    report = sonic.report(out, wall_s=wall_s)
    result = DemoResult(
        directory=directory,
        jets=directory / "jets.parquet",
        plots=tuple(plots),
        area_under_roc=area,
        report=report,
        events=report.statistics.events,
        n_jets=len(jets),
        n_scored=int(ak.sum(~ak.is_none(jets.top))),
        network=network,
        wall_s=wall_s,
    )
    (directory / "report.json").write_text(json.dumps(result.to_dict(), indent=1), encoding="utf-8")
    result.report.save(directory / "report.html")
    return result


def _made_folder(output: str | os.PathLike[str]) -> Path:
    """Make a directory, and try whether it can be written in."""
    directory = Path(output)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        where = f"in the directory {directory}"
        raise ConfigError(f"cannot write {where}: {error.strerror}") from None
    return directory


def _datasets(files: Sequence[str | os.PathLike[str]]) -> tuple[dict[str, list[str]], bool]:
    """Return datasets with their files, and whether the files have constituents: look first."""
    datasets: dict[str, list[str]] = {}
    if files:
        known = located(files)
        for path in known:
            datasets.setdefault(re.sub(r"[^\w.+-]", "_", Path(path).stem), []).append(path)
    else:
        datasets = {name: [*map(str, paths)] for name, paths in sample_files().items()}
        known = located(path for paths in datasets.values() for path in paths)
    kinds = {path: _inspect(Path(path).name, branches) for path, branches in known.items()}
    if len(set(kinds.values())) > 1:
        bare = next(Path(path).name for path, has in kinds.items() if not has)
        raise ConfigError(
            f"some files have constituents of FatJet and {bare} has none; score them apart"
        )
    return datasets, next(iter(kinds.values()))


def _inspect(name: str, branches: Collection[str]) -> bool:
    """Return whether a file has constituents of FatJet, refusing one that is no NanoAOD."""
    from sonic_coffea.demo.features import SUBSTRUCTURE_FIELDS

    def require(what: str, wanted: str, known: Collection[str]) -> None:
        if wanted not in known:
            raise FieldError(f"{name} has no {what} {wanted!r}; {nearest(wanted, known)}")

    require("collection", "FatJet", {b.split("_")[0] for b in branches if "_" in b})
    has_constituents = any(
        {f"FatJet{pf}_jetIdx", f"{pf}_pt"} <= set(branches) for pf in ("PFCand", "PFCands")
    )
    more = () if has_constituents else SUBSTRUCTURE_FIELDS
    for field in ("pt", "eta", "phi", "mass", "msoftdrop", *more):
        require("branch", f"FatJet_{field}", {b for b in branches if b.startswith("FatJet_")})
    return has_constituents


@contextlib.contextmanager
def _server(console: Console) -> Iterator[sonic.LocalServer]:
    from rich.markup import escape

    with tempfile.TemporaryDirectory(prefix="sonic-demo-") as scratch:
        repository = Path(scratch) / "repository"
        models = {name: DATA / f"{name}.onnx" for name in ("toptagger", "substructure")}
        sonic.build_repository(repository, models, threads=1)
        with console.status("starting Triton") as status:
            server = sonic.LocalServer(
                repository, progress=lambda text: status.update(escape(printable(text)))
            )
            server.start()
        with server:
            console.print(f"Triton {server.metadata.version} is ready at {server.url}")
            yield server
