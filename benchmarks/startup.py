"""How long it takes to start: imports, the first scores of a new process, a local server.

Each time is that of a whole process, as for a new worker or notebook. The peers are the imports
that an analysis needs anyway, tritonclient's blocking call, and a loop that numba has compiled
before, because the import of numba takes most of the time until the first scores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import accelerator
import numpy as np
from harness import Results, finish, interleaved, parser
from matplotlib.figure import Figure

import sonic_coffea as sonic

HERE = str(Path(__file__).parent)
IMPORTS = {
    "python": "",
    "import awkward": "import awkward",
    "import sonic_coffea": "import sonic_coffea",
    "import tritonclient.grpc": "import tritonclient.grpc",
    "import coffea.ml_tools": "import coffea.ml_tools",
    "import coffea.nanoevents": "import coffea.nanoevents",
}
_FIRST = {
    "first 100 rows, tritonclient": """
import sys
sys.path.insert(0, sys.argv[2])
import numpy as np, tritonclient.grpc as triton
client = triton.InferenceServerClient(sys.argv[1])
tensor = triton.InferInput("x", [100, 10, 64], "FP32")
tensor.set_data_from_numpy(np.zeros((100, 10, 64), "float32"))
client.infer("accelerator", [tensor])
""",
    "first 100 rows, sonic-coffea": """
import sys
import awkward as ak, numpy as np, sonic_coffea as sonic
numbers = ak.unflatten(np.zeros(6400, "float32"), 64)
jets = ak.unflatten(ak.zip({f"f{i}": numbers for i in range(10)}), 2)
fields = [f"f{i}" for i in range(10)]
model = sonic.Model("accelerator", {"x": sonic.Padded(fields, 64)}, {"y": ["a", "b"]})
with sonic.connect(sys.argv[1], shared_memory=False):
    model(jets)
""",
}

# What numba takes for any function that it has compiled before, with awkward in the process.
_LOOP = """
import awkward, numba, numpy as np

@numba.njit(cache=True, nogil=True)
def add(x):
    total = 0.0
    for number in x:
        total += number
    return total

add(np.zeros(10))
"""
LOOP = "a compiled loop of numba's, from its cache"


def run(code: str, *arguments: str) -> None:
    """Run it in a new process."""
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def imports(results: Results, repeats: int) -> None:
    """Time what is imported."""
    times = interleaved(
        {name: partial(run, code) for name, code in IMPORTS.items()}, repeats, title="imports"
    )
    for name in times:
        against = "import awkward" if name == "import sonic_coffea" else ""
        results.add(times, name, against=against)


def first(results: Results, repeats: int) -> None:
    """Time processes that score some rows and end, and servers that start and end."""
    with tempfile.TemporaryDirectory() as folder:
        repository = accelerator.write(Path(folder) / "repository", launch_s=0.0, row_s=0.0)
        with sonic.LocalServer(repository) as server:
            ways = {name: partial(run, code, server.url, HERE) for name, code in _FIRST.items()}
            loop = Path(folder) / "loop.py"
            loop.write_text(_LOOP)
            ways[LOOP] = partial(subprocess.run, [sys.executable, loop], check=True)
            times = interleaved(ways, repeats, title="first scores")
        call, ours, _ = ways
        results.add(times, call)
        results.add(times, LOOP)
        results.add(times, ours, against=LOOP)
        over = np.median(times[ours]) / np.median(times[call])
        results.note("first 100 rows, sonic-coffea over tritonclient", over)
        started = []
        for _ in range(max(2, repeats // 2)):
            begun = time.perf_counter()
            with sonic.LocalServer(repository):
                started.append(time.perf_counter() - begun)
        results.add({"local server until ready": started}, "local server until ready")


def draw(content: dict[str, Any]) -> Figure:
    """Draw the times."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    names = [m["name"] for m in content["measurements"]]
    colors = ["C1" if "sonic" in name else "C0" for name in names]
    axes.barh(names, [m["median_s"] for m in content["measurements"]], color=colors)
    axes.set_xlabel("time of the whole process (s)")
    axes.invert_yaxis()
    return figure


def main() -> None:
    """Run it."""
    options = parser(__doc__ or "").parse_args()
    results = Results("Start-up: new processes and new servers")
    imports(results, 1 if options.quick else 11)
    first(results, 1 if options.quick else 11)
    finish(results, options, draw)


if __name__ == "__main__":
    main()
