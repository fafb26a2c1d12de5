"""How long it takes to start: imports, the first scores of a new process, a local server.

Each time is that of a whole process, as for a new worker or notebook. The peers are the imports
that an analysis needs anyway, tritonclient's blocking call, and a loop that numba has compiled
before, because the import of numba takes most of the time until the first scores.

Notes
-----
The import of the package takes less than a tenth of awkward's, because nothing is loaded before it
is used.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import accelerator
import numpy as np
from harness import Results, interleaved, run

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


def call(code: str, *arguments: str) -> None:
    """Run it in a new process."""
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def measure(results: Results, *, quick: bool) -> None:
    """Time imports, processes that score some rows and end, and servers that start and end."""
    repeats = 1 if quick else 11
    names = list(IMPORTS)[:3] if quick else IMPORTS
    ways = {name: partial(call, IMPORTS[name]) for name in names}
    times = interleaved(ways, repeats, title="imports")
    for name in times:
        against = "import awkward" if name == "import sonic_coffea" else ""
        results.add(times, name, against=against)
    with (
        accelerator.serving(launch_s=0.0, row_s=0.0) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        ways = {name: partial(call, code, server.url, HERE) for name, code in _FIRST.items()}
        loop = Path(folder) / "loop.py"
        loop.write_text(_LOOP)
        ways[LOOP] = partial(subprocess.run, [sys.executable, loop], check=True)
        times = interleaved(ways, repeats, title="first scores")
    bare, ours, _ = ways
    results.add(times, bare)
    results.add(times, LOOP)
    results.add(times, ours, against=LOOP)
    over = np.median(times[ours]) / np.median(times[bare])
    results.note("first 100 rows, sonic-coffea over tritonclient", over)
    started = []
    for _ in range(max(1, repeats // 2)):
        begun = time.perf_counter()
        with accelerator.serving(launch_s=0.0, row_s=0.0):
            started.append(time.perf_counter() - begun)
    results.add({"local server until ready": started}, "local server until ready")


if __name__ == "__main__":
    run(__doc__, "Start-up: new processes and new servers", measure)
