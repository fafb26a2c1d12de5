"""Rows that a server loses are tried elsewhere, are None if asked, or are one clear error."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from tests.doubling import MODEL, Doubling, jets
from tests.pool.scripted import LOST, ONE, ScriptedServer, pool_of, refuses
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport import Contract


def test_lost_rows_are_none_if_asked(one: ScriptedServer) -> None:
    one.outputs = ("y", "z")
    one.behaviour = lambda x: refuses(5, 18)(x) if {5, 18} & {*x.flat} else {"y": 2 * x, "z": 3 * x}
    model = sonic.Model("m", MODEL.inputs, {**MODEL.outputs, "z": None})
    array = ak.unflatten(jets(*range(20)), [3, 0, 10, 7])
    array = ak.mask(array, array.pt != 2)
    with pool_of(ONE) as pool:
        pending = model.submit(array, pool=pool, on_error="mask")
        scores = pending.result()
        # Nineteen rows in requests of four: the None is not sent.
        assert ak.flatten(scores).tolist() == [
            None if n == 2 or 5 <= n <= 8 or n >= 17 else {"y": {"twice": 2.0 * n}, "z": 3.0 * n}
            for n in range(20)
        ]
        assert ak.num(scores).tolist() == [3, 0, 10, 7]
        assert pending.statistics.masked == 7
        until(lambda: pool.statistics.masked == 7)
        with pytest.raises(errors.RequestError, match="rows 4..7") as caught:
            model(array, pool=pool)
        assert (caught.value.server, caught.value.model) == (ONE, "m")
        assert (caught.value.rows, caught.value.events) == ((4, 8), (2, 3))


def test_without_any_server_all_is_none(one: ScriptedServer) -> None:

    def metadata(model: str, version: str | None) -> Contract:
        raise LOST

    one.metadata = metadata  # type: ignore[method-assign]
    with pool_of(ONE, retry_timeout_s=0.1) as pool:
        pending = MODEL.submit(jets(*range(8)), pool=pool, on_error="mask")
        assert pending.result().tolist() == [None] * 8
        assert str(pending.result().type) == "8 * ?{twice: float32}"
        for statistics in (pending.statistics, pool.statistics):
            assert (statistics.objects, statistics.masked) == (8, 8)
        hint = r"\(sonic-coffea check grpc://s1:8001 m tries it step by step\)"
        with pytest.raises(errors.ServerLostError, match=hint) as caught:
            MODEL(ak.unflatten(jets(*range(8)), [2, 0, 6]), pool=pool)
        assert caught.value.model == "m"
        assert caught.value.events == (0, 3)


def test_wrong_rows_are_not_masked(one: ScriptedServer) -> None:
    array = ak.zip({"pt": np.array([1, np.nan], np.float32)})
    with pool_of(ONE) as pool:
        with pytest.raises(errors.InputError, match="NaN"):
            MODEL(array, pool=pool, on_error="mask")
        with pytest.raises(errors.ConfigError, match="did you mean 'mask'"):
            MODEL(array, pool=pool, on_error="masked")
        one.behaviour = lambda _: errors.AccessError("no")
        with pytest.raises(errors.AccessError):
            MODEL(jets(*range(3)), pool=pool, on_error="mask")
        one.lacks = True
        with pytest.raises(errors.ModelNotFoundError):
            sonic.Model("other", MODEL.inputs, MODEL.outputs)(
                jets(*range(3)), pool=pool, on_error="mask"
            )


class Masking(Doubling):
    on_error = "mask"

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        return {"scores": scores["m"].twice}


def test_processors_go_on_with_none_for_lost_rows(one: ScriptedServer) -> None:
    one.behaviour = refuses(5)
    events = ak.unflatten(jets(*range(10)), [3, 0, 7])
    with pool_of(ONE):
        out = Masking().process(events)
    assert out["scores"].tolist() == [[0, 2, 4], [], [6, None, None, None, None, 16, 18]]
    statistics = sonic.report(out).statistics
    assert (statistics.masked, statistics.total().rows) == (4, 6)


def test_rows_fail_that_a_server_never_answers_though_it_lives() -> None:
    """However often they are sent a second time."""
    options = {"request_timeout_s": 1, "retry_timeout_s": 0.5, "hedge_after_s": 0.05}
    with FakeServer({"m": FakeModel.of(MODEL)}) as server, sonic.connect(server.url, **options):
        MODEL(jets(*range(4)))
        server.hold()
        with pytest.raises(errors.DeadlineError, match="server did not answer in time"):
            MODEL(jets(*range(4)), timeout_s=5)
        assert len(server.requests) > 2
