"""What the examples share: a Triton, the same model in this process, and the comparison."""

import contextlib
import tempfile
import time
from pathlib import Path

import awkward as ak
import numpy as np
import onnxruntime
import rich

import sonic_coffea as sonic
from sonic_coffea.layouts import Outputs, bind_inputs
from sonic_coffea.server import ensure

NETWORKS = Path(__file__).parent / "networks"


@contextlib.contextmanager
def serving(models, *, extras=(), **options):
    """Serve models from a local Triton, and connect to it; a list has versions of one model."""
    ensure(extras=extras)
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        for name, versions in models.items():
            for number, source in enumerate(
                versions if isinstance(versions, list) else [versions], 1
            ):
                sonic.build_repository(repository, {name: source}, version=number, **options)
        with sonic.LocalServer(repository, threads=1) as server, sonic.connect(server) as pool:
            yield pool


def network(name):
    """Return a function that runs a network in this process, on tensors by name."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(NETWORKS / f"{name}.onnx"), options)
    names = [spec.name for spec in session.get_outputs()]
    return lambda tensors: dict(zip(names, session.run(names, dict(tensors)), strict=True))


def directly(model, objects, function, batch):
    """Score objects by running the model in this process, request by request."""
    inputs = bind_inputs(model.inputs, objects, one_request_per=model.one_request_per)
    outputs = Outputs.of(model.outputs, inputs)
    for segment in inputs.segments:
        for start in range(segment.start, segment.stop, batch):
            stop = min(start + batch, segment.stop)
            answer = function(inputs.pack(start, stop))
            outputs.place(inputs.selection(start, stop), stop - start, answer)
    return inputs.rows.unflatten(outputs.content())


def compare(model, objects, function, *, batch=256, rtol=1e-4, atol=1e-5):
    """Score on the server and in this process; print rows/s of both; return the server's scores.

    Raises
    ------
    AssertionError
        If a type differs, or an element by more than rounding, or one is not finite.
    """
    # Kernels are compiled once.
    model(objects[:batch] if isinstance(objects, ak.Array) else objects)
    begun = time.perf_counter()
    pending = model.submit(objects)
    scores = pending.result()
    served_s = time.perf_counter() - begun
    expected = directly(model, objects, function, batch)
    begun = time.perf_counter()
    directly(model, objects, function, batch)
    direct_s = time.perf_counter() - begun
    assert str(scores.type) == str(expected.type), (scores.type, expected.type)
    assert ak.almost_equal(scores, expected, rtol=rtol, atol=atol)
    assert np.isfinite(ak.to_numpy(ak.drop_none(ak.ravel(scores)))).all()
    rows = pending.statistics.objects
    rich.print(
        f"[bold]{model.name}[/]: {rows:,} rows; served {rows / served_s:,.0f} rows/s, "
        f"here {rows / direct_s:,.0f} rows/s, ratio {direct_s / served_s:.2f}; equal"
    )
    return scores


def main(run):
    """Run an example, and print what it found."""
    rich.print(run())
