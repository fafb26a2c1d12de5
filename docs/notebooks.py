"""Run the notebooks of the examples, and keep their outputs in them.

``python docs/notebooks.py`` runs them all, ``python docs/notebooks.py first_scores`` one of them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
from jupyter_client import BlockingKernelClient, KernelManager

EXAMPLES = Path(__file__).parents[1] / "examples"
# What differs between machines and runs: folders, and addresses in memory.
_OF_THE_MACHINE = (
    (re.compile(r"/[\w./@+-]*/sonic_coffea/demo/data"), "sonic_coffea/demo/data"),
    (re.compile(r"/(?:[\w.@+-]+/)*tmp[\w]{8}\b"), "/tmp/scratch"),  # noqa: S108
    (
        re.compile(r"(?<![~\w.@+-])/(?:[\w.@+-]+/)*sonic-coffea/logs"),
        "~/.local/state/sonic-coffea/logs",
    ),
)
_WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(notebook: Any, where: Path, *, allow_errors: bool = False) -> None:
    """Run the cells in `where`, and put their outputs into the notebook."""
    # Another process could take a port before the kernel listens; paths of sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        kernel = KernelManager(transport="ipc", connection_file=f"{sockets}/kernel.json")
        kernel.start_kernel(
            # What it says of its threads, if it dies, is not for the cells.
            extra_arguments=["--IPKernelApp.capture_fd_output=False"],
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            cwd=str(where),
        )
        client = kernel.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=300)
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    _run(kernel, client, cell, allow_errors=allow_errors)
        except TimeoutError:
            kernel.signal_kernel(signal.SIGABRT)
            kernel.provisioner.process.wait()
            raise
        finally:
            client.stop_channels()
            kernel.shutdown_kernel(now=True)


def _run(
    kernel: KernelManager, client: BlockingKernelClient, cell: Any, *, allow_errors: bool
) -> None:
    cell.outputs, into_widget, sent = [], False, client.execute(cell.source)
    for message in _said(kernel, client, sent, cell.source):
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_msg":  # a bar of progress begins or ends
            into_widget = bool(content["data"].get("state", {}).get("msg_id", into_widget))
        elif kind in ("stream", "display_data", "execute_result", "error") and not into_widget:
            cell.outputs.append(nbformat.v4.output_from_msg(message))
    while (reply := client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != sent:
        pass  # it was that the kernel is ready
    done = reply["content"]
    cell.execution_count = done["execution_count"]
    if done["status"] != "ok" and not allow_errors:
        raise RuntimeError("\n".join([cell.source, "", *done.get("traceback", [])]))


def _said(
    kernel: KernelManager, client: BlockingKernelClient, sent: str, source: str
) -> Iterator[dict[str, Any]]:
    """Yield what the kernel says of a cell, until it has run."""
    until = time.monotonic() + 300
    while True:
        try:
            message = client.get_iopub_msg(timeout=5)
        except Empty:
            if not kernel.is_alive():
                raise RuntimeError(f"the kernel has died in this cell:\n{source}") from None
            if time.monotonic() > until:
                raise TimeoutError(f"this cell has not ended:\n{source}") from None
            continue
        if message["parent_header"].get("msg_id") != sent:
            continue
        if message["content"].get("execution_state") == "idle":
            return
        yield message


def keep(path: Path) -> None:
    """Run a notebook, and write it with its outputs, without what is particular to this machine."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as where:
        execute(notebook, Path(where))
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not _passes_by(output)]
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = _anywhere(output.text)
            for kind, shown in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = _anywhere(shown)
    nbformat.write(notebook, path)


def _passes_by(output: Any) -> bool:
    """Whether an output is a progress bar, which only a kernel can show, or a warning."""
    data = output.get("data", {"text/plain": output.get("name")})
    return _WIDGET in data or data.get("text/plain", "shown") in ("", "stderr")


def _anywhere(text: str) -> str:
    for pattern, instead in _OF_THE_MACHINE:
        text = pattern.sub(instead, text)
    return text


if __name__ == "__main__":
    for notebook in sorted(EXAMPLES.glob("*.ipynb")):
        if notebook.stem in sys.argv[1:] or not sys.argv[1:]:
            keep(notebook)
