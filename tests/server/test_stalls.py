"""A model's process that stood still gives no request the answer to another one."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import awkward as ak
import numpy as np
import psutil
import pytest
from tests.waiting import PATIENT, until

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

from .support import infer

pytestmark = pytest.mark.server
ECHO = sonic.Model("echo", {"x": sonic.Row(["a", "b"])}, {"y": ["a", "b"]})


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Servers take their default of how long a process may stand still."""
    for name in PATIENT:
        monkeypatch.delenv(name)


def model_process(server: sonic.LocalServer) -> psutil.Process:
    below = psutil.Process(server.pid).children(recursive=True)
    return next(process for process in below if process.name().startswith("triton_python"))


@pytest.mark.parametrize(("seconds", "is_asked"), [(0.8, True), (1.2, False)])
def test_a_process_that_stood_still_ends_its_server(light, serve, seconds, is_asked):
    """With a request, even for less than the second after which Triton gives the request up."""
    with serve(light) as server, ThreadPoolExecutor() as thread:
        process = model_process(server)
        time.sleep(0.5)  # since the request by which it was warmed up
        process.suspend()
        if is_asked:
            thread.submit(infer, server, "echo", x=np.ones((8, 2), np.float32))
        time.sleep(seconds)  # how long it stands still
        process.resume()
        until(lambda: not server.running, 20.0, "the server's end")
        # On a busy machine, Triton may have used memory that it had given back.
        assert "the model's process stood still" in server.logs or "Signal (" in server.logs


def test_rows_are_right_while_the_server_starts_again(light, serve, caplog):
    """Triton gives a request up after a second, and takes its answer for that to the next."""
    calls, over = [], threading.Event()

    def score(first: int):
        with Pool(Settings.make(server.url)) as pool:
            while not over.is_set():
                first += 1
                values = np.full(200, first, np.float32)
                scores = ECHO(ak.zip({"a": values, "b": values}), pool=pool)
                np.testing.assert_array_equal(scores.a, values)
                calls.append(first)

    with serve(light, restart=True) as server, ThreadPoolExecutor() as threads:
        scoring = [threads.submit(score, 1000 * k) for k in range(4)]
        try:
            until(lambda: len(calls) > 20, what="a call")
            first, process = server.pid, model_process(server)
            process.suspend()
            until(lambda: "is not healthy" in caplog.text, what="a request that is given up")
            process.resume()
            until(lambda: server.pid not in (None, first), what="another server")
            before = len(calls)
            until(lambda: len(calls) > before + 20, what="a call")
        finally:
            over.set()
        for done in scoring:
            done.result(60)
    assert re.search(r"was ended by SIG[A-Z]+, and is started again", caplog.text)
