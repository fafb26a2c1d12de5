"""A model's process that stood still gives no request the answer to another one."""

from __future__ import annotations

import contextlib
import re
import threading

import awkward as ak
import numpy as np
import psutil
import pytest
from tests.server.support import infer
from tests.waiting import PATIENT, until
from tritonclient.utils import InferenceServerException

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

pytestmark = pytest.mark.server
ECHO = sonic.Model("echo", {"x": sonic.Row(["a", "b"])}, {"y": ["a", "b"]})


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Servers take their default of how long a process may stand still."""
    for name in PATIENT:
        monkeypatch.delenv(name)


def model_process(server: sonic.LocalServer) -> psutil.Process:
    below = psutil.Process(server.pid).children(recursive=True)
    return next(one for one in below if one.name().startswith("triton_python"))


def pairs(value: float, rows: int = 8) -> np.ndarray:
    return np.full((rows, 2), value, np.float32)


def test_answers_never_go_to_another_request(light, serve):
    """Triton gives a request up after a second, and takes its answer for that to the next."""
    answered = []

    def ask_next():
        with contextlib.suppress(InferenceServerException):
            answered.append(infer(server, "echo", x=pairs(2))["y"])

    with serve(light, env={}) as server:
        infer(server, "echo", x=pairs(0))
        process = model_process(server)
        process.suspend()
        for _ in range(2):
            with pytest.raises(InferenceServerException, match="is not healthy"):
                infer(server, "echo", x=pairs(1))
        following = threading.Thread(target=ask_next)
        following.start()
        process.resume()
        following.join(60)
        until(lambda: not server.running, what="the server's end")
        assert all(np.array_equal(y, pairs(2)) for y in answered)
        # By itself, or because Triton has meanwhile used memory that it had given back.
        logs = server.logs
        assert "the model's process stood still" in logs or "Signal (" in logs


def test_rows_are_right_while_the_server_starts_again(light, serve, caplog):
    wrong, calls = [], []
    over = threading.Event()

    def score(first: int):
        with Pool(Settings.make(server.url)) as pool:
            while not over.is_set():
                first += 1
                values = pairs(first, 200)
                scores = ECHO(ak.zip({"a": values[:, 0], "b": values[:, 1]}), pool=pool)
                if not np.array_equal(np.asarray(scores.a), values[:, 0]):
                    wrong.append(first)
                calls.append(first)

    with serve(light, env={}, restart=True) as server:
        threads = [threading.Thread(target=score, args=[1000 * k]) for k in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: len(calls) > 20, what="a call")
        first, process = server.pid, model_process(server)
        process.suspend()
        until(lambda: "is not healthy" in caplog.text, what="a request that is given up")
        process.resume()
        until(lambda: server.pid not in (None, first), what="another server")
        before = len(calls)
        until(lambda: len(calls) > before + 20, what="a call")
        over.set()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert re.search(r"was ended by SIG[A-Z]+, and is started again", caplog.text)
