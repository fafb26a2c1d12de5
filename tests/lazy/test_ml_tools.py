"""Our triton_wrapper on dask-awkward arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import awkward as ak
import dask
import dask_awkward as dak
import numpy as np
import pytest
from distributed import Client

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.ml_tools import Tensor, triton_wrapper
from sonic_coffea.pool import forget

PLAIN = {"ssl": False}


def padded(values: Any, dtype: str = "float32") -> Any:
    filled = ak.fill_none(ak.pad_none(values, 8, axis=1, clip=True), 0.0)
    return ak.values_astype(filled, dtype)[:, np.newaxis, :]


class Tagger(triton_wrapper):
    dtype = "float32"

    def prepare_awkward(self, output_list: list[str], jets: Any) -> tuple[list[Any], Any]:
        features = ak.concatenate([padded(jets.pf.pt), padded(jets.pf.eta)], axis=1)
        mask = padded(ak.ones_like(jets.pf.pt), self.dtype)
        inputs = {"features": features, "mask": mask}
        return [], {"output_list": output_list, "input_dict": inputs}


@pytest.fixture(scope="module")
def flat(jets: ak.Array) -> ak.Array:
    """Jets in one list, with columns that the model does not need."""
    constituents = ak.drop_none(ak.flatten(jets), axis=0)
    constituents = ak.with_field(constituents, constituents.pt * 2, "mass")
    return ak.zip({"pf": constituents, "n": ak.num(constituents)}, depth_limit=1)


@pytest.fixture(scope="module")
def lazy(flat: ak.Array, as_lazy: Any) -> Any:
    return as_lazy(flat, 500)


@pytest.fixture(scope="module")
def server(repository: Path, installation: Any) -> Iterator[sonic.LocalServer]:
    """A server with a port, as an address of coffea's form has no sockets."""
    with sonic.LocalServer(repository, port=0, stop_timeout_s=0.0) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: sonic.LocalServer) -> str:
    return f"triton+{server.url}/tagger/1"


def test_results_are_the_eager_ones(
    connected: sonic.Pool, url: str, lazy: Any, flat: ak.Array
) -> None:
    wrapper, wanted = Tagger(url, PLAIN), ["scores", "weights"]
    scores = wrapper(wanted, lazy)
    # dask-awkward asks for the type, and for the columns, by arrays without data.
    (columns,) = dak.report_necessary_columns(scores["weights"]).values()
    assert columns == {"pf.pt", "pf.eta"}
    assert connected.statistics.total().requests == 0
    assert list(scores) == wanted
    assert str(scores["scores"]._meta.type) == "## * 2 * float32"
    # Partitions without rows have the same type.
    none = wrapper(["scores"], lazy[lazy.n < 0])["scores"].compute(scheduler="sync")
    assert str(none.type) == "0 * 2 * float32"
    assert connected.statistics.total().requests == 0
    eager = wrapper(wanted, flat)
    sent = connected.statistics.total().rows
    (scored,) = dask.compute(scores, scheduler="threads")
    assert connected.statistics.total().rows == sent + len(flat)
    assert scored["scores"].type == eager["scores"].type
    # The model does not say how long this axis is, so partitions may differ.
    meta, computed = (str(ak.type(a)) for a in (scores["weights"]._meta, scored["weights"]))
    assert meta.partition(" * ")[2] == computed.partition(" * ")[2] == "var * 2 * float32"
    for name in wanted:
        np.testing.assert_allclose(scored[name], eager[name], rtol=0, atol=1e-6)


def test_what_does_not_fit_is_named_when_the_graph_is_built(url: str, lazy: Any) -> None:
    class Flat(Tagger):
        def prepare_awkward(self, output_list: list[str], jets: Any) -> tuple[list[Any], Any]:
            return [output_list, {"features": padded(jets.pf.pt), "mask": jets.n}], {}

    with pytest.raises(errors.ContractError, match=r"'mask' is FP32 \[N\], the model takes"):
        Flat(url, PLAIN)(["scores"], lazy)
    with pytest.raises(errors.ContractError, match="did you mean 'scores'"):
        Tagger(url, PLAIN)(["score"], lazy)
    with pytest.raises(errors.InputError, match="some arrays are lazy"):
        Tagger(url, PLAIN)(ak.Array([1]), lazy)


class Doubled(Tagger):
    dtype = "float64"

    def numpy_call(self, output_list: Any, input_dict: Any) -> dict[str, Tensor]:
        return {n: 2 * a for n, a in super().numpy_call(output_list, input_dict).items()}

    def postprocess_awkward(self, return_array: Any, output_list: Any, jets: Any) -> Any:
        return dak.zip({"top": return_array["scores"][:, 1], "n": jets.n})


def test_methods_can_be_replaced(url: str, lazy: Any, flat: ak.Array) -> None:
    with pytest.warns(UserWarning, match="'mask' .* is float64 and is converted to float32"):
        computed = Doubled(url, PLAIN)(["scores"], lazy).compute(scheduler="sync")
    top = Tagger(url, PLAIN)(["scores"], flat)["scores"][:, 1]
    assert computed.n.tolist() == flat.n.tolist()
    assert computed.top.tolist() == pytest.approx((2 * top).tolist(), abs=1e-6)


@pytest.mark.parametrize("named", [True, False])
def test_on_worker_processes(
    server: sonic.LocalServer, client: Client, url: str, lazy: Any, flat: ak.Array, named: bool
) -> None:
    client.run(forget)  # the pools of another test
    with sonic.connect(server, client=client) if named else nullcontext():
        wrapper = Tagger(url, PLAIN)
        computed = client.compute(wrapper(["scores"], lazy)["scores"]).result()
        expected = wrapper(["scores"], flat)["scores"]
        np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-6)
        # As tasks, which are scored by the pool of the client that sends them.
        pools = [
            client.submit(pool_of, wrapper, workers=[worker], pure=False).result()
            for worker in client.scheduler_info()["workers"]
        ]
    servers = {names for names, _ in pools}
    assert servers == {(server.url,)}
    # Each worker scored some rows, all by one pool, however often the wrapper was unpickled.
    assert sum(rows for _, rows in pools) == len(flat)


def pool_of(wrapper: triton_wrapper) -> tuple[Any, int]:
    return wrapper.pool.settings.servers, wrapper.pool.statistics.total().rows
