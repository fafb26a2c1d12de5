"""A browser without a window, where Chromium is installed: what a page shows, as text."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tornado.ioloop import IOLoop
from tornado.websocket import websocket_connect

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    # Else it calls its maker, and waits for an answer where there is no way to the internet.
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-quic"),
)
# Bokeh's widgets are in shadow trees, which `innerText` of the page leaves out.
_TEXT = """
(function text(node) {
  const below = [...(node.shadowRoot ? node.shadowRoot.children : []), ...(node.children || [])];
  const own = [...(node.childNodes || [])].filter(n => n.nodeType == 3).map(n => n.data);
  return [...own, ...below.map(text)].join(" ");
})(document.body)
"""


@contextlib.contextmanager
def browser() -> Iterator[Callable[[str], Callable[[], str]]]:
    """Yield what opens a URL and returns what tells the page's text now; skip without a browser."""
    found = [path for name in _NAMES if (path := shutil.which(name)) is not None]
    if not found:
        pytest.skip("there is no Chromium")
    with tempfile.TemporaryDirectory() as profile:
        options = (*_OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-port=0")
        process = subprocess.Popen(
            [found[0], *options, "about:blank"], stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            lines = (re.search(r"listening on ws://([^/]+)/", line) for line in process.stderr)
            address = next(line for line in lines if line is not None)[1]
            yield lambda url: _open(address, url)
        finally:
            process.terminate()
            process.communicate()


def _open(address: str, url: str) -> Callable[[], str]:
    request = Request(f"http://{address}/json/new?{url}", method="PUT")
    page = json.load(urlopen(request))["webSocketDebuggerUrl"]  # noqa: S310

    async def evaluate() -> str:
        socket = await websocket_connect(page, max_message_size=2**24)
        question = {"id": 1, "method": "Runtime.evaluate", "params": {"expression": _TEXT}}
        await socket.write_message(json.dumps(question))
        answer: Any = json.loads(await socket.read_message() or "{}")
        socket.close()
        return str(answer["result"]["result"].get("value", ""))

    def text() -> str:
        loop = IOLoop(make_current=False)
        try:
            return str(loop.run_sync(evaluate))
        finally:
            loop.close()

    return text
