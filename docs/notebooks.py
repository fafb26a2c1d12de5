"""Runs the notebooks of the examples, and keeps what they show in them.

``python docs/notebooks.py`` runs them all, ``python docs/notebooks.py first_scores`` one of them.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import AsyncKernelManager, BlockingKernelClient
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
# What is of one machine and one run: its folders, and addresses in memory.
_OF_THE_MACHINE = (
    (re.compile(r"/[\w./@+-]*/sonic_coffea/demo/data"), "sonic_coffea/demo/data"),
    (re.compile(r"/(?:[\w.@+-]+/)*tmp[\w]{8}\b"), "/tmp/scratch"),  # noqa: S108
    (
        re.compile(r"(?<![~\w.@+-])/(?:[\w.@+-]+/)*sonic-coffea/logs"),
        "~/.local/state/sonic-coffea/logs",
    ),
)
_WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(notebook: Any, where: Path) -> None:
    """Run the cells in `where`; what they show is in the notebook then."""
    over = threading.Event()
    # Ports would be anybody's until the kernel listens at them; and paths of sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        file = f"{sockets}/kernel.json"
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", connection_file=file)
        # A kernel may lose the message that a cell is done, which comes after all that it shows.
        limits = {"timeout": 400, "startup_timeout": 300, "iopub_timeout": 20}
        threading.Thread(target=_wake, args=(file, over), daemon=True).start()
        try:
            resources = {"metadata": {"path": str(where)}}
            NotebookClient(notebook, km=kernel, resources=resources, **limits).execute()
        finally:
            over.set()


def _wake(file: str, over: threading.Event) -> None:
    # Without a message now and then, a kernel can miss that its reply may leave: the descriptors
    # of ZeroMQ's sockets tell of changes only, and the reply comes from another thread.
    client = BlockingKernelClient(connection_file=file)
    while not over.wait(5):
        try:
            if not client.channels_running:
                client.load_connection_file()
                client.start_channels(iopub=False, stdin=False, hb=False, control=False)
            client.kernel_info()
        except FileNotFoundError:  # it has not started yet
            pass


def keep(path: Path) -> None:
    """Run a notebook, and write it with what it shows, but for what is of this machine."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as where:
        execute(notebook, Path(where))
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [one for one in cell.outputs if not _passes_by(one)]
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = _anywhere(output.text)
            for kind, shown in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = _anywhere(shown)
    nbformat.write(notebook, path)


def _passes_by(output: Any) -> bool:
    """Whether an output is a bar of progress, which only a kernel can show, or a warning."""
    data = output.get("data", {"text/plain": output.get("name")})
    return _WIDGET in data or data.get("text/plain", "shown") in ("", "stderr")


def _anywhere(text: str) -> str:
    for pattern, instead in _OF_THE_MACHINE:
        text = pattern.sub(instead, text)
    return text


if __name__ == "__main__":
    for one in sorted(EXAMPLES.glob("*.ipynb")):
        if one.stem in sys.argv[1:] or not sys.argv[1:]:
            keep(one)
