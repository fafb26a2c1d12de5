"""A jet tagger and a FACILE-like network on an accelerator and on this CPU, in real Tritons.

Measured are rows/s by batch size, the rate of the saturated server, and the rate from jagged arrays
to scores, which are compared with each other. Tensors travel in messages. The accelerator is this
machine's GPU in NVIDIA's container (``--runtime docker``, or apptainer, singularity, podman), or a
server elsewhere (``--gpu URL``, with the repository that ``--write FOLDER`` has written). Without
either, only the CPU is measured.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from harness import Results, finish, interleaved, parser
from matplotlib.figure import Figure
from workflow import jets

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.tools import Curve, measure

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

GALLERY = Path(__file__).parents[1] / "examples/gallery"
HITS = ["ieta", "depth", "gain", *(f"s{i}" for i in range(8))]
MODELS = {
    "toptagger": sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json"),
    "facile": sonic.Model("facile", {"hits": sonic.Row(HITS)}, {"energy": None}),
}
CPU, GPU = "CPU", "accelerator"


def write(path: Path) -> Path:
    """Write the model repository."""
    sonic.build_repository(path, {"toptagger": DATA / "toptagger.onnx"})
    sonic.build_repository(
        path, {"facile": GALLERY / "networks/facile.onnx"}, max_batch_size=16_000
    )
    return path


def objects(*, quick: bool) -> dict[str, ak.Array]:
    """Return what each model scores."""
    sys.path.insert(0, str(GALLERY))
    from toys import pulses

    copies = 1 if quick else 20
    return {
        "toptagger": ak.concatenate([jets()] * copies),
        "facile": pulses(50 if quick else 2_000, 2),
    }


@contextlib.contextmanager
def servers(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start what has to be started."""
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        repository = write(Path(folder) / "repository")
        running: dict[str, Any] = {CPU: opened.enter_context(sonic.LocalServer(repository))}
        if options.gpu is not None:
            running[GPU] = options.gpu
        elif options.runtime is not None:
            server = sonic.LocalServer(
                repository, runtime=options.runtime, image=options.image, gpu=True
            )
            running[GPU] = opened.enter_context(server)
        yield running


def curves(results: Results, server: Any, where: str, seconds: float) -> None:
    """Measure rows a second by batch size."""
    settings = Settings.make(server, shared_memory=False)
    for name in MODELS:
        curve: Curve = measure(settings, name, seconds=seconds)
        results.note(f"{name} on the {where}: rows a second, saturated", curve.rows_per_s)
        results.numbers.setdefault("batch, seconds", {}).setdefault(name, {})[where] = [
            curve.rows,
            curve.seconds,
        ]


def end_to_end(results: Results, running: dict[str, Any], repeats: int, *, quick: bool) -> None:
    """Score jagged arrays on all, and compare the scores."""
    with contextlib.ExitStack() as opened:
        pools = {
            where: opened.enter_context(Pool(Settings.make(server, shared_memory=False)))
            for where, server in running.items()
        }
        for name, array in objects(quick=quick).items():
            model = MODELS[name]
            ways = {
                f"{name} on the {where}": lambda m=model, a=array, p=pool: m(a, pool=p)
                for where, pool in pools.items()
            }
            expected, *others = [way() for way in ways.values()]
            for other in others:
                pairs = zip(*(numbers(a) for a in (expected, other)), strict=True)
                for a, b in pairs:
                    np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)
            times = interleaved(ways, repeats, title=name)
            rows = len(next(numbers(expected)))
            for number, way in enumerate(times):
                results.add(times, way, against=next(iter(ways)) if number else "")
                results.note(
                    f"{way}: rows a second, from jagged arrays", rows / np.median(times[way])
                )


def numbers(scores: ak.Array) -> Iterator[np.ndarray]:
    """Yield the numbers of each of the scores."""
    for field in scores.fields or [None]:
        yield ak.to_numpy(ak.flatten(scores if field is None else scores[field], axis=None))


def draw(content: dict[str, Any]) -> Figure:
    """Draw rows a second by batch size."""
    table = content["batch, seconds"]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, (name, curves) in zip(
        np.atleast_1d(figure.subplots(1, len(table))), table.items(), strict=True
    ):
        for where, (rows, seconds) in curves.items():
            axes.loglog(rows, np.array(rows) / np.array(seconds), "o-", label=where)
        axes.set(title=name, xlabel="rows of a request", ylabel="rows a second, one at a time")
        axes.legend()
    return figure


def main() -> None:
    """Run it."""
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--runtime", help="the container engine that runs Triton with a GPU here"
    )
    arguments.add_argument("--image", help="its image")
    arguments.add_argument("--gpu", metavar="URL", help="a server with an accelerator")
    arguments.add_argument("--write", type=Path, help="write the repository there, and do no more")
    options = arguments.parse_args()
    if options.write is not None:
        write(options.write)
        return
    results = Results("Accelerator: a jet tagger and a tiny network for hits, by batch size")
    with servers(options) as running:
        for where, server in running.items():
            curves(results, server, where, 0.05 if options.quick else 1.0)
        end_to_end(results, running, 2 if options.quick else 7, quick=options.quick)
    finish(results, options, draw)


if __name__ == "__main__":
    main()
