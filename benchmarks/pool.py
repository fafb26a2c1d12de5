"""How much of a server's rate one process gets, from jagged arrays to jagged scores.

The limit is a plain load generator that sends prebuilt tensors and ignores the answers. The peers
are coffea's `triton_wrapper`, a loop written by hand, PyTriton's client, and a blocking call of
tritonclient. All send messages, as they would to a server elsewhere.

Notes
-----
A call of 100 rows takes two or three ms longer than a blocking call whose tensor is ready. This
is the time of Python code: it binds the arrays, compares the model, makes the tensor and the
message, takes the response, and puts the scores back. The chunk of 100 jets below shows these
parts. A chunk of some thousand jets hides them.

The limit is the rate of messages; a share slightly above 1 is noise.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerator
import awkward as ak
import numpy as np
import tritonclient.grpc as triton
from accelerator import FIELDS, MODEL, collection, in_awkward, padded
from harness import Results, interleaved, run

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.server import ensure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


ROWS = accelerator.MAX_ROWS
IN_FLIGHT = (2, 4, 8, 16)
OURS = "sonic-coffea"


def client_of(url: str) -> triton.InferenceServerClient:
    """Return tritonclient's own client."""
    return triton.InferenceServerClient(url.removeprefix("grpc://"))


def input_of(tensor: np.ndarray) -> list[triton.InferInput]:
    """Return a tensor as tritonclient wants it."""
    tensor_input = triton.InferInput("x", tensor.shape, "FP32")
    tensor_input.set_data_from_numpy(tensor)
    return [tensor_input]


@contextlib.contextmanager
def generator(url: str) -> Iterator[Callable[[int, int], float]]:
    """Lend a warm load generator: it sends so many requests, so many at a time.

    What it returns is rows a second. To connect, and to disconnect, is not part of it.
    """
    client = client_of(url)
    inputs = input_of(np.zeros((ROWS, accelerator.FEATURES, accelerator.LENGTH), np.float32))

    def send(requests: int, in_flight: int) -> float:
        free = threading.Semaphore(in_flight)
        failures: list[Any] = []

        def done(result: Any, error: Any) -> None:
            del result
            if error is not None:
                failures.append(error)
            free.release()

        start = time.perf_counter()
        for _ in range(requests):
            free.acquire()
            client.async_infer("accelerator", inputs, done)
        for _ in range(in_flight):
            free.acquire()
        elapsed = time.perf_counter() - start
        if failures:
            raise failures[0]
        return ROWS * requests / elapsed

    try:
        send(max(IN_FLIGHT), max(IN_FLIGHT))
        yield send
    finally:
        client.close()


def saturated(url: str, *, seconds: float) -> float:
    """Return the rows a second of a server that is never without work.

    It is the best of three turns, or a guess if they are so short that nobody wants the figure.
    """
    turns, numbers = (3, IN_FLIGHT) if seconds >= 1.0 else (1, IN_FLIGHT[1:2])
    with generator(url) as send:
        requests = round(max(16, seconds * send(20, 4) / ROWS))
        return max(send(requests, number) for _ in range(turns) for number in numbers)


def tensor_of(jets: ak.Array) -> np.ndarray:
    """Pad the jets of all events with awkward."""
    columns = padded(ak.flatten(jets))
    return np.stack([ak.to_numpy(column).astype("float32") for column in columns], axis=1)


def loop(url: str, batch_size: int) -> Any:
    """Return the loop that analyses have: a blocking call after the other, and tries again."""
    client = client_of(url)

    def call(jets: ak.Array) -> ak.Array:
        x, parts = tensor_of(jets), []
        for start in range(0, len(x), batch_size):
            inputs = input_of(np.ascontiguousarray(x[start : start + batch_size]))
            for last in (False, False, True):
                try:
                    parts.append(client.infer("accelerator", inputs).as_numpy("y"))
                    break
                except triton.InferenceServerException:
                    if last:
                        raise
        return ak.unflatten(np.concatenate(parts), ak.num(jets))

    return call


def pytriton(url: str, batch_size: int) -> Any:
    """Return a call of PyTriton's client, which comes with the server."""
    site = next(ensure().root.glob("lib/python3*/site-packages"))
    sys.path.append(str(site))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pytriton.client import ModelClient

        model_client = ModelClient(url, "accelerator", lazy_init=True, inference_timeout_s=60)

    def call(jets: ak.Array) -> ak.Array:
        x = tensor_of(jets)
        parts = [
            model_client.infer_batch(x=np.ascontiguousarray(x[start : start + batch_size]))["y"]
            for start in range(0, len(x), batch_size)
        ]
        return ak.unflatten(np.concatenate(parts), ak.num(jets))

    return call


def wrapper(url: str, batch_size: int) -> Any:
    """Return a call of coffea's wrapper, whose module imports what trees need."""
    from coffea.ml_tools import triton_wrapper

    class ByHand(triton_wrapper):
        def prepare_awkward(self, output_list: list[str], jets: ak.Array) -> Any:
            """Pad as coffea's documentation does."""
            return [output_list, {"x": in_awkward(jets)}], {}

    wrapped = ByHand(
        f"triton+grpc://{url.removeprefix('grpc://')}/accelerator/1", {"ssl": False}, batch_size
    )

    def call(jets: ak.Array) -> ak.Array:
        return ak.unflatten(wrapped(["y"], ak.flatten(jets))["y"], ak.num(jets))

    return call


def check(scores: ak.Array, jets: ak.Array) -> None:
    """Compare what came back with what the model makes of what was sent."""
    first = ak.fill_none(ak.firsts(jets, axis=2), dict.fromkeys(FIELDS, 0.0))
    assert ak.all(scores.a == first.f0)
    assert ak.all(scores.b == first.f1)


def throughput(results: Results, url: str, rows: int, repeats: int) -> None:
    """Compare rows a second with those of the load generator."""
    jets = collection(rows, mean=45)
    messages = Settings.make(url, shared_memory=False)
    with generator(url) as send, Pool(messages) as pool:
        check(MODEL(jets, pool=pool), jets)
        ways: dict[str, Any] = {
            f"load generator, {n} in flight": partial(send, rows // ROWS, n)
            for n in (1, *IN_FLIGHT)
        }
        ways[OURS] = partial(MODEL, jets, pool=pool)
        times = interleaved(ways, repeats, title="throughput")
        results.numbers["statistics"] = pool.statistics.total().to_dict()
    rates = {name: rows / np.median(taken) for name, taken in times.items()}
    best = max(rate for name, rate in rates.items() if name.startswith("load"))
    small = jets[: len(jets) // 10]
    peers = {
        f"{name}, batch {size}": partial(make(url, size), small)
        for name, make in {
            "coffea's triton_wrapper": wrapper,
            "loop by hand": loop,
            "PyTriton's client": pytriton,
        }.items()
        for size in (256, 1024)
    }
    slow = interleaved(peers, max(1, repeats - 2), title="peers")
    rates |= {name: len(ak.flatten(small)) / np.median(taken) for name, taken in slow.items()}
    for name in times:
        results.add(times, name)
    for name in slow:
        results.add(slow, name, called=f"{name}, a tenth of the jets")
    results.numbers["rows a second"] = rates
    results.numbers["share of the saturated server"] = {n: rate / best for n, rate in rates.items()}


def latency(results: Results, url: str, repeats: int) -> None:
    """Compare a small chunk with a blocking call whose tensors are ready."""
    jets = collection(100, mean=45)
    client = client_of(url)
    inputs = input_of(MODEL.inputs["x"].pack(jets))
    with sonic.connect(url, shared_memory=False):
        ways = {
            "blocking call, 100 rows": lambda: client.infer("accelerator", inputs),
            "sonic-coffea, 100 rows": lambda: MODEL(jets),
        }
        results.compare(ways, repeats, peer=True, at_most=1.2)
    client.close()


def measure(results: Results, *, quick: bool) -> None:
    """Measure both on one server, at a port as PyTriton's client wants it."""
    with tempfile.TemporaryDirectory() as folder:
        repository = accelerator.write(Path(folder) / "repository")
        with sonic.LocalServer(repository, port=0) as server:
            latency(results, server.url, 20 if quick else 200)
            throughput(results, server.url, 8_192 if quick else 102_400, 2 if quick else 7)
    for name, share in results.numbers["share of the saturated server"].items():
        print(f"{name}: {share:.0%} of the saturated server")


if __name__ == "__main__":
    title = "Pool: a stand-in accelerator of 2 ms + 5 µs a row, in a real Triton"
    run(__doc__, title, measure)
